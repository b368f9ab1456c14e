"""Backward passes in segments: the same gradients, ready one after the other."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import sharding
from hpcjax.core import ConfigError
from hpcjax.hostcomm import Agent, connected
from hpcjax.sharding import staged
from tests.hostcomm.threads import in_threads

WIDTH, ROWS, DEPTH = 16, 8, 5


def embed(params, tokens):
    return params["table"][tokens].mean(1)


def block(params, x):
    return x + jnp.tanh(x @ params["kernel"] + params["bias"])


def loss(y, targets):
    return jnp.mean((y - targets) ** 2)


SEGMENTS = [embed, *[block] * DEPTH]


def example(seed=0):
    rng = np.random.default_rng(seed)
    params = [{"table": rng.normal(size=(7, WIDTH)).astype(np.float32)}]
    for _ in range(DEPTH):
        kernel = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4
        params.append({"kernel": kernel, "bias": np.zeros(WIDTH, np.float32)})
    tokens = rng.integers(0, 7, (ROWS, 3))
    return params, tokens, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def whole(params, tokens, targets):
    x = tokens
    for segment, own in zip(SEGMENTS, params, strict=True):
        x = segment(own, x)
    return loss(x, targets)


def assert_close(found, expected):
    # Sums of at most 128 terms in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        found,
        expected,
    )


def test_gradients_are_those_of_the_whole():
    params, tokens, targets = example()
    value, grads = sharding.staged_value_and_grad(SEGMENTS, loss)(
        params, tokens, targets
    )
    expected = jax.value_and_grad(whole)(params, tokens, targets)
    assert_close((value, grads), expected)


def test_segments_are_ready_before_earlier_ones_are_computed(monkeypatch):
    computed, seen = [], []
    backward = staged._backward
    monkeypatch.setattr(
        staged, "_backward", lambda *args: computed.append(0) or backward(*args)
    )
    params, tokens, targets = example()

    def ready(number, grads):
        seen.append((number, len(computed)))
        assert all(leaf.is_ready() for leaf in jax.tree.leaves(grads))

    run = sharding.staged_value_and_grad(SEGMENTS, loss)
    run(params, tokens, targets, ready)
    count = len(SEGMENTS)
    assert seen == [(number, count - number) for number in reversed(range(count))]


def test_equal_segments_are_compiled_once():
    traced = []

    def counted(params, x):
        traced.append(0)
        return block(params, x)

    run = sharding.staged_value_and_grad([embed, *[counted] * DEPTH], loss)
    for seed in (0, 1):
        run(*example(seed))
    assert len(traced) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_averages_over_ranks(size):
    examples = [example(seed) for seed in range(size)]
    params = examples[0][0]

    def rank(transport):
        with Agent() as agent, transport:
            run = sharding.averaged_value_and_grad(SEGMENTS, loss, transport, agent)
            _, tokens, targets = examples[transport.rank]
            for _ in range(2):
                made = run(params, tokens, targets)
            return made

    results = in_threads(rank, connected(size, patience=60.0))
    own = [jax.value_and_grad(whole)(params, *rest) for _, *rest in examples]
    mean = jax.tree.map(lambda *each: sum(each) / size, *[grads for _, grads in own])
    for (value, grads), (expected, _) in zip(results, own, strict=True):
        assert_close((value, grads), (expected, mean))


def test_a_segment_without_parameters_and_halves_that_would_overflow():
    """One bucket of two dtypes, summed in float32: two halves of 6e4 are too many."""
    segments = [
        lambda p, x: x * p["half"].astype("float32") + p["bias"],
        lambda p, x: x,
    ]
    params = [{"half": jnp.zeros(2, "float16"), "bias": jnp.zeros(2)}, {}]

    def rank(transport):
        with Agent() as agent, transport:
            run = sharding.averaged_value_and_grad(segments, _sum, transport, agent)
            return run(params, jnp.full((1, 2), 6e4), None)[1]

    for grads in in_threads(rank, connected(2, patience=60.0)):
        assert grads[1] == {}
        assert {name: leaf.dtype for name, leaf in grads[0].items()} == {
            "half": np.float16,
            "bias": np.float32,
        }
        np.testing.assert_array_equal(grads[0]["half"], np.float16([6e4, 6e4]))
        np.testing.assert_array_equal(grads[0]["bias"], [1, 1])


def _sum(y, targets):
    del targets
    return jnp.sum(y)


@pytest.mark.acceptance("gradcomp-utility", 6)
def test_a_bucket_is_handed_over_before_the_next_segment_is_computed():
    """The agent has the last segment's gradients while the first is yet to come."""
    params, tokens, targets = example()
    order = []

    def rank(transport):
        class Watched(Agent):
            def submit(self, function, *args, **options):
                order.append("sent")
                return super().submit(function, *args, **options)

        with Watched() as agent, transport:
            run = sharding.averaged_value_and_grad(SEGMENTS, loss, transport, agent)
            run(params, tokens, targets, lambda number, grads: order.append(number))

    in_threads(rank, connected(1))
    numbers = list(reversed(range(len(SEGMENTS))))
    assert order == [each for number in numbers for each in ("sent", number)]


@pytest.mark.acceptance("gradcomp-utility", 6)
def test_a_bucket_is_under_way_while_the_next_segment_is_computed():
    """Each is sent before the next is computed, and arrives only after that.

    Without overlap one of the two waits for what the other would do after it.
    """
    params, tokens, targets = example()

    def rank(transport):
        begun, computed = ([threading.Event() for _ in SEGMENTS] for _ in range(2))
        send = transport.send

        def held(to, tag, array):
            if tag.kind == "bucket":
                number = tag.round
                begun[number].set()
                assert number == 0 or computed[number - 1].wait(20.0), f"{number} waits"
            send(to, tag, array)

        def ready(number, grads):
            del grads
            computed[number].set()
            assert begun[number].wait(20.0), f"bucket {number}"

        transport.send = held
        with Agent() as agent, transport:
            run = sharding.averaged_value_and_grad(SEGMENTS, loss, transport, agent)
            return run(params, tokens, targets, ready)

    made = in_threads(rank, connected(2, patience=60.0))
    expected = jax.value_and_grad(whole)(params, tokens, targets)
    for each in made:
        assert_close(each, expected)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="there must be segments"):
        sharding.staged_value_and_grad([], loss)
    params, tokens, targets = example()
    run = sharding.staged_value_and_grad(SEGMENTS, loss)
    with pytest.raises(ConfigError, match="each of 6 segments: got params=2"):
        run(params[:2], tokens, targets)
