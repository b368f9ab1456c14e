"""Spatial experts against numpy, place by place, and against two explicit passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import layers, sharding
from hpcjax.core import ConfigError
from hpcjax.layers import Damping, RoutingLoss, _spatial_experts

# Epsilons of the size of errors: what scales these must show.
RC = RoutingLoss(quantile=0.4, eps=0.5)
DAMPING = Damping(quantile=0.4, eps=1.0)
BATCH, HEIGHT, WIDTH, INPUTS, EXPERTS = 2, 4, 3, 2, 6


def arrays(outputs=1, experts=EXPERTS, *, height=HEIGHT, examples=False, seed=0):
    """Fields, filters, gates of places or of examples and places, and targets."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    grid = (height, WIDTH)
    return (
        draw(BATCH, *grid, INPUTS),
        draw(3, 3, INPUTS, experts),
        draw(*[BATCH] * examples, *grid, experts),
        draw(BATCH, *grid, outputs),
    )


def loop(x, kernel, gate, outputs, *, weighted):
    """The layer by a loop over places, each with its own sorted experts, float64."""
    x, kernel, gate = (np.asarray(each, np.float64) for each in (x, kernel, gate))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = np.zeros((*x.shape[:3], outputs))
    for b, i, j in np.ndindex(x.shape[:3]):
        place = gate[b, i, j] if gate.ndim == 4 else gate[i, j]
        patch = padded[b, i : i + 3, j : j + 3]
        for c, expert in enumerate(np.argsort(-place, kind="stable")[:outputs]):
            weight = place[expert] if weighted else 1.0
            y[b, i, j, c] = weight * (patch * kernel[..., expert]).sum()
    return y


@pytest.mark.acceptance("smoe", 1)
@pytest.mark.parametrize("examples", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_both_products_equal_a_loop_over_places(outputs, weighted, examples):
    x, kernel, gate, _ = arrays(outputs, examples=examples)
    expected = loop(x, kernel, gate, outputs, weighted=weighted)
    for products in ("dense", "gather"):
        run = functools.partial(
            layers.spatial_experts,
            outputs=outputs,
            weighted=weighted,
            products=products,
        )
        found = jax.jit(run)(x, kernel, gate)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


def test_of_equal_gates_the_lower_expert_comes_first():
    gate = jnp.zeros((1, 1, 4)).at[0, 0, 3].set(1.0)
    assert layers.routing_map(gate, 3).tolist() == [[[3, 0, 1]]]


def hand_labels(delta, indices, rule, scale, experts):
    """Labels of every example, place and expert, by loops."""
    labels = np.zeros((*delta.shape[:3], experts))
    for b, example in enumerate(np.abs(np.asarray(delta, np.float64)) * scale):
        limit = np.quantile(example, rule.quantile) + rule.eps
        for i, j in np.ndindex(example.shape[:2]):
            used = np.asarray(indices[i, j])
            right = example[i, j] <= limit
            others = (~right).sum() / (experts - len(used))
            labels[b, i, j] = others
            labels[b, i, j, used] = right
    return labels


def two_passes(x, kernel, gate, target, *, weighted, loss_scale):
    """The gradients by a perturbed output, and an explicit cross-entropy of gates."""
    outputs = target.shape[-1]
    indices = np.argsort(-np.asarray(gate), -1, kind="stable")[..., :outputs]

    def choose(kernel):
        y = layers.conv(x, kernel)
        return jnp.take_along_axis(y, jnp.asarray(indices)[None], -1)

    gates = jnp.take_along_axis(gate, jnp.asarray(indices), -1) if weighted else 1.0
    chosen = choose(kernel)
    task = jax.grad(
        lambda more: loss_scale * jnp.mean((gates * chosen + more - target) ** 2)
    )
    delta = task(jnp.zeros_like(chosen))
    scale = delta.size / 2 / loss_scale
    judged = delta * chosen if weighted else delta
    labels = hand_labels(judged, indices, RC, scale, gate.shape[-1])

    def explicit(gate):
        every = jnp.broadcast_to(gate, labels.shape)
        losses = optax.sigmoid_binary_cross_entropy(every, jnp.asarray(labels))
        return RC.weight * loss_scale * jnp.mean(losses)

    errors = np.abs(np.asarray(delta, np.float64)) * scale
    limits = np.quantile(errors.reshape(BATCH, -1), DAMPING.quantile, axis=1)
    kept = errors <= limits[:, None, None, None] + DAMPING.eps
    to_kernel = jax.vjp(choose, kernel)[1](delta * gates * kept)[0]
    return to_kernel, jax.grad(explicit)(gate)


def one_pass(x, kernel, gate, target, *, scale=1.0, **options):
    def loss(kernel, gate):
        y = layers.spatial_experts(x, kernel, gate, target.shape[-1], **options)
        return scale * jnp.mean((y - target) ** 2)

    return jax.jit(jax.grad(loss, (0, 1)))(kernel, gate)


@pytest.mark.acceptance("smoe", 2)
@pytest.mark.parametrize(
    ("loss_scale", "products"), [(1.0, "dense"), (1024.0, "gather")]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_gradients_of_one_pass_equal_those_of_two(
    outputs, weighted, loss_scale, products
):
    given = arrays(outputs)
    found = one_pass(
        *given,
        scale=loss_scale,
        weighted=weighted,
        routing_loss=RC,
        damping=DAMPING,
        loss_scale=loss_scale,
        products=products,
    )
    expected = two_passes(*given, weighted=weighted, loss_scale=loss_scale)
    for one, other in zip(found, expected, strict=True):
        size = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * size)


@pytest.mark.acceptance("smoe", 3)
@pytest.mark.parametrize("examples", [False, True])
def test_without_routing_loss_and_damping_gradients_are_those_of_the_task(examples):
    x, kernel, gate, target = arrays(2, examples=examples)
    found = one_pass(x, kernel, gate, target, weighted=True)

    def plain(kernel, gate):
        gates, indices = jax.lax.top_k(gate, 2)
        y = layers.conv(x, kernel)
        indices = jnp.broadcast_to(indices, (*y.shape[:3], 2))
        y = gates * jnp.take_along_axis(y, indices, -1)
        return jnp.mean((y - target) ** 2)

    expected = jax.grad(plain, (0, 1))(kernel, gate)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.acceptance("smoe", 4)
def test_labels_of_a_place_add_up_to_its_outputs():
    rng = np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(7), (50, 1)), axis=1)
    right = rng.random((50, 3)) < 0.5
    labels = _spatial_experts.routing_labels(
        jnp.asarray(right), jnp.asarray(order[:, :3]), 7
    )
    np.testing.assert_allclose(labels.sum(-1), 3.0, rtol=1e-6)
    assert (labels >= 0).all()
    assert (labels <= 1).all()


