"""Routing and both dispatch paths against numpy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import PartitionSpec

from hpcjax import layers, sharding
from hpcjax.core import ConfigError, shards
from hpcjax.layers import _experts

WIDTH, INNER = 6, 12


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
    def function(rows, dense):
        inner = jax.nn.relu(dense(rows, p["up"], p["bias"]))
        return dense(inner, p["down"], None)

    x = jnp.asarray(p["x"])
    routing = layers.route(x @ p["router"], top_k)
    return layers.experts(x, routing, function, like=p["up"], **options)


# How devices share out tokens, experts and, if there are any, features of experts.
SPLIT = {
    "x": PartitionSpec("expert"),
    "router": PartitionSpec(),
    "up": PartitionSpec("expert", None, "col"),
    "bias": PartitionSpec("expert", "col"),
    "down": PartitionSpec("expert", "col"),
}


def spread(top_k, expert, col=1, *, once=True, **options):
    """The mixture on expert times col devices, a function of whole arrays."""
    mesh = sharding.make_mesh({"expert": expert, "col": col})

    def local(p):
        parts = {
            name: shards.Part(
                value=p[name],
                cuts=shards.list_cuts(SPLIT, name, p[name].ndim),
                once=once,
            )
            for name in ("up", "bias", "down")
        }
        return mixture({**p, **parts}, top_k, **options)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(SPLIT,), out_specs=PartitionSpec("expert")
    )


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


@pytest.mark.quick("2-2-sizes0", "1-None-sizes1")
@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_spread_over_devices_give_what_one_device_gives(top_k, capacity, sizes):
    """Each of `expert` devices routes its own tokens; a capacity of 2 is for 2 or 8."""
    p, expert = arrays(16, 8), sizes[0]
    mapped = spread(top_k, *sizes, capacity=capacity)
    room = -(-capacity // sizes[1]) * sizes[1] if capacity else None
    pieces = [oracle(p | {"x": x}, top_k, room) for x in np.split(p["x"], expert)]
    close(jax.jit(mapped)(p), np.concatenate(pieces))

    def loss(function):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(function(p)))))(p)

    if capacity is None or expert == 8:
        expected = loss(lambda p: mixture(p, top_k))
        jax.tree.map(close, loss(mapped), expected)


@pytest.mark.acceptance("ted", 1)
def test_each_device_drops_by_its_own_tokens():
    p = arrays(12, 4)
    halves = [oracle(p | {"x": x}, 1, 1) for x in np.split(p["x"], 2)]
    close(jax.jit(spread(1, 2, capacity=1))(p), np.concatenate(halves))


def test_a_capacity_is_rounded_up_in_both_arms_alike(caplog):
    _experts._warn_rounded.cache_clear()
    p = arrays(12, 4)
    halves = [oracle(p | {"x": x}, 1, 2) for x in np.split(p["x"], 2)]
    for once in (True, False):
        found = jax.jit(spread(1, 2, 2, once=once, capacity=1))(p)
        close(found, np.concatenate(halves))
    told = [each for each in caplog.messages if "capacity 1 is not a multiple" in each]
    assert len(told) == 1
    jax.jit(spread(1, 2, 2))(arrays(6, 4))  # of tokens that nobody limits, nothing
    assert "capacity 3" not in caplog.text


def test_tokens_that_differ_where_features_are_cut_are_refused():
    mesh = sharding.make_mesh({"expert": 2, "col": 2})

    def local(p):
        part = shards.Part(value=p["up"], cuts=((-3, "expert"), (-1, "col")))
        return mixture({**p, "up": part}, 1)

    own = {**SPLIT, "x": PartitionSpec(("expert", "col"))}
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(own,), out_specs=PartitionSpec(("expert", "col"))
    )
    with pytest.raises(ConfigError, match=r"tokens must be equal .* along \['col'\]"):
        mapped(arrays(12, 4))


def one_hot(p, top_k, capacity, priority):
    """GShard's form: a dispatch mask [token, expert, slot], filled one by one."""
    logits = p["x"].astype(np.float64) @ p["router"]
    likely = np.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    chosen = np.argsort(-likely, axis=1, kind="stable")[:, :top_k]
    gates = np.take_along_axis(likely, chosen, 1)
    gates = gates / gates.sum(1, keepdims=True) if top_k > 1 else gates
    combine = np.zeros((*logits.shape, capacity))
    taken = np.zeros(logits.shape[1], int)
    for choice in range(top_k):
        for token in np.argsort(-priority[:, choice], kind="stable"):
            expert = chosen[token, choice]
            if taken[expert] < capacity:
                combine[token, expert, taken[expert]] = gates[token, choice]
            taken[expert] += 1
    rows = np.einsum("tec,td->ecd", combine > 0, p["x"])
    inner = np.einsum("ecd,edf->ecf", rows, p["up"]) + p["bias"][:, None]
    y = np.einsum("ecf,efd->ecd", np.maximum(inner, 0), p["down"])
    return np.einsum("tec,ecd->td", combine, y), (combine > 0).sum()


@pytest.mark.quick("1-2", "4-12")
@pytest.mark.acceptance("ted", 4, 5)
@pytest.mark.parametrize(("top_k", "capacity"), [(1, 2), (1, 7), (2, 3), (4, 12)])
def test_slots_give_what_one_hot_products_give(top_k, capacity):
    run = jax.jit(
        lambda p, priority: mixture(p, top_k, capacity=capacity, priority=priority)
    )
    for seed in range(5):
        p = arrays(12, 5, seed)
        rng = np.random.default_rng(seed)
        priority = rng.integers(0, 3, (12, top_k)).astype(np.float32)
        if seed == 1:
            p["x"][6:] = p["x"][:6]  # ties, too, of whole tokens
        if seed == 2:
            p["router"][:, 1] = -9 * np.abs(p["router"]).max()  # an empty expert
            p["x"] = np.abs(p["x"])
        wanted, kept = one_hot(p, top_k, capacity, priority)
        y = run(p, priority)
        close(y, wanted)
        if top_k == 1:
            assert (np.abs(y).max(1) > 0).sum() == kept


@pytest.mark.acceptance("ted", 5)
def test_random_priority_keeps_each_token_equally_often():
    """Q of draws without replacement is χ² of n − 1; the order of tokens fails it."""
    n, room, draws = 9, 4, 2000
    routing = layers.route(jnp.zeros((n, 2)).at[:, 0].set(9.0), 1)

    def keep(priority):
        y = layers.experts(
            jnp.ones((n, 1)),
            routing,
            lambda rows, dense: rows,
            capacity=room,
            priority=priority,
        )
        return y[:, 0] > 0

    keys = jax.random.split(jax.random.key(0), draws)
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (n, 1)))(keys)

    def statistic(priorities):
        kept = np.asarray(jax.jit(jax.vmap(keep))(priorities))
        assert (kept.sum(1) == room).all()
        p = room / n
        spread = np.square(kept.sum(0) - draws * p).sum()
        return (n - 1) / n * spread / (draws * p * (1 - p))

    bound = scipy.stats.chi2.ppf(0.999, n - 1)
    assert statistic(drawn) < bound
    assert statistic(jnp.zeros_like(drawn)) > 100 * bound


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
    with pytest.raises(ValueError, match="got 1 on this one, 3 in all"):
        spread(1, 2)(p | {name: p[name][:2] for name in ("up", "bias", "down")})
