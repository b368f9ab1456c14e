"""WAGMA-SGD: real processes, their replay, its mesh version, and its baselines."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError

from hpcjax import averaging, core, sharding
from hpcjax.averaging import (
    adpsgd,
    allreduce_sgd,
    dpsgd,
    local_sgd,
    mean_every,
    sgp,
    wagma,
    warm_start,
)
from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary
from hpcjax.hostcomm import GroupTrace, connected, join_traces, launch
from tests.averaging import wagma_ranks
from tests.averaging.eager_ranks import LR, TASK
from tests.averaging.test_eager import on_devices, plain, shards
from tests.hostcomm.threads import in_threads

STEPS, RANKS = 100, 4
RUNS = {
    "as in the paper": {"group_size": 2, "tau": 5},
    "as released": {
        "group_size": 2,
        "tau": 5,
        "late_rule": "always",
        "order": "average_then_update",
    },
    "fixed, none global": {
        "group_size": 2,
        "tau": None,
        "groups": "fixed",
        "ring": STEPS,  # a process that gets no core misses any number of rounds
    },
    "all in one": {"group_size": 4, "tau": 3},
    "momenta too": {"group_size": 2, "tau": 5, "average_state": ("trace",)},
}
TX = optax.sgd(LR, momentum=0.5)


@pytest.fixture(scope="module")
def real():
    """Final weights of all processes, `[P, n]`, and the trace of each run."""
    given = (STEPS, list(RUNS.values()))
    made = launch(wagma_ranks.train, RANKS, arguments=given, patience=120.0)
    found = {}
    for name, own in zip(RUNS, zip(*made, strict=True), strict=True):
        traces = [GroupTrace(*trace) for _, trace in own]
        weights = np.stack([weights for weights, _ in own])
        found[name] = weights, join_traces(traces)
    return found


def replay(trace, **options):
    gradient = TASK.gradient(trace.size)

    def rank(x, y):
        return averaging.replay(
            trace,
            jnp.zeros(TASK.dims + 1),
            TX,
            lambda params, step: gradient(params, x, y, step),
            axis_name="data",
            **options,
        )

    return on_devices(rank, trace.size, *shards(TASK, trace.size))


@pytest.mark.slow
@pytest.mark.acceptance("wagma", 5)
@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_a_replay_ends_where_the_real_run_has_ended(real, name):
    weights, trace = real[name]
    assert trace.steps == STEPS
    assert trace.late().any()
    if trace.tau:
        assert trace.staleness().max() <= trace.tau - 1
    told = "late_rule", "order", "average_state"  # what a trace does not hold
    options = {key: RUNS[name][key] for key in told if key in RUNS[name]}
    got, losses = replay(trace, **options)
    np.testing.assert_allclose(got, weights, atol=1e-5)
    assert losses.shape == (RANKS, STEPS)
    if name == "as in the paper":  # who was late must matter, or this shows nothing
        on_time = np.broadcast_to(np.arange(STEPS)[:, None], trace.written.shape)
        other, _ = replay(trace._replace(written=on_time.astype(np.int32)))
        assert np.abs(other - weights).max() > 1e-3


def test_a_trace_of_a_later_part_is_refused():
    """Its groups are others than those of the first rounds, and its models differ."""
    written = np.zeros((4, 4), np.int32)
    trace = GroupTrace(np.zeros((4, 4)), written, 2, 0, first=3)
    with pytest.raises(ConfigError, match="from its begin can be repeated"):
        wagma("data", TX, group_size=2, tau=None, trace=trace)


def test_a_trace_that_cannot_be_is_refused():
    written = np.arange(6, dtype=np.int32)[:, None].repeat(4, 1)
    trace = GroupTrace(np.zeros((6, 4)), written, 2, 3)
    early = written + np.eye(6, 4, dtype=np.int32)
    with pytest.raises(ConfigError, match="before it is written"):
        replay(trace._replace(written=early))
    late = written.copy()
    late[2, 1] = 1
    with pytest.raises(ConfigError, match="late in a round of all"):
        replay(trace._replace(written=late))
    with pytest.raises(ConfigError, match="groups must be one of"):
        replay(trace._replace(groups="ring"))


def test_a_replay_keeps_copies_of_low_precision():
    """Steps of 2^-10 would all be lost in bfloat16 beside 1."""
    written = np.arange(64, dtype=np.int32)[:, None].repeat(2, 1)
    trace = GroupTrace(np.zeros((64, 2)), written, 2, 4)

    def rank(start):
        def gradient(params, step):
            return step, jnp.full_like(params, 2**-10)

        return averaging.replay(
            trace, start, optax.sgd(1.0), gradient, axis_name="data"
        )

    got, _ = on_devices(rank, 2, jnp.ones((2, 3), jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(float), np.full((2, 3), 1 - 2**-4))
    with pytest.raises(TypeError, match="int32"):
        on_devices(rank, 2, jnp.ones((2, 3), jnp.int32))


MAKERS = {
    "allreduce": lambda over, **_: allreduce_sgd(over, TX),
    "local": lambda over, **_: local_sgd(over, TX, period=3),
    "dpsgd": lambda over, **_: dpsgd(over, TX),
    "sgp": lambda over, **_: sgp(over, TX),
    "groups": lambda over, **host: wagma(over, TX, group_size=2, tau=5, **host),
    "none global": lambda over, **host: wagma(
        over, TX, group_size=4, tau=None, late_rule="always", **host
    ),
    "warm groups": lambda over, **host: warm_start(
        over, TX, wagma(over, TX, group_size=2, tau=5, **host), steps=4
    ),
    "warm pushes": lambda over, **_: warm_start(over, TX, sgp(over, TX), steps=3),
}


def on_mesh(make, ranks, steps):
    """Trains on a mesh; returns the weights of all workers."""
    gradient = TASK.gradient(ranks)

    def rank(x, y):
        worker = make("data")
        params = vary(jnp.zeros(TASK.dims + 1), "data")
        state = worker.init(params)

        def one(carry, step):
            params, state = carry
            _, grads = gradient(params, x, y, step)
            return worker.step(grads, state, params), None

        carry = params, state._replace(own=vary(state.own, "data"))
        (params, state), _ = jax.lax.scan(one, carry, jnp.arange(steps))
        return worker.finish(state, params)[0]

    return on_devices(rank, ranks, *shards(TASK, ranks))


def on_hosts(make, ranks, steps):
    """Trains with a thread for each worker; returns the weights of all."""
    gradient = jax.jit(TASK.gradient(ranks))

    def rank(transport):
        x, y = map(jnp.asarray, TASK.shard(0, transport.rank, ranks))
        worker = make(transport)
        params = jnp.zeros(TASK.dims + 1)
        state = worker.init(params)
        for step in range(steps):
            _, grads = gradient(params, x, y, step)
            params, state = worker.step(grads, state, params)
        return np.asarray(worker.finish(state, params)[0])

    return np.stack(in_threads(rank, connected(ranks, patience=60.0)))


@pytest.mark.quick("sgp", "warm pushes")
@pytest.mark.parametrize("name", MAKERS)
def test_hosts_and_a_mesh_agree(name):
    ranks, steps = 4, 13
    make, waiting = MAKERS[name], {"wait_avoiding": False}
    got = on_hosts(lambda over: make(over, **waiting), ranks, steps)
    want = on_mesh(make, ranks, steps)
    np.testing.assert_allclose(got, want, atol=1e-6)
    spread = np.ptp(got, axis=0).max()
    assert (spread > 1e-3) == (name != "allreduce")


@pytest.mark.acceptance("wagma", 4)
@pytest.mark.parametrize("backend", ["hosts", "mesh"])
def test_one_group_of_all_is_allreduce_sgd(backend):
    """For plain SGD, whose update is linear."""
    ranks, steps, sgd = 4, 100, optax.sgd(LR)
    train = on_hosts if backend == "hosts" else on_mesh
    waiting = {"wait_avoiding": False} if backend == "hosts" else {}
    got = train(
        lambda over: wagma(over, sgd, group_size=ranks, tau=10, **waiting), ranks, steps
    )
    np.testing.assert_allclose(got, plain(sgd, TASK, ranks, steps), atol=1e-6)


@pytest.mark.parametrize("period", [1, 4])
def test_groups_of_one_are_local_sgd(period):
    got = on_mesh(lambda over: wagma(over, TX, group_size=1, tau=period), 4, 10)
    want = on_mesh(lambda over: local_sgd(over, TX, period=period), 4, 10)
    np.testing.assert_allclose(got, want, atol=1e-7)


def test_wait_avoiding_groups_of_one_are_local_sgd_on_hosts_too():
    got = on_hosts(lambda over: wagma(over, TX, group_size=1, tau=4), 4, 10)
    want = on_mesh(lambda over: local_sgd(over, TX, period=4), 4, 10)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_asynchronous_pairs_learn_and_keep_what_was_learned():
    """A hyperplane of 65 numbers: the mean over workers comes near its truth."""
    got = on_hosts(lambda over: adpsgd(over, optax.sgd(LR)), 4, 150)
    truth = TASK.truth(0)
    error = np.linalg.norm(got.mean(0) - truth) / np.linalg.norm(truth)
    alone = on_mesh(lambda over: local_sgd(over, optax.sgd(LR), period=1000), 4, 150)
    lonely = np.linalg.norm(alone - truth, axis=1).mean() / np.linalg.norm(truth)
    assert error < 0.1
    assert error < lonely


def decaying():
    """Learning rates 0.2, and after 80 steps less and less."""
    return optax.sgd(lambda step: 0.2 * 0.85 ** jnp.maximum(step - 80.0, 0.0))


@pytest.mark.quick("2")
@pytest.mark.acceptance("wagma", 10)
@pytest.mark.parametrize("overlap", [0, 2])
def test_push_sum_agrees_on_a_quadratic(overlap):
    """f_i = |x - a_i|^2 / 2: all come to the mean of the a_i."""
    ranks, steps = 8, 150
    goals = np.random.default_rng(0).standard_normal((ranks, 5)).astype(np.float32)

    def rank(transport):
        worker = sgp(transport, decaying(), overlap=overlap)
        params = jnp.zeros(5)
        state = worker.init(params)
        for _ in range(steps):
            grads = params - goals[transport.rank]
            params, state = worker.step(grads, state, params)
        params, state = worker.finish(state, params)
        return np.asarray(params), state.own.weight.view(np.float64)[0]

    found = in_threads(rank, connected(ranks, patience=60.0))
    got = np.stack([params for params, _ in found])
    assert np.ptp(got, axis=0).max() < 1e-4
    assert sum(weight for _, weight in found) == pytest.approx(ranks, abs=1e-6)
    np.testing.assert_allclose(
        # What is late depends on the clock: steps that are large then leave a trace.
        got.mean(0),
        goals.mean(0),
        atol=0.1 if overlap else 1e-4,
    )


def test_per_device_state_goes_in_and_out_of_a_compiled_step():
    """A loop outside `shard_map`: parameters and state are `PerDevice`."""
    ranks, steps = 4, 6
    mesh = sharding.make_mesh({"data": ranks})
    worker, gradient = MAKERS["groups"]("data"), TASK.gradient(ranks)
    params = core.PerDevice(value=jnp.zeros(TASK.dims + 1), axis="data")
    state = per_device.expand((params, worker.init(params)), mesh)
    data = core.PerDevice(value=shards(TASK, ranks), axis="data")

    def body(carry, data, step):
        (params, state), own = per_device.enter(carry), per_device.enter(data)
        _, grads = gradient(params.value, *own.value, step)
        grads = core.PerDevice(value=grads, axis="data")
        return per_device.leave(worker.step(grads, state, params))

    state = jax.device_put(state, sharding.state_shardings(state, mesh))
    specs = per_device.specs(state)
    step_of = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, per_device.specs(data), P()),
            out_specs=specs,
        )
    )
    for step in range(steps):
        state = step_of(state, data, jnp.asarray(step))
    want = on_mesh(MAKERS["groups"], ranks, steps)
    np.testing.assert_allclose(state[0].value, want, atol=1e-7)
    assert int(state[1].step) == steps


def test_low_precision_parameters_have_a_copy_in_float32():
    """Steps of 2^-10 would all be lost in bfloat16 beside 1."""
    (alone,) = connected(1)
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros(2)}
    for make in (
        lambda: wagma(alone, optax.sgd(1.0), group_size=1, tau=2),
        lambda: sgp(alone, optax.sgd(1.0)),
        lambda: adpsgd(alone, optax.sgd(1.0)),
    ):
        worker = make()
        state, got = worker.init(params), params
        grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, 2**-10), params)
        for _ in range(64):
            got, state = worker.step(grads, state, got)
        got, state = worker.finish(state, got)
        assert got["a"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(got["a"].astype(float), np.full(3, 1 - 2**-4))
        np.testing.assert_array_equal(got["b"], np.full(2, -(2**-4)))


def test_named_fields_of_the_state_are_averaged_and_no_others():
    ranks = 2

    def rank(transport):
        worker = wagma(
            transport,
            optax.adam(0.1),
            group_size=2,
            wait_avoiding=False,
            average_state=("mu",),
        )
        params = {"w": jnp.zeros(3)}
        state = worker.init(params)
        grads = {"w": jnp.full(3, 1.0 + transport.rank)}
        _, state = worker.step(grads, state, params)
        worker.finish(state, params)
        adam = state.own.inner[0]
        return float(adam.mu["w"][0]), float(adam.nu["w"][0]), int(adam.count)

    found = in_threads(rank, connected(ranks, patience=20.0))
    assert [mu for mu, *_ in found] == pytest.approx([0.15, 0.15])
    assert [nu for _, nu, _ in found] == pytest.approx([0.001, 0.004])
    (alone,) = connected(1)
    with pytest.raises(ConfigError, match="fields of the optimizer's state"):
        wagma(alone, TX, group_size=1, average_state=("mew",)).init(jnp.zeros(2))


def test_means_of_other_trees_are_of_global_rounds():
    """Such as the statistics of a batch norm."""

    def rank(transport):
        exchange = mean_every(transport, 3)
        mine = np.full(2, float(transport.rank), np.float32)
        seen = [exchange.average(step, mine, ())[0][0] for step in range(3)]
        exchange.finish()
        return seen

    found = in_threads(rank, connected(2, patience=20.0))
    assert [list(map(float, seen)) for seen in found] == [[0, 0, 0.5], [1, 1, 0.5]]


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (local_sgd, "period", (1, 2)),
        (sgp, "neighbours", (1, 2)),
        (wagma, "tau", (1, 2)),
        (wagma, "late_rule", ("conditional", "always")),
        (wagma, "order", ("update_then_average", "average_then_update")),
    ],
)
def test_workers_of_different_settings_are_told(make, name, values):
    """Each would wait for what nobody sends, or mix by a rule of its own."""

    def rank(transport):
        settings = {"group_size": 2} if make is wagma else {}
        settings[name] = values[transport.rank]
        worker = make(transport, TX, **settings)
        with pytest.raises(ConfigError, match=f"{name} must be the same in all ranks"):
            worker.init(jnp.zeros(2))

    in_threads(rank, connected(2, patience=20.0))


@pytest.mark.parametrize(
    "make", [lambda t: wagma(t, TX, group_size=2), lambda t: sgp(t, TX),
             lambda t: dpsgd(t, TX), lambda t: adpsgd(t, TX)],
)  # fmt: skip
def test_workers_that_begin_differently_are_told(make):
    def rank(transport):
        worker = make(transport)
        with pytest.raises(ConfigError, match="initial parameters"):
            worker.init({"w": jnp.full(2, float(transport.rank))})

    in_threads(rank, connected(2, patience=20.0))


def test_integers_are_refused_by_path():
    (alone,) = connected(1)
    params = {"w": jnp.zeros(2), "deep": {"count": jnp.zeros(2, jnp.int32)}}
    workers = [make(alone, TX) for make in (dpsgd, sgp, adpsgd)]
    for worker in (wagma(alone, TX, group_size=1), *workers):
        with pytest.raises(TypeError, match=r"deep/count \(int32\)"):
            worker.init(params)
        with pytest.raises(ConfigError, match="there must be parameters"):
            worker.init({})


def test_wrong_settings_are_refused():
    (alone,) = connected(1)
    with pytest.raises(ConfigError, match="group_size must be at most 1"):
        wagma(alone, TX, group_size=2)
    for over in (alone, "data"):
        with pytest.raises(ConfigError, match="tau must be an integer >= 1"):
            wagma(over, TX, group_size=1, tau=0)
        for wrong in (3, 0):
            with pytest.raises(ConfigError, match="group_size must be a power of two"):
                wagma(over, TX, group_size=wrong)
        for name in ("groups", "method"):
            with pytest.raises((ConfigError, TypeCheckError), match=name):
                wagma(over, TX, group_size=1, **{name: "ring"})
    with pytest.raises(ConfigError, match="group_size must be at most 4"):
        on_mesh(lambda over: wagma(over, TX, group_size=8), 4, 1)
    with pytest.raises(ConfigError, match="ring must be an integer >= 1"):
        wagma(alone, TX, group_size=1, ring=0)
    with pytest.raises(ConfigError, match="overlap must be 0 on a mesh"):
        sgp("data", TX, overlap=1)