@pytest.mark.acceptance("smoe", 4)
def test_labels_of_a_grid_made_by_hand():
    right = jnp.array([[[True], [False]], [[False], [True]]])
    experts = jnp.array([[[0], [0]], [[2], [1]]])
    labels = _spatial_experts.routing_labels(right, experts, 3)
    expected = [
        [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]],
        [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]],
    ]
    assert labels.tolist() == expected


def by_output(target, y, **options):
    """The gradient of the chosen outputs themselves."""
    gate = jnp.broadcast_to(jnp.arange(3.0), (*y.shape[1:3], 3))
    indices = _spatial_experts.choose_experts(gate, 1)

    def loss(y):
        return jnp.mean(
            (_spatial_experts.serve(y, gate, indices, **options) - target) ** 2
        )

    return jax.grad(loss)(y)


@pytest.mark.acceptance("smoe", 7)
def test_damped_places_teach_experts_nothing():
    rng = np.random.default_rng(1)
    y, target = jnp.asarray(rng.normal(size=(2, 3, 5, 5, 1)), jnp.float32)
    plain = by_output(target, y)
    damped = by_output(target, y, damping=DAMPING)
    small = _spatial_experts.find_small(
        jnp.abs(y - target), DAMPING.quantile, DAMPING.eps
    )
    np.testing.assert_array_equal(damped, jnp.where(small, plain, 0.0))
    large = 1 - jnp.mean(small, axis=(1, 2, 3))
    assert (large > 0).all()
    assert (large <= 1 - DAMPING.quantile).all()
    half = by_output(target, y, damping=Damping(factor=0.5, quantile=0.4, eps=1.0))
    np.testing.assert_allclose(half, jnp.where(small, plain, plain / 2), rtol=1e-6)


@pytest.mark.acceptance("smoe", 7)
def test_of_equal_errors_none_is_damped():
    y = jnp.ones((2, 4, 4, 1))
    same = by_output(jnp.zeros_like(y), y, damping=Damping(eps=0.0))
    np.testing.assert_array_equal(same, by_output(jnp.zeros_like(y), y))


@pytest.mark.acceptance("smoe", 8)
@pytest.mark.parametrize("weighted", [False, True])
def test_gates_learn_from_labels_alone(weighted):
    """A thousandfold loss has the same labels where `eps` is zero."""
    options = {"weighted": weighted, "routing_loss": RoutingLoss(eps=0.0)}
    given = arrays(2)
    to_kernel, to_gate = one_pass(*given, **options)
    more_kernel, more_gate = one_pass(*given, scale=1024.0, **options)
    assert (to_gate != 0).all()
    np.testing.assert_array_equal(more_gate, to_gate)
    np.testing.assert_allclose(more_kernel, 1024 * to_kernel, rtol=1e-5)
    np.testing.assert_array_equal(one_pass(*given)[1], 0.0)


def test_a_relative_eps_is_in_units_of_the_mean_error():
    errors = jnp.array([[0.0, 1.0, 2.0, 5.0], [0.0, 10.0, 20.0, 50.0]])
    small = _spatial_experts.find_small(errors, 0.5, 0.25, relative=True)
    assert small.tolist() == 2 * [[True, True, True, False]]
    assert not _spatial_experts.find_small(errors, 0.5, 0.25)[0, 2]


