"""Eager SGD: real processes, their replay, and what it converges to."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from experiments.eager.hyperplane import Hyperplane
from hpcjax import averaging, sharding
from hpcjax.averaging import eager_sgd
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary
from hpcjax.cost import simulate_rounds
from hpcjax.hostcomm import (
    PartialTrace,
    connected,
    inject_delays,
    join_traces,
    launch,
)
from tests.averaging import eager_ranks
from tests.hostcomm.threads import in_threads

STEPS, RANKS = 200, 4
# Steps between averages of the models, and settings.
RUNS = {
    "sync": (0, {"mode": "sync"}),
    "solo, apply_all": (0, {"mode": "solo", "limiter": 8}),
    "majority, apply_all": (0, {"mode": "majority", "limiter": 8, "seed": 3}),
    "solo, newest": (40, {"mode": "solo", "missed": "newest"}),
    "majority, newest": (30, {"mode": "majority", "missed": "newest", "limiter": 0}),
    "quorum, drop": (0, {"mode": 2, "limiter": 0, "ring": 5, "stale": "drop"}),
}


@pytest.fixture(scope="module")
def real():
    """Final weights of all processes, `[P, n]`, and the trace of each kind of run."""
    given = (STEPS, list(RUNS.values()))
    made = launch(eager_ranks.train, RANKS, arguments=given, patience=120.0)
    found = {}
    for name, own in zip(RUNS, zip(*made, strict=True), strict=True):
        traces = [PartialTrace(*trace) for _, trace in own]
        found[name] = np.stack([weights for weights, _ in own]), join_traces(traces)
    return found


def on_devices(function, ranks, *arguments):
    """Runs it on a mesh; everything differs from device to device."""
    mesh = sharding.make_mesh({"data": ranks})
    mapped = jax.shard_map(
        lambda *own: jax.tree.map(
            lambda leaf: leaf[None], function(*(leaf[0] for leaf in own))
        ),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arguments))


def shards(task, ranks, seed=0):
    parts = [task.shard(seed, rank, ranks) for rank in range(ranks)]
    return tuple(np.stack(each) for each in zip(*parts, strict=True))


def replay(trace, task, tx, seed=0, value=None):
    """Returns final weights `[P, n]` and values `[P, T]`."""
    gradient = task.gradient(trace.size)

    def rank(x, y):
        def own(params, step):
            loss, grads = gradient(params, x, y, step)
            return (value(params) if value else loss), grads

        params = jnp.zeros(task.dims + 1)
        return averaging.replay(trace, params, tx, own, axis_name="data")

    return on_devices(rank, trace.size, *shards(task, trace.size, seed))


TX = optax.sgd(eager_ranks.LR, momentum=0.5)


@pytest.mark.slow
@pytest.mark.acceptance("eager-sgd", 3)
@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_a_replay_ends_where_the_real_run_has_ended(real, name):
    """Of every worker, though each may have applied other results."""
    weights, trace = real[name]
    assert trace.steps == STEPS
    if name != "sync":
        assert trace.staleness().max() > 0
    got, _ = replay(trace, eager_ranks.TASK, TX)
    np.testing.assert_allclose(got, weights, atol=1e-5)


@pytest.mark.slow
@pytest.mark.processes
def test_the_real_runs_are_what_their_names_say(real):
    """Without this a replay of nothing but synchronous rounds would pass."""
    for name, (weights, trace) in real.items():
        length = np.diff(trace.applied, axis=-1)[..., 0]
        if "newest" in name:
            assert (length == 0).any()
            assert length.max() == 1
        elif name != "sync":
            assert length.max() > 1
            np.testing.assert_array_equal(weights, weights[:1].repeat(RANKS, 0))
        assert ((trace.contributed < 0).any()) == ("drop" in name)


def plain(tx, task, ranks, steps):
    """Training with an ordinary sum over the devices, then one division."""
    gradient = task.gradient(ranks)

    def rank(x, y):
        def one(carry, step):
            params, inner = carry
            # Differing parameters: JAX would add up gradients of common ones itself.
            _, grads = gradient(vary(params, "data"), x, y, step)
            mean = jax.lax.psum(grads, "data") / ranks
            updates, inner = tx.update(mean, inner, params)
            return (optax.apply_updates(params, updates), inner), None

        params = jnp.zeros(task.dims + 1)
        carry, _ = jax.lax.scan(one, (params, tx.init(params)), jnp.arange(steps))
        return vary(carry[0], "data")

    return on_devices(rank, ranks, *shards(task, ranks))


def trace_of_sync(steps, ranks):
    return simulate_rounds(np.ones((steps, ranks)), mode="sync").trace()


@pytest.mark.acceptance("eager-sgd", 4)
@pytest.mark.parametrize("tx", [TX, optax.adam(0.01)], ids=["momentum", "adam"])
def test_a_replay_of_sync_is_plain_training_to_the_last_bit(tx):
    task, ranks, steps = eager_ranks.TASK, 4, 50
    got, _ = replay(trace_of_sync(steps, ranks), task, tx)
    np.testing.assert_array_equal(got, plain(tx, task, ranks, steps))


@pytest.mark.slow
@pytest.mark.acceptance("eager-sgd", 4)
@pytest.mark.processes
def test_the_real_run_of_sync_is_plain_training(real):
    weights, _ = real["sync"]
    steps = STEPS
    want = plain(TX, eager_ranks.TASK, RANKS, steps)
    np.testing.assert_allclose(weights, want, rtol=1e-6, atol=1e-6)


CI = Hyperplane(dims=1024, points=8192, batch=512)
KINDS = {
    "sync": ("sync", "apply_all", 0),
    "apply_all": ("majority", "apply_all", 0),
    "newest, averaged": ("majority", "newest", 50),
}


@pytest.mark.slow
@pytest.mark.acceptance("eager-sgd", 7)
@pytest.mark.parametrize("seed", range(3))
def test_majority_learns_as_much_in_as_many_steps_and_sooner(seed):
    """By the clock of the event model: one process of 8 is 200 ms late, base 20 ms."""
    delays = inject_delays("random_one", STEPS, 8, delay=0.2, seed=seed)
    excess = CI.excess(seed)
    final, arrive, curves = {}, {}, {}
    for name, (mode, missed, every) in KINDS.items():
        times = simulate_rounds(
            0.02 + delays, mode=mode, seconds=0.005, seed=seed, sync_models_every=every
        )
        trace = times.trace(missed)
        weights, curves[name] = replay(trace, CI, optax.sgd(0.1), seed, excess)
        final[name] = np.mean([excess(own) for own in weights])
        arrive[name] = times.arrive
    assert final["apply_all"] <= 1.05 * final["sync"]
    assert final["newest, averaged"] <= 1.05 * final["sync"]
    reached = np.argmax(curves["sync"][0] <= 2 * final["sync"])
    when = arrive["sync"][reached, 0]
    then = [
        losses[np.searchsorted(times, when, "right") - 1]
        for losses, times in zip(
            curves["apply_all"], arrive["apply_all"].T, strict=True
        )
    ]
    assert np.mean(then) < curves["sync"][0, reached]


def test_the_mean_is_over_all_workers_and_in_the_dtype_of_the_parameters():
    (alone,) = connected(1)
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": {"c": jnp.zeros(4)}}
    worker = eager_sgd(alone, optax.sgd(0.5), mode="solo", sync_models_every=1)
    state = worker.init(params)
    for _ in range(2):
        got, state = worker.step(jax.tree.map(jnp.ones_like, params), state, params)
    got, state = worker.finish(state, got)
    assert got["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(got["a"].astype(float), np.full((2, 3), 0.5))
    np.testing.assert_array_equal(got["b"]["c"], np.full(4, -0.5))
    assert worker.trace().sync_models_every == 1


def test_a_finished_state_goes_on_with_other_rounds():
    """As after a restart: momentum is kept, and steps are counted on."""
    (alone,) = connected(1)
    tx, params = optax.sgd(0.5, momentum=0.9), {"w": jnp.ones(3)}
    inner, want = tx.init(params), params
    for _ in range(4):
        updates, inner = tx.update({"w": jnp.ones(3)}, inner)
        want = optax.apply_updates(want, updates)
    state = None
    for _ in range(2):
        worker = eager_sgd(alone, tx, mode="solo")
        state = state or worker.begin(params)
        worker.start(state, params)
        for _ in range(2):
            params, state = worker.step({"w": jnp.ones(3)}, state, params)
        params, state = worker.finish(state, params)
    assert state.step == 4
    np.testing.assert_allclose(params["w"], want["w"], rtol=1e-6)


@pytest.mark.parametrize("differing", ["initial parameters", "sync_models_every"])
def test_workers_that_begin_differently_are_told(differing):
    """Their replicas would never be the same, or wait for each other in vain."""

    def rank(transport):
        own = transport.rank if differing == "initial parameters" else 0
        worker = eager_sgd(transport, TX, sync_models_every=transport.rank - own)
        with pytest.raises(ConfigError, match=f"{differing}.* must be the same"):
            worker.init(jnp.full(3, float(own)))

    in_threads(rank, connected(2, patience=20.0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_only_real_parameters_are_trained(dtype):
    worker = eager_sgd(connected(1)[0], TX)
    with pytest.raises(TypeError, match=r"must be real floating point: got \['w"):
        worker.init({"w": jnp.ones(2, dtype)})


def test_gradients_of_other_shapes_are_not_taken_for_others():
    """Two that change places are of the same size as before."""
    worker = eager_sgd(connected(1)[0], TX)
    params = {"a": jnp.ones((1, 3)), "b": jnp.ones(1)}
    state = worker.init(params)
    with pytest.raises(ConfigError, match=r"here \(1, 3\): got shape=\(1,\)"):
        worker.step({"a": params["b"], "b": params["a"]}, state, params)


def test_newest_without_averages_warns():
    (alone,) = connected(1)
    with pytest.warns(UserWarning, match="drift apart"):
        eager_sgd(alone, optax.sgd(0.1), missed="newest")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager_sgd(alone, optax.sgd(0.1), missed="newest", sync_models_every=9)
        worker = eager_sgd(alone, optax.sgd(0.1))
    state = worker.begin(jnp.zeros(4))
    with pytest.raises(ConfigError, match="`init` comes first"):
        worker.step(jnp.zeros(4), state, jnp.zeros(4))
    worker.start(state, jnp.zeros(4))


def test_a_trace_that_cannot_be_is_refused():
    trace = trace_of_sync(5, 4)
    early = trace.applied.copy()
    early[0, 1] = 0, 3  # two rounds before they are summed
    with pytest.raises(ConfigError, match="before its round is summed"):
        replay(trace._replace(applied=early), eager_ranks.TASK, TX)
    with pytest.raises(ConfigError, match="the axis has 4 devices: got P=8"):
        on_devices(
            lambda x: averaging.replay(
                trace_of_sync(5, 8),
                jnp.zeros(3),
                TX,
                lambda params, step: (0.0, params),
                axis_name="data",
            ),
            4,
            np.zeros(4),
        )
