"""Routing and both dispatch paths against numpy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from hpcjax import layers, sharding

WIDTH, INNER = 6, 10


def arrays(tokens, experts, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "x": draw(tokens, WIDTH),
        "router": draw(WIDTH, experts),
        "up": draw(experts, WIDTH, INNER),
        "bias": draw(experts, INNER),
        "down": draw(experts, INNER, WIDTH),
    }


def mixture(p, top_k, **options):
    p = jax.tree.map(jnp.asarray, p)

    def function(rows, dense):
        inner = jax.nn.relu(dense(rows, p["up"], p["bias"]))
        return dense(inner, p["down"], None)

    routing = layers.route(p["x"] @ p["router"], top_k)
    return layers.experts(p["x"], routing, function, **options)


def oracle(p, top_k, capacity=None):
    """Float64, one token and one choice at a time; all first choices come first."""
    p = {name: array.astype(np.float64) for name, array in p.items()}
    logits = p["x"] @ p["router"]
    y, room = np.zeros_like(p["x"]), [capacity] * logits.shape[1]
    for choice in range(top_k):
        for token, row in enumerate(logits):
            likely = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            order = np.argsort(-likely)[:top_k]
            expert = order[choice]
            gate = likely[expert] / (likely[order].sum() if top_k > 1 else 1)
            if capacity is not None:
                if room[expert] == 0:
                    continue
                room[expert] -= 1
            inner = np.maximum(p["x"][token] @ p["up"][expert] + p["bias"][expert], 0)
            y[token] += gate * inner @ p["down"][expert]
    return y


def close(found, expected):
    expected = np.asarray(expected)
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=1e-5 * (1 + np.abs(expected).max())
    )


@pytest.mark.quick("2-1-2")
@pytest.mark.acceptance("lm-models", 7)
@pytest.mark.parametrize(("tokens", "experts"), [(1, 2), (13, 4), (16, 8), (7, 3)])
@pytest.mark.parametrize("top_k", [1, 2])
def test_both_paths_equal_numpy_where_nothing_can_drop(tokens, experts, top_k):
    p = arrays(tokens, experts)
    capacity = layers.expert_capacity(tokens, experts, top_k, experts / top_k)
    assert capacity == tokens
    expected = oracle(p, top_k)
    close(mixture(p, top_k), expected)
    close(mixture(p, top_k, capacity=capacity), expected)


@pytest.mark.acceptance("lm-models", 7)
@pytest.mark.parametrize("top_k", [1, 2])
def test_both_paths_have_the_same_gradients(top_k):
    p = arrays(13, 4)

    def loss(p, capacity):
        return jnp.sum(jnp.sin(mixture(p, top_k, capacity=capacity)))

    dropless, full = (
        jax.jit(jax.grad(loss), static_argnums=1)(p, c) for c in (None, 13)
    )
    for name, grad in dropless.items():
        assert np.abs(grad).max() > 0.01, name
        close(full[name], grad)


@pytest.mark.quick("2-5", "2-2", "1-5")
@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize("top_k", [1, 2])
def test_full_experts_drop_what_comes_later(capacity, top_k):
    p = arrays(12, 3)
    expected = oracle(p, top_k, capacity)
    assert np.abs(expected - oracle(p, top_k)).max() > 0.1
    close(mixture(p, top_k, capacity=capacity), expected)


@pytest.mark.acceptance("lm-models", 7)
def test_with_room_for_one_the_later_token_is_dropped():
    # Tokens 0 and 2 want expert 1, token 1 expert 0; the experts double and triple.
    logits = jnp.array([[0.0, 99.0], [99.0, 0.0], [0.0, 99.0]])
    assert layers.expert_capacity(3, 2, 1, 0.5) == 1
    kernel = jnp.stack([2 * jnp.eye(2), 3 * jnp.eye(2)])
    y = layers.experts(
        jnp.ones((3, 2)),
        layers.route(logits, 1),
        lambda rows, dense: dense(rows, kernel, None),
        capacity=1,
    )
    np.testing.assert_array_equal(y, [[3, 3], [2, 2], [0, 0]])


def test_capacity_is_the_ceiling_of_an_exact_product():
    assert layers.expert_capacity(100, 2, 2, 0.55) == 55
    assert layers.expert_capacity(60, 2, 1, 1.1) == 33
    assert layers.expert_capacity(7, 3, 1, 1.0) == 3
    assert layers.expert_capacity(50, 2, 2, 1.1) == 50  # never more than the tokens


@pytest.mark.acceptance("lm-models", 7)
def test_balance_is_one_when_uniform_and_the_number_of_experts_at_worst():
    count = 8
    cyclic = jnp.roll(jnp.eye(count), 1, axis=1)
    even = layers.route(1e-3 * jnp.tile(cyclic, (5, 1)), 1)
    assert float(layers.load_balance_loss(even)) == pytest.approx(1, abs=1e-5)
    one = layers.route(jnp.tile(60 * jnp.eye(count)[3], (40, 1)), 2)
    assert float(layers.load_balance_loss(one)) == pytest.approx(count, abs=1e-5)


def test_balance_and_z_loss_equal_numpy():
    logits = np.random.default_rng(0).normal(size=(31, 5))
    likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    share = np.bincount(likely.argmax(1), minlength=5) / 31
    routing = layers.route(jnp.asarray(logits, jnp.float32), 2)
    expected = 5 * (share * likely.mean(0)).sum()
    assert float(layers.load_balance_loss(routing)) == pytest.approx(expected, rel=1e-5)
    expected = np.square(np.log(np.exp(logits).sum(1))).mean()
    found = layers.router_z_loss(jnp.asarray(logits, jnp.float32))
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.acceptance("lm-models", 7)
def test_gates_of_two_choices_sum_to_one_and_of_one_are_its_probability():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(20, 6)), jnp.bfloat16)
    two, one = layers.route(logits, 2), layers.route(logits, 1)
    assert two.gates.dtype == jnp.float32
    np.testing.assert_allclose(two.gates.sum(1), 1, atol=1e-6)
    assert (two.gates[:, 0] >= two.gates[:, 1]).all()
    np.testing.assert_array_equal(one.gates[:, 0], one.probabilities.max(1))


@pytest.mark.quick("2-2")
@pytest.mark.parametrize("capacity", [16, 2])
@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_spread_over_devices_give_what_one_device_gives(top_k, capacity):
    """Each device routes 2 of 16 tokens; `capacity` of 2 is all that each can send."""
    mesh = sharding.make_mesh({"expert": 8})
    p = arrays(16, 8)
    split = {name: PartitionSpec("expert") for name in p}
    split["router"] = PartitionSpec()
    mapped = jax.shard_map(
        lambda p: mixture(p, top_k, capacity=capacity, axis_name="expert"),
        mesh=mesh,
        in_specs=(split,),
        out_specs=PartitionSpec("expert"),
    )
    close(jax.jit(mapped)(p), oracle(p, top_k))

    def loss(function):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(function(p)))))(p)

    expected = loss(lambda p: mixture(p, top_k))
    jax.tree.map(close, loss(mapped), expected)


def test_each_device_drops_by_its_own_tokens():
    mesh = sharding.make_mesh({"expert": 2})
    p = arrays(12, 4)
    split = {name: PartitionSpec("expert") for name in p}
    split["router"] = PartitionSpec()
    mapped = jax.shard_map(
        lambda p: mixture(p, 1, capacity=1, axis_name="expert"),
        mesh=mesh,
        in_specs=(split,),
        out_specs=PartitionSpec("expert"),
    )
    halves = [oracle(p | {"x": x}, 1, 1) for x in np.split(p["x"], 2)]
    close(jax.jit(mapped)(p), np.concatenate(halves))


def test_balance_over_an_axis_is_that_of_all_tokens():
    mesh = sharding.make_mesh({"data": 4})
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(16, 4)), jnp.float32)

    def balance(logits, axis_name=None):
        return layers.load_balance_loss(layers.route(logits, 1), axis_name=axis_name)

    over = jax.shard_map(
        lambda x: balance(x, "data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    assert float(over(logits)) == pytest.approx(float(balance(logits)), rel=1e-6)
    assert float(balance(logits[:4])) != pytest.approx(float(balance(logits)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 13])
def test_half_precision_computes_in_it_and_differentiates(capacity):
    p = arrays(13, 4)

    def loss(p):
        return jnp.sum(mixture(p, 2, capacity=capacity, compute="bfloat16") ** 2)

    grads = jax.jit(jax.grad(loss))(p)
    exact = jax.grad(lambda p: jnp.sum(mixture(p, 2) ** 2))(p)
    for name, grad in grads.items():
        assert grad.dtype == jnp.float32
        scale = np.abs(exact[name]).max()
        np.testing.assert_allclose(grad, exact[name], rtol=0, atol=0.05 * scale)


@pytest.mark.slow
def test_what_cannot_be_is_refused():
    p = arrays(4, 3)
    with pytest.raises(ValueError, match=r"between 1 and the number.*top_k=4, 3 exp"):
        layers.route(jnp.zeros((2, 3)), 4)
    with pytest.raises(ValueError, match="at least 1: got capacity=0"):
        mixture(p, 1, capacity=0)
    with pytest.raises(ValueError, match="need a capacity"):
        mixture(p, 1, axis_name="expert")
    mesh = sharding.make_mesh({"expert": 2})
    mapped = jax.shard_map(
        lambda p: mixture(p, 1, capacity=2, axis_name="expert"),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("expert"),
    )
    with pytest.raises(ValueError, match="2 devices, 3 experts"):
        mapped(p)