@pytest.mark.acceptance("smoe", 9)
def test_places_on_four_devices_equal_those_on_one():
    x, kernel, gate, target = arrays(2, height=8)
    options = {"padding": "periodic", "routing_loss": RC, "damping": DAMPING}
    mesh = sharding.make_mesh({"rows": 4})

    def local(x, kernel, gate, target):
        def loss(kernel, gate):
            y = layers.spatial_experts(x, kernel, gate, 2, axis_name="rows", **options)
            mean = jax.lax.pmean(jnp.mean((y - target) ** 2), "rows")
            return mean, y

        kernel = jax.lax.pcast(kernel, "rows", to="varying")
        (to_kernel, to_gate), y = jax.grad(loss, (0, 1), has_aux=True)(kernel, gate)
        return y, jax.lax.psum(to_kernel, "rows"), to_gate

    rows, cut = P(None, "rows"), P("rows")
    spread = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows, P(), cut, rows),
            out_specs=(rows, P(), cut),
        )
    )
    y, to_kernel, to_gate = spread(x, kernel, gate, target)
    expected = layers.spatial_experts(x, kernel, gate, 2, padding="periodic")
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    alone = one_pass(x, kernel, gate, target, **options)
    np.testing.assert_allclose(to_kernel, alone[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(to_gate, alone[1], rtol=1e-5, atol=0)


def test_gathered_filters_save_products():
    x, kernel, gate, _ = arrays(1, experts=8)

    def count(products):
        run = functools.partial(layers.spatial_experts, outputs=1, products=products)
        return jax.jit(run).lower(x, kernel, gate).compile().cost_analysis()["flops"]

    assert count("gather") < count("dense") / 4


@pytest.mark.parametrize("products", ["dense", "gather"])
def test_bfloat16_products_accumulate_in_float32(products):
    given = arrays(2)
    options = {"routing_loss": RC, "damping": DAMPING, "products": products}
    low = one_pass(*given, compute="bfloat16", **options)
    assert {each.dtype for each in low} == {jnp.dtype("float32")}
    y = layers.spatial_experts(*given[:3], 2, products=products)
    rounded = layers.spatial_experts(
        *given[:3], 2, products=products, compute="bfloat16"
    )
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype("float32"), y, rtol=0, atol=0.15)


@pytest.mark.wrong
@pytest.mark.acceptance("smoe", 12)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": 7}, "between 1 and the number of experts: got outputs=7"),
        ({"outputs": 6, "routing_loss": RC}, "no unselected experts"),
        ({"outputs": 6, "damping": DAMPING}, "no unselected experts"),
        ({"gate": jnp.zeros((8, 3, 6))}, "the gate was built for 8x3, got 4x3"),
        ({"kernel": jnp.zeros((2, 2, 2, 6))}, "odd size"),
        ({"products": "gathr"}, "did you mean 'gather'"),
    ],
)
def test_bad_input_is_refused(change, message):
    x, kernel, gate, _ = arrays()
    given = {"kernel": kernel, "gate": gate, "outputs": 1} | change
    with pytest.raises(ConfigError, match=message):
        layers.spatial_experts(x, **given)


@pytest.mark.acceptance("smoe", 12)
@pytest.mark.parametrize("quantile", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("rule", [RoutingLoss, Damping])
def test_a_quantile_is_within_0_and_1(rule, quantile):
    with pytest.raises(ConfigError, match=r"quantile must be in \(0, 1\)"):
        rule(quantile=quantile)


@pytest.mark.wrong
def test_filters_of_each_place_equal_a_loop():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 2))
    kernel = rng.normal(size=(3, 4, 3, 1, 2, 5))
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))
    expected = np.zeros((2, 3, 4, 5))
    for b, i, j in np.ndindex(2, 3, 4):
        patch = padded[b, i : i + 3, j : j + 1]
        expected[b, i, j] = np.tensordot(patch, kernel[i, j], 3)
    found = layers.locally_connected(jnp.float32(x), jnp.float32(kernel))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="height and width of the fields"):
        layers.locally_connected(jnp.float32(x[:, :2]), jnp.float32(kernel))


def test_coordinates_are_rows_and_columns():
    x = jnp.full((2, 3, 2, 1), 7.0)
    found = layers.add_coordinates(x)
    np.testing.assert_array_equal(found[..., :1], x)
    np.testing.assert_array_equal(found[1, :, 0, 1], [-1, 0, 1])
    np.testing.assert_array_equal(found[0, 2, :, 2], [-1, 1])


@pytest.mark.wrong
@pytest.mark.parametrize("gates", [3, 5])
@pytest.mark.parametrize("products", ["dense", "gather"])
def test_there_is_a_gate_for_each_filter(gates, products):
    gate, kernel = jnp.ones((2, 2, gates)), jnp.ones((1, 1, 1, 4))
    told = f"a gate for each expert: got gates={gates}, experts=4"
    with pytest.raises(ConfigError, match=told):
        layers.spatial_experts(
            jnp.ones((1, 2, 2, 1)), kernel, gate, 2, products=products
        )
    with pytest.raises(ConfigError, match=told):
        layers.select_experts(jnp.ones((1, 2, 2, 4)), gate, 2)
