"""Workers that average models, against recursions in numpy; how they begin."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax.averaging import (
    adpsgd,
    allreduce_sgd,
    dpsgd,
    local_sgd,
    sgp,
    wagma,
    warm_start,
)
from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import connected
from tests.hostcomm.threads import in_threads

LR, STEPS, DIMS = 0.1, 9, 3
SGD = optax.sgd(LR)


def goals(ranks):
    return np.random.default_rng(ranks).standard_normal((ranks, DIMS))


def starts(ranks):
    return np.random.default_rng(99).standard_normal((ranks, DIMS))


def on_mesh(make, ranks):
    """Models `[T, P, n]` on f_i = |x - a_i|^2 / 2, from starts that differ."""

    def rank(start, goal):
        worker = make("data")

        def one(carry, _):
            params, state = carry
            carry = worker.step(params - goal, state, params)
            return carry, carry[0]

        carry = start, worker.init(start)
        return jax.lax.scan(one, carry, None, length=STEPS)[1]

    given = (np.float32(each(ranks)) for each in (starts, goals))
    return np.asarray(jax.vmap(rank, axis_name="data")(*given)).swapaxes(0, 1)


def mean_of(ranks, together):
    """The matrix that takes the mean of those who are together."""
    matrix = np.array(
        [[float(together(i, j)) for j in range(ranks)] for i in range(ranks)]
    )
    return matrix / matrix.sum(1, keepdims=True)


def everybody(ranks):
    return np.full((ranks, ranks), 1 / ranks)


def ring(ranks, step):
    return mean_of(ranks, lambda i, j: (i - j) % ranks in (0, 1, ranks - 1))


def pushed(ranks, step):
    """Rank i pushes to i + 1 and i + 2, then to i + 4 and i + 8, and so on."""
    powers = [2**j for j in range(10) if 2**j < ranks]
    to = {0, *(powers[(2 * step + j) % len(powers)] for j in range(2) if powers)}
    return mean_of(ranks, lambda i, j: (i - j) % ranks in to)


def in_groups(group_size, tau, always=False):
    """Ranks whose numbers differ in a window of bits only, which moves on."""

    def matrix(ranks, step):
        if tau and step % tau == tau - 1:
            return everybody(ranks)
        bits, width = int(np.log2(ranks)), int(np.log2(group_size))
        window = sum(1 << (step * width + r) % bits for r in range(width))
        mixed = mean_of(ranks, lambda i, j: (i ^ j) & ~window == 0)
        own = np.eye(ranks)
        return (group_size * mixed + own) / (group_size + 1) if always else mixed

    return matrix


def every(period):
    return lambda ranks, step: (
        np.eye(ranks) if (step + 1) % period else everybody(ranks)
    )


def after(matrix):
    """Of what was updated."""
    return lambda x, update, step: matrix(len(x), step) @ (x + update)


def before(matrix):
    """Beside an update that was made before the average."""
    return lambda x, update, step: matrix(len(x), step) @ x + update


def warm(steps, rule):
    def step(x, update, number):
        if number < steps:
            return x + update.mean(0)
        return rule(x, update, number - steps)

    return step


CASES = {
    "allreduce": (lambda o: allreduce_sgd(o, SGD), lambda x, u, _: x + u.mean(0)),
    "local": (lambda o: local_sgd(o, SGD, period=4), after(every(4))),
    "dpsgd": (lambda o: dpsgd(o, SGD), before(ring)),
    "sgp": (lambda o: sgp(o, SGD), after(pushed)),
    "groups": (
        lambda o: wagma(o, SGD, group_size=2, tau=4),
        after(in_groups(2, 4)),
    ),
    "groups of four": (
        lambda o: wagma(o, SGD, group_size=4, tau=None),
        after(in_groups(4, None)),
    ),
    "as released": (
        lambda o: wagma(
            o,
            SGD,
            group_size=2,
            tau=4,
            late_rule="always",
            order="average_then_update",
        ),
        before(in_groups(2, 4, always=True)),
    ),
    "warm": (
        lambda o: warm_start(o, SGD, wagma(o, SGD, group_size=2, tau=None), steps=2),
        warm(2, after(in_groups(2, None))),
    ),
}
GROUPS = {
    "groups": (2, 4, 8),
    "groups of four": (4, 8),
    "as released": (4, 8),
    "warm": (8,),
}
SIZES = [(name, ranks) for name in CASES for ranks in GROUPS.get(name, (1, 2, 4, 5, 8))]


@pytest.mark.parametrize(("name", "ranks"), SIZES)
def test_workers_follow_the_recursion(name, ranks):
    make, rule = CASES[name]
    want = starts(ranks)
    for step, got in enumerate(on_mesh(make, ranks)):
        want = rule(want, -LR * (want - goals(ranks)), step)
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.quick("1")
@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 8])
def test_on_a_mesh_pairs_meet_that_change_from_step_to_step(ranks):
    """Known by their matrices, which also tell all that happens in a step."""

    def rank(row):
        worker = adpsgd("data", optax.sgd(0.0), seed=3)
        state = worker.init(row)
        made = []
        for _ in range(12):
            mixed, state = worker.step(row, state, row)
            made.append(mixed)
        return jnp.stack(made)

    matrices = jax.vmap(rank, axis_name="data")(jnp.eye(ranks)).swapaxes(0, 1)
    met = {tuple((matrix > 0).sum(1).tolist()) for matrix in matrices}
    for matrix in np.asarray(matrices):
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_array_equal(matrix.sum(0), np.ones(ranks))
        for i, j in zip(*np.nonzero(matrix), strict=True):
            assert i == j or (i + j) % 2 == 1
            assert matrix[i, j] == (1 if (matrix[i] > 0).sum() == 1 else 0.5)
        alone = (np.diag(matrix) == 1).sum()
        assert alone == ranks % 2
    seen = {np.asarray(matrix).tobytes() for matrix in matrices}
    assert len(seen) == (ranks + 1) // 2
    assert len(met) == (ranks // 2 + 1 if ranks % 2 else 1)


def test_on_a_mesh_pairs_average_before_the_update():
    """Sums of models change by the updates alone, made where the models were."""
    ranks = 4
    x = starts(ranks)
    for got in on_mesh(lambda over: adpsgd(over, SGD), ranks):
        updates = -LR * (x - goals(ranks))
        np.testing.assert_allclose(got.sum(0), (x + updates).sum(0), atol=1e-5)
        left = got - updates  # the means of pairs: each that of two
        near = np.abs(left[:, None] - left).max(-1) < 1e-5
        assert near.sum(1).tolist() == [2] * ranks
        x = got


@pytest.mark.parametrize("over", ["hosts", "data"])
def test_push_sum_adds_updates_to_what_is_pushed(over):
    """Not to the estimate: with a weight of 2 half as much of them is seen in it."""
    worker = sgp(connected(1)[0] if over == "hosts" else over, SGD)

    def rank(params):
        state = worker.init(params)
        own = per_device.unwrap(state.own)
        two = np.array([2.0]).view(np.uint32) if over == "hosts" else 2 * own.weight
        own = own._replace(weight=two)
        axis = None if over == "hosts" else over
        state = state._replace(own=per_device.wrap(own, axis))
        return worker.step(jnp.ones_like(params), state, params)[0]

    start = jnp.arange(3.0)
    one = jax.vmap(rank, axis_name="data")
    got = rank(start) if over == "hosts" else one(start[None])[0]
    np.testing.assert_allclose(got, start - LR / 2, rtol=1e-6)


def train(transport, worker, steps, params, state):
    goal = jnp.asarray(goals(transport.size)[transport.rank], jnp.float32)
    for _ in range(steps):
        params, state = worker.step(params - goal, state, params)
    return worker.finish(state, params)


def test_groups_begin_with_the_models_of_the_switch():
    """A late worker's first old model must not be that of long before."""

    def rank(transport):
        groups = wagma(transport, SGD, group_size=2, tau=3)
        given = []

        def start(state, params):
            given.append(np.asarray(params))
            groups.start(state, params)

        worker = warm_start(transport, SGD, groups._replace(start=start), steps=4)
        state = worker.init(jnp.zeros(DIMS))
        assert not given
        _, state = train(transport, worker, 9, jnp.zeros(DIMS), state)
        assert (state.step, worker.trace().steps) == (9, 5)
        return given

    ranks = 4
    want = goals(ranks).mean(0) * (1 - (1 - LR) ** 4)
    for given in in_threads(rank, connected(ranks, patience=20.0)):
        np.testing.assert_allclose(given, [want], atol=1e-6)


