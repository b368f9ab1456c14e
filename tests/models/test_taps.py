"""Observing layers: raw inputs and output gradients against autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from hpcjax import core, models
from hpcjax.core import trees
from tests.models import helpers
from tests.models.registry import REGISTRY

EPS = np.finfo(np.float32).eps
NAMES = sorted(REGISTRY)


def raw(x, g):
    return {"x": x, "g": g}


def moment(x, g):
    """A statistic that adds up over examples: xᵀ g."""
    return x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])


def kernel_gradient(spec, x, g):
    """xᵀ g of a dense layer; of a convolution with patches for x."""
    if spec.kind == "dense":
        return jnp.einsum("...i,...o->io", x, g)
    rows, columns = spec.options["kernel_size"]
    patches = lax.conv_general_dilated_patches(
        x,
        (rows, columns),
        spec.options["strides"],
        spec.options["padding"],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    split = patches.reshape(*patches.shape[:3], x.shape[-1], rows, columns)
    return jnp.einsum("nhwcuv,nhwo->uvco", split, g)


@functools.cache
def observed(name):
    """Gradients of parameters and of raw slots at every layer, from one pass."""
    model, params, state, x, labels = helpers.instance(name)
    asked = {spec.path: raw for spec in model.layers}
    taps = core.make_slots(model, asked, params, state, x)

    def loss(params, taps):
        return helpers.loss(model, params, state, x, labels, taps)[0]

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, taps)


@pytest.mark.quick("linear", "mlp")
@pytest.mark.parametrize("name", [n for n in NAMES if n != "resnet50"])
def test_inputs_times_output_gradients_are_the_kernel_gradients(name):
    model, *_ = helpers.instance(name)
    grads, taps = observed(name)
    flat = trees.flatten(grads)
    for spec in model.layers:
        seen = taps[spec.path].slot
        form = functools.partial(kernel_gradient, spec)
        form = form if spec.options["depth"] is None else jax.vmap(form)
        found, expected = form(seen["x"], seen["g"]), flat[f"{spec.path}/kernel"]
        scale = float(jnp.abs(seen["x"]).max() * jnp.abs(seen["g"]).max())
        terms = seen["g"].size // seen["g"].shape[-1]
        atol = 8 * EPS * np.sqrt(terms) * scale
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
        assert jnp.abs(expected).max() > 0, spec.path
        if spec.options["use_bias"]:
            axes = range(0 if spec.options["depth"] is None else 1, seen["g"].ndim - 1)
            np.testing.assert_allclose(
                seen["g"].sum(tuple(axes)), flat[f"{spec.path}/bias"], atol=atol, rtol=0
            )


@pytest.mark.quick("linear", "mlp")
@pytest.mark.parametrize("name", ["mlp", "linear", "resnet8"])
def test_rows_of_the_last_gradient_are_per_example(name):
    model, params, state, x, labels = helpers.instance(name)
    logits, _ = model.apply(params, state, x, train=True)
    expected = (jax.nn.softmax(logits) - jnp.eye(logits.shape[-1])[labels]) / len(x)
    found = observed(name)[1]["head"].slot["g"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=32 * EPS)


@pytest.mark.quick("gpt2_remat", "linear", "resnet8_group")
@pytest.mark.parametrize("name", NAMES)
def test_a_tap_changes_no_value_and_records_input_and_output(name):
    model, params, state, x, _ = helpers.instance(name)
    taps = {
        spec.path: core.Tap(forward=lambda x, y: {"x": x, "y": y})
        for spec in model.layers
    }

    def both(params, state):
        seen = model.apply(params, state, x, train=True, taps=taps)
        return *seen, *model.apply(params, state, x, train=True)

    y, new, plain, plain_state = jax.jit(both)(params, state)
    for a, b in zip(*map(jax.tree.leaves, (y, plain)), strict=True):
        atol = 64 * EPS * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)
    seen = new.get(core.SEEN, {})  # nothing of a model without layers
    assert set(seen) == set(taps)
    assert core.SEEN not in plain_state
    flat = trees.flatten(params)
    for spec in model.layers:
        if spec.kind == "dense":
            seen, kernel = new[core.SEEN][spec.path], flat[f"{spec.path}/kernel"]
            expected = jnp.einsum("l...i,lio->l...o", *_stacked(seen["x"], kernel))
            if spec.options["use_bias"]:
                bias = flat[f"{spec.path}/bias"].reshape(-1, kernel.shape[-1])
                expected += jnp.expand_dims(bias, range(1, expected.ndim - 1))
            found = seen["y"].reshape(expected.shape)
            scale = float(jnp.abs(expected).max()) + 1
            np.testing.assert_allclose(found, expected, rtol=0, atol=64 * EPS * scale)
    _, later = jax.eval_shape(lambda s: model.apply(params, s, x, train=False), new)
    assert core.SEEN not in later


def _stacked(x, kernel):
    return (x, kernel) if kernel.ndim == 3 else (x[None], kernel[None])


@pytest.mark.quick("full")
@pytest.mark.parametrize("remat", ["full", "dots", "offload"])
def test_remat_changes_no_gradient_and_no_statistic(remat):
    entry = REGISTRY["gpt2"]
    _, params, state, x, labels = helpers.instance("gpt2")
    results = []
    for choice in ("none", remat):
        config = models.CausalLmConfig(width=8, heads=2, remat=choice)
        model = config.make(entry.inputs, entry.outputs)
        asked = {spec.path: raw for spec in model.layers}
        taps = core.make_slots(model, asked, params, state, x)

        def loss(params, taps, model=model):
            return helpers.loss(model, params, state, x, labels, taps)[0]

        results.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(params, taps))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * EPS * (1 + np.abs(a).max()))


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("name", ["mlp", "resnet8_group", "gpt2", "gpt2_remat", "bert"])
def test_shard_map_gives_the_sum_of_single_runs(name):
    model, params, state, *_ = helpers.instance(name)
    x, labels = helpers.batch_of(REGISTRY[name], 8)
    asked = {s.path: moment for s in model.layers if s.kind == "dense"}
    taps = core.make_slots(model, asked, params, state, x[:1])

    def statistics(params, taps, x, labels):
        def loss(taps):
            return helpers.loss(model, params, state, x, labels, taps)[0]

        return jax.grad(loss)(taps)

    def local(params, taps, x, labels):
        varying = jax.lax.pcast((params, taps), "data", to="varying")
        return jax.lax.psum(statistics(*varying, x, labels), "data")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, same = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(same, same, split, split), out_specs=same
    )
    found = jax.jit(mapped)(params, taps, x, labels)
    single = jax.jit(statistics)
    rows = [jax.tree.map(lambda a, i=i: a[i : i + 1], (x, labels)) for i in range(8)]
    singles = [single(params, taps, *row) for row in rows]
    expected = jax.tree.map(lambda *parts: sum(parts), *singles)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * (1 + np.abs(b).max()))


def test_a_path_that_is_no_layer_names_the_nearest():
    model, params, state, x, _ = helpers.instance("mlp")
    with pytest.raises(ValueError, match="did you mean 'dense_1'"):
        model.apply(params, state, x, train=True, taps={"dense_l": core.Tap()})


class Shared(nnx.Module):
    """One layer used twice, another not at all."""

    def __init__(self):
        self.layer = models.Dense(3, 3, policy=core.Policy())
        self.idle = models.Dense(3, 3, policy=core.Policy())

    def __call__(self, x, *, train, key):
        return self.layer(self.layer(x))


def test_uses_of_a_shared_layer_add_up_in_the_slot():
    model = models.from_nnx(Shared)
    params, state = model.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    tap = {"layer": core.Tap(slot=jnp.zeros((3, 3)), backward=moment)}

    def loss(params, tap):
        return jnp.sum(jnp.sin(model.apply(params, state, x, train=True, taps=tap)[0]))

    grads, taps = jax.grad(loss, argnums=(0, 1))(params, tap)
    np.testing.assert_allclose(
        taps["layer"].slot, grads["layer"]["kernel"], rtol=0, atol=64 * EPS
    )


@pytest.mark.parametrize(
    ("path", "message"), [("layer", "used again"), ("idle", "not used")]
)
def test_forward_records_need_exactly_one_use(path, message):
    model = models.from_nnx(Shared)
    params, state = model.init(jax.random.key(0))
    taps = {path: core.Tap(forward=lambda x, y: x)}
    with pytest.raises(ValueError, match=message):
        model.apply(params, state, jnp.ones((1, 3)), train=True, taps=taps)
