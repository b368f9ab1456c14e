"""Networks with shared weights in the place of their kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import core, models, perf, sharding, train
from hpcjax.compress import sharing
from hpcjax.compress.sharing import SharingOptions, make_plan
from hpcjax.optim import all_reduce_mean

KEY = jax.random.key(0)
NETWORK = models.mlp((4, 4, 1), 5, widths=(16, 16, 16))
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4, 4, 1)), "float32")
LABELS = jnp.arange(16) % 5


def loss(model, params, state, x=X, labels=LABELS):
    logits, _ = model.apply(params, state, x, train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plan_of(model, groups, share, **options):
    layers = sharing.list_layers(jax.eval_shape(model.init, KEY)[0])
    budget = int(share * sum(layer.size for layer in layers))
    return make_plan(layers, groups(layers), budget, SharingOptions(**options))


def steps(model, count=20):
    """Parameters after some steps of momentum."""
    params, state = model.init(KEY)
    tx = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(params, moments):
        grads = jax.grad(lambda p: loss(model, p, state))(params)
        updates, moments = tx.update(grads, moments)
        return optax.apply_updates(params, updates), moments

    moments = tx.init(params)
    for _ in range(count):
        params, moments = step(params, moments)
    return params


@pytest.mark.acceptance("ssn", 3)
def test_layers_that_share_nothing_train_as_without_a_plan():
    plan = plan_of(NETWORK, sharing.group_alone, 1)
    shared = steps(sharing.share(NETWORK, plan))
    assert not jax.tree.leaves(shared["shared"])
    alone = sharing.expand(shared, plan)
    for one, other in zip(
        jax.tree.leaves(alone), jax.tree.leaves(steps(NETWORK)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_network_computes_with_the_weights_that_stores_make():
    plan = plan_of(NETWORK, sharing.group_all, 0.5)
    model = sharing.share(NETWORK, plan)
    params, state = model.init(KEY)
    (kept,) = params["shared"].values()
    hidden = np.asarray(X).reshape(16, -1)
    weights = sharing.generate(kept, plan)
    for number in range(4):
        name = f"dense_{number}" if number < 3 else "head"
        own = next(layer for layer in plan.layers if layer.path == f"{name}/kernel")
        made = np.asarray(weights[own.name])
        hidden = hidden @ made.T + np.asarray(params[name]["bias"])
        hidden = np.maximum(hidden, 0) if number < 3 else hidden
    logits, _ = model.apply(params, state, X, train=False)
    np.testing.assert_allclose(logits, hidden, rtol=1e-4, atol=1e-5)
    whole, _ = NETWORK.apply(sharing.expand(params, plan), state, X, train=False)
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-6)
    assert NETWORK.layers
    assert model.layers == ()


@pytest.mark.slow
def test_stacked_blocks_are_layers_of_their_own():
    config = models.CausalLmConfig(depth=3, width=8, heads=2)
    network = config.make((8,), 11)
    params, state = network.init(KEY)
    layers = sharing.list_layers(params, ("mlp/.*kernel$",), ("^blocks/",))
    assert len(layers) == 6
    # The first block's matrices share nothing, the others share one store each.
    groups = [layer.path if layer.index else layer.name for layer in layers]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    plan = make_plan(layers, [numbers[g] for g in groups], 4 * layers[0].size)
    assert [window.kind for window in plan.windows].count("own") == 2
    shared, _ = sharing.share(network, plan).init(KEY)
    whole = sharing.expand(shared, plan)
    for path, leaf in core.trees.flatten(params).items():
        assert core.trees.flatten(whole)[path].shape == leaf.shape
    for layer in layers:
        kernel = core.trees.flatten(whole)[layer.path]
        first = core.trees.flatten(params)[layer.path][0]
        np.testing.assert_array_equal(kernel[0], first)
        np.testing.assert_array_equal(kernel[1], kernel[2])
    tokens = jnp.zeros((1, 8), "int32")
    one = sharing.share(network, plan).apply(shared, state, tokens, train=False)[0]
    other = network.apply(whole, state, tokens, train=False)[0]
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.acceptance("ssn", 10)
def test_devices_exchange_stores_and_what_is_not_shared():
    plan = plan_of(NETWORK, sharing.group_all, 0.25)
    model = sharing.share(NETWORK, plan)
    params, state = model.init(KEY)
    mesh = sharding.make_mesh({"data": 8})
    mean = all_reduce_mean("data")

    def gradients(params, x, labels):
        _, grads = sharding.local_value_and_grad(
            lambda p: loss(model, p, state, x, labels), "data"
        )(params)
        return mean.update(grads, mean.init(params))[0]

    compiled = (
        jax.jit(
            jax.shard_map(
                gradients,
                mesh=mesh,
                in_specs=(P(), P("data"), P("data")),
                out_specs=P(),
            )
        )
        .lower(params, X, LABELS)
        .compile()
    )
    sent = perf.collective_bytes(compiled, "all-reduce")
    assert sent == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    whole = sum(layer.size for layer in plan.layers)
    assert sent < 4 * 0.5 * whole


@pytest.mark.slow
@pytest.mark.parametrize("upsample", ["inter", "mask", "wavg"])
def test_weights_that_are_made_again_are_not_kept_for_the_backward_pass(upsample):
    network = models.mlp((16, 16, 1), 4, widths=(256, 256, 256, 320))
    plan = plan_of(network, sharing.group_all, 0.24, upsample=upsample)
    assert {window.kind for window in plan.windows} == {"templates", upsample}
    model = sharing.share(network, plan, remat=True)
    params, state = model.init(KEY)
    x = jnp.ones((2, 16, 16, 1))
    _, pull = jax.vjp(lambda p: loss(model, p, state, x, LABELS[:2]), params)
    store = plan.stores[0][1]
    kept = [leaf.size for leaf in jax.tree.leaves(pull) if leaf.size != store]
    assert max(kept) <= 2 * 320


@pytest.mark.acceptance("ssn", 11)
def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    plan = plan_of(NETWORK, sharing.group_all, 0.5)
    other = plan_of(NETWORK, sharing.group_by_shape, 0.5)
    params, _ = sharing.share(NETWORK, plan).init(KEY)
    checkpoints = train.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, params, {})
    checkpoints.wait()
    restored = checkpoints.restore(params).state
    for one, two in zip(
        jax.tree.leaves(restored), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    wrong, _ = sharing.share(NETWORK, other).init(KEY)
    with pytest.raises(core.ConfigError, match=other.digest):
        checkpoints.restore(wrong)
    checkpoints.close()
    with pytest.raises(core.ConfigError, match=f"plan {other.digest}"):
        sharing.expand(params, other)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sharing.list_layers({"a": jnp.ones(3)}, ("a",)), "a must be"),
        (lambda: sharing.list_layers({"a": jnp.ones(3)}, ("b",)), "matches 'b'"),
        (lambda: sharing.list_layers({}, ("(",)), "regular expressions"),
    ],
)
def test_parameters_that_cannot_share_are_refused(make, words):
    with pytest.raises(core.ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (sharing.Layer("dense_9/kernel", (16, 16)), "no such path"),
        (sharing.Layer("dense_1/kernel", (16, 4)), r"there it is \(16, 16\)"),
    ],
)
def test_a_plan_of_another_network_is_refused(layer, words):
    plan = make_plan([layer], (0,), layer.size)
    with pytest.raises(core.ConfigError, match=words):
        sharing.share(NETWORK, plan).init(KEY)


def test_a_stack_is_in_order_whatever_the_order_of_its_layers():
    kernels = {"w": {"kernel": jnp.zeros((3, 2, 4))}}
    layers = sharing.list_layers(kernels, stacked=("w/kernel",))[::-1]
    plan = make_plan(layers, (0, 0, 0), 24)
    made = sharing.init(jax.random.key(0), plan)
    whole = sharing.expand({"shared": {plan.digest: made}}, plan)
    by_name = sharing.generate(made, plan)
    for number in range(3):
        expected = by_name[f"w/kernel[{number}]"].T
        np.testing.assert_array_equal(whole["w"]["kernel"][number], expected)