def test_a_warm_start_may_be_all_there_is():
    def rank(transport):
        groups = wagma(transport, SGD, group_size=2)
        assert warm_start(transport, SGD, groups, steps=0) is groups
        worker = warm_start(transport, SGD, groups, steps=4)
        params = jnp.zeros(DIMS)
        return train(transport, worker, 3, params, worker.init(params))[0]

    first, second = in_threads(rank, connected(2, patience=20.0))
    np.testing.assert_array_equal(first, second)


def test_a_finished_run_goes_on_as_if_never_interrupted():
    """Also between two means of all, where models differ; groups go on in turn."""
    momentum = optax.sgd(LR, momentum=0.9)

    def rank(transport):
        def make():
            return wagma(transport, momentum, group_size=2, tau=2, wait_avoiding=False)

        params, worker = jnp.zeros(DIMS), make()
        whole, _ = train(transport, worker, 10, params, worker.init(params))
        worker = make()
        params, saved = train(transport, worker, 3, params, worker.init(params))
        worker = make()
        worker.start(saved, params)
        again, _ = train(transport, worker, 7, params, saved)
        np.testing.assert_array_equal(again, whole)

    in_threads(rank, connected(4, patience=20.0))


def test_pairs_go_on_from_the_parameters_of_init_alone():
    """The thread has a model of its own: others would be dropped in silence."""
    (alone,) = connected(1)
    worker = adpsgd(alone, SGD)
    params = jnp.ones(2)
    state = worker.init(params)
    with pytest.raises(ConfigError, match="step must be 0, counted from `init`"):
        worker.step(params, state._replace(step=7), params)
    assert worker.step(params, state, params)[1].step == 1


def test_pairs_are_drawn_on_when_a_run_goes_on():
    """Else each part of a run begins with the same pairs, and short ones have no other.

    Of this seed these are 0 and 1, 2 and 3.
    """

    def rank(transport):
        worker = adpsgd(transport, optax.sgd(0.0))
        params = jnp.full(1, float(transport.rank))
        state = worker.begin(params)._replace(step=1)
        for _ in range(12):
            worker.start(state, params)
            params, state = worker.step(jnp.zeros(1), state, params)
            params, state = worker.finish(state, params)
        return float(params[0])

    models = in_threads(rank, connected(4, patience=20.0))
    assert sum(models) == pytest.approx(6.0)
    assert max(models) - min(models) < 1.0
