"""Schedules, SGD, AdamW, weight decay, all-reduce, inspect, matrices and norms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import optim
from hpcjax.core.errors import ConfigError
from hpcjax.optim import matrices, norms
from hpcjax.optim.matrices import matrix_shape
from tests.oracles import jorge as oracle


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_pytorchs(nesterov, weight_decay):
    gradients = np.random.default_rng(0).normal(size=(6, 3, 2))
    start = np.random.default_rng(1).normal(size=(3, 2))
    with jax.enable_x64(True):
        tx = optim.sgd(0.1, 0.8, nesterov, weight_decay)
        params = jnp.asarray(start)
        state, update = tx.init(params), jax.jit(tx.update)
        for gradient in gradients:
            updates, state = update(jnp.asarray(gradient), state, params)
            params = optax.apply_updates(params, updates)
    expected = oracle.sgd(start, gradients, 0.1, 0.8, nesterov, weight_decay)
    np.testing.assert_allclose(params, expected, rtol=1e-12)


def test_adamw_against_the_formula():
    gradients = np.random.default_rng(0).normal(size=(5, 4))
    theta, m, v = np.ones(4), np.zeros(4), np.zeros(4)
    with jax.enable_x64(True):
        tx = optim.adamw(0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2)
        params = jnp.ones(4, "float64")
        state, update = tx.init(params), jax.jit(tx.update)
        for t, g in enumerate(gradients, start=1):
            updates, state = update(jnp.asarray(g), state, params)
            params = optax.apply_updates(params, updates)
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            step = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            theta = theta - 0.1 * (step + 0.2 * theta)
    np.testing.assert_allclose(params, theta, rtol=1e-10)


def test_low_precision_parameters_have_full_precision_statistics():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    for tx in (optim.sgd(0.1), optim.adamw(0.1), optim.jorge(0.1), optim.shampoo(0.1)):
        leaves = jax.tree.leaves(tx.init(params))
        floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        assert floating
        assert all(leaf.dtype == jnp.float32 for leaf in floating)


@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_clipping_by_global_norm(norm):
    gradients = {"a": jnp.asarray([3.0]), "b": jnp.asarray([[4.0]])}
    tx = optim.clip_global_norm(norm)
    updates, _ = tx.update(gradients, tx.init(gradients))
    scale = min(1, norm / 5)
    np.testing.assert_allclose(updates["a"], [3 * scale], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [[4 * scale]], rtol=1e-6)


def test_decay_rules_choose_parameters():
    rules = (("bias$", False), (".*", True))
    params = {"dense": {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))}}
    tx = optim.add_weight_decay(0.5, rules)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zero, tx.init(params), params)
    np.testing.assert_array_equal(updates["dense"]["bias"], 0)
    np.testing.assert_array_equal(updates["dense"]["kernel"], 0.5)


@pytest.mark.parametrize("make", [optim.sgd, optim.jorge, optim.shampoo, optim.adamw])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ((("norm", False), (".*", True)), r"match no parameter: \['norm'\]"),
        ((("kernel", True),), r"matched by no rule: \['bias'\]"),
    ],
)
def test_decay_rules_must_fit(make, weight_decay, rules, words):
    tx = make(0.1, weight_decay=weight_decay, decay_rules=rules)
    with pytest.raises(ConfigError, match=words):
        tx.init({"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))})


def test_weight_decay_needs_parameters():
    tx = optim.add_weight_decay(0.1)
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def _reduced_bytes(text):
    """Bytes of the operands of all-reduce instructions in HLO text."""
    total = 0
    for line in text.splitlines():
        found = re.search(r"= (.*?) all-reduce(-start)?\(", line)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1] if found else ""):
            size = {"f32": 4, "bf16": 2, "f64": 8}[dtype]
            total += size * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
    return total


def test_bytes_of_the_all_reduce_are_those_of_the_compiled_program():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"a": jnp.ones((8, 5, 7)), "b": jnp.ones((8, 11)), "c": jnp.ones((8,))}
    tx = optim.all_reduce_mean("data")

    def step(gradients):
        mine = jax.tree.map(lambda g: g[0], gradients)
        return tx.update(mine, tx.init(mine))[0]

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=True
        )
    )
    text = run.lower(params).compile().as_text()
    assert _reduced_bytes(text) == 4 * (35 + 11 + 1)
    scaled = jax.tree.map(lambda p: p * jnp.arange(8.0)[:, None], {"b": params["b"]})
    np.testing.assert_allclose(run(scaled)["b"], 3.5)


def test_inspect_finds_nested_metrics_and_names_repeats():
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    parts = {
        "w": optim.SgdConfig(lr=0.5).make(3),
        "b": optax.chain(optim.JorgeConfig(lr=0.25).make(3)),
    }
    tx = optax.partition(parts, {"w": "w", "b": "b"})
    found = optim.inspect(tx.init(params))
    rates = {float(v) for k, v in found.items() if k.startswith("learning_rate")}
    assert rates == {0.5, 0.25}
    assert "learning_rate_2" in found
    assert "jorge_nu" in found
    assert optim.inspect(()) == {}


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    block=st.one_of(st.none(), st.integers(1, 10)),
    limit=st.integers(1, 10),
)
def test_blocks_cover_the_matrix(rows, columns, block, limit):
    plan = optim.matrix_plan((rows, columns), limit, block)
    cut = block or 10**9
    if plan is None:
        assert min(rows, cut) > limit
        assert min(columns, cut) > limit
        return
    assert plan.left == (min(rows, cut) <= limit)
    assert plan.right == (min(columns, cut) <= limit)
    array = jnp.arange(float(rows * columns)).reshape(rows, columns)
    blocks = matrices.to_blocks(plan, array)
    assert sum(b.size for b in blocks) == array.size
    assert max(max(b.shape) for b in blocks) <= max(cut, 1)
    again = matrices.from_blocks(plan, blocks, array.shape)
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), None),
        ((5,), None),
        ((0, 3), None),
        ((1, 1), (1, 1)),
        ((16, 24), (16, 24)),
        ((3, 3, 64, 128), (576, 128)),
        ((1, 1, 8, 4), (8, 4)),
        ((64, 4, 16), (64, 64)),
        ((4, 16, 64), (64, 64)),
        ((3, 512, 8), (1536, 8)),
        ((1, 2, 1, 2, 3), (4, 3)),
    ],
)
def test_matrix_shapes(shape, expected):
    assert matrix_shape(shape) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5),
    st.integers(-30, 30),
)
def test_norms_at_any_scale(values, exponent):
    exact = np.asarray(values, np.float32).astype(np.float64) * 10.0**exponent
    given = np.asarray(exact, np.float32)
    with np.errstate(all="ignore"):
        reference = np.linalg.norm(given.astype(np.float64))
    found = float(norms.norm(jnp.asarray(given)))
    # Denormal entries are flushed to zero.
    assert found == pytest.approx(reference, rel=1e-6, abs=3e-38)


def test_cosine_of_extreme_vectors():
    big, small = jnp.asarray([1e30, 0.0]), jnp.asarray([-1e-30, 0.0])
    assert float(norms.cosine(big, small)) == -1
    assert float(norms.cosine(big, jnp.zeros(2))) == 0


def test_schedules_pass_through_their_points():
    cosine = optim.cosine_schedule(2.0, 12, warmup=2, final=0.5)
    found = [float(cosine(t)) for t in (0, 1, 2, 7, 12, 40)]
    np.testing.assert_allclose(found, [1, 2, 2, 1.5, 1, 1], rtol=1e-6)
    steps = optim.step_decay_schedule(1.0, 10, factor=0.5, at=(0.2, 0.6))
    found = [float(steps(t)) for t in (0, 1, 2, 5, 6, 9)]
    np.testing.assert_allclose(found, [1, 1, 0.5, 0.5, 0.25, 0.25], rtol=1e-6)
    constant = optim.constant_schedule(3.0, 5, warmup=3)
    found = jax.vmap(constant)(jnp.arange(5))
    np.testing.assert_allclose(found, [1, 2, 3, 3, 3], rtol=1e-6)


def test_rules_fit_each_part_of_a_partition():
    """Rules for biases do not fail where a partition leaves kernels alone."""
    params = {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))}
    rules = (("bias", False), ("kernel", True))
    labels = {"bias": "rest", "kernel": "own"}
    own = optim.lamb(0.1, decay_rules=rules, trust_rules=rules, stacked=("bias",))
    tx = optax.partition({"own": own, "rest": optax.identity()}, labels)
    updates, _ = tx.update(params, tx.init(params), params)
    alone = optim.lamb(0.1, decay_rules=(("kernel", True),))
    kernel = {"kernel": params["kernel"]}
    expected, _ = alone.update(kernel, alone.init(kernel), kernel)
    np.testing.assert_array_equal(updates["kernel"], expected["kernel"])


@pytest.mark.quick("sgd", "lamb")
@pytest.mark.parametrize("name", ["sgd", "lamb", "jorge", "shampoo"])
def test_an_nnx_optimizer_steps_as_plain_parameters_do(name):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tx = getattr(optim, name)(
        0.1, weight_decay=0.1, decay_rules=(("l$", True), ("", False))
    )
    params = {"bias": model.bias[...], "kernel": model.kernel[...]}
    grads = jax.tree.map(lambda p: p + 1.0, params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        optimizer.update(model, nnx.State(jax.tree.map(nnx.Param, grads)))
    np.testing.assert_allclose(model.kernel[...], params["kernel"], rtol=1e-6)
    np.testing.assert_allclose(model.bias[...], params["bias"], rtol=1e-6)
