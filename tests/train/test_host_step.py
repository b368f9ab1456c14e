"""Workers in the training loop that share no program: threads in place of processes."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import train
from hpcjax.averaging import (
    DpsgdConfig,
    EagerConfig,
    LateConfig,
    LocalSgdConfig,
    SgpConfig,
    WagmaConfig,
    _hosts,
    local_sgd,
    train_on_hosts,
)
from hpcjax.averaging.late_config import Run
from hpcjax.core import CheckpointCorrupt, ConfigError, Diverged, Model, keys
from hpcjax.hostcomm import (
    GroupTrace,
    connected,
    join_traces,
    launch,
)
from hpcjax.models import MlpConfig
from hpcjax.optim import AdamWConfig, KfacConfig, SgdConfig
from hpcjax.train.loop import check_batch
from tests.hostcomm.threads import in_threads
from tests.train import host_ranks, tiny

ALL = 20.0
# Those that wait for each other, whose runs are the same on devices.
WAITING = {
    "local_sgd": LocalSgdConfig(period=3, **(PLACE := {"workers": 4})),
    "dpsgd": DpsgdConfig(**PLACE),
    "sgp": SgpConfig(**PLACE),
    "all at once": WagmaConfig(group_size=2, tau=1, **PLACE),
    "warm start": LocalSgdConfig(period=2, warm_start=3, **PLACE),
}


def between_processes(config):
    return dataclasses.replace(config, between="processes")


def task(averaged, transport=None, optimizer=None, steps=12):
    plain = tiny.task()
    method = train.compose(
        plain.model,
        plain.dataset,
        optimizer or SgdConfig(lr=0.1, momentum=0.9),
        averaged=averaged,
        batch_size=24,
        steps=steps,
        devices=4 if transport is None else 1,
        transport=transport,
    )
    return train.supervised(plain.model, method, plain.dataset)


def fit(made, steps=12, devices=1):
    """Trains; returns the records without times, and the last state."""
    records = tiny.Records()
    config = train.TrainConfig(steps=steps, batch_size=24, eval_every=6, max_skipped=3)
    mesh = made.mesh(devices)
    state = train.fit(made, config, seed=0, mesh=mesh, recorder=records)
    return records.values(), state


def on_hosts(averaged, optimizer=None):
    """Trains with a thread for each worker: records, states and traces by rank."""
    averaged = dataclasses.replace(averaged, workers=4, between="processes")

    def rank(transport):
        made = task(averaged, transport, optimizer)
        return *fit(made), made.method.around.traces

    return in_threads(rank, connected(4, patience=ALL))


def losses(records, name="loss"):
    return np.array([record[name] for record in records if name in record])


@pytest.mark.quick("dpsgd")
@pytest.mark.parametrize("name", WAITING)
def test_workers_that_wait_train_on_hosts_as_on_devices(name):
    """The same data, the same draws, the same averages."""
    mesh, state = fit(task(WAITING[name]), devices=4)
    hosts = on_hosts(WAITING[name])
    mean = np.mean([losses(records) for records, _, _ in hosts], axis=0)
    np.testing.assert_allclose(mean, losses(mesh), rtol=1e-5)
    kernels = np.stack([each.params["dense"]["kernel"] for _, each, _ in hosts])
    want = np.asarray(state.params.value["dense"]["kernel"])
    np.testing.assert_allclose(kernels, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_eager_sgd_of_workers_that_all_wait_is_ordinary_training():
    mesh, state = fit(task(None), devices=4)
    hosts = on_hosts(EagerConfig(mode="sync"))
    mean = np.mean([losses(records) for records, _, _ in hosts], axis=0)
    np.testing.assert_allclose(mean, losses(mesh), rtol=1e-5)
    for records, own, traces in hosts:
        got, want = own.params["dense"]["kernel"], state.params["dense"]["kernel"]
        np.testing.assert_allclose(got, want, rtol=1e-5)
        # The last step is validated with all updates made: there all are equal.
        last = losses(records, "val_loss")[-1]
        assert last == pytest.approx(losses(mesh, "val_loss")[-1], rel=1e-5)
        assert [first for first, _ in traces] == [0]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What real processes tell of runs that were cut, by rank."""
    given = (str(tmp_path_factory.mktemp("runs")),)
    ranks, count = host_ranks.train_and_go_on, host_ranks.WORKERS
    return launch(ranks, count, arguments=given, patience=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_sgd", "sgp", "sync"])
def test_an_interrupted_run_goes_on_bit_for_bit(name, real):
    """Also if the newest checkpoint of one worker is lost."""
    for told in real:
        whole, again = told[name]["whole"], told[name]["again"]
        assert again["steps"].tolist() == list(range(6, 13))
        np.testing.assert_array_equal(again["loss"], whole["loss"][5:])
        np.testing.assert_array_equal(again["kernel"], whole["kernel"])


def test_workers_that_do_not_wait_learn_and_go_on(real):
    for told in real:
        cut, again = told["wagma"]["cut"], told["wagma"]["again"]
        assert again["steps"].tolist() == list(range(6, 13))
        assert again["loss"][-1] < cut["loss"][0] / 2
    ranks = [told["wagma"]["again"]["traces"] for told in real]
    # The run stands still after steps 5 and 10: each part has a trace of its own.
    parts = [
        join_traces([GroupTrace(*own) for _, *own in part])
        for part in zip(*ranks, strict=True)
    ]
    assert [first for first, *_ in ranks[0]] == [5, 10]
    assert [part.steps for part in parts] == [5, 2]
    assert max(part.staleness().max() for part in parts) > 0


@pytest.mark.slow
def test_who_has_no_checkpoint_is_told(tmp_path):
    told = launch(
        host_ranks.go_on_without, 2, arguments=(str(tmp_path),), patience=60.0
    )
    assert told[1].startswith("CheckpointCorrupt: no checkpoint")
    assert told[0].startswith("ProcessLost: rank 1")


def test_steps_that_are_not_finite_are_left_out_and_too_many_end_the_run():
    huge = SgdConfig(lr=1e38)
    with pytest.raises(Diverged, match="3 consecutive steps"):
        on_hosts(WAITING["local_sgd"], optimizer=huge)


def test_updates_that_are_left_out_end_the_run_too():
    """Gradients are finite, but what they are scaled to is not."""
    huge = SgdConfig(lr=1e38, momentum=0.0)

    def rank(transport):
        made = task(between_processes(LocalSgdConfig(**PLACE)), transport, huge)
        with pytest.raises(Diverged, match=r"3 consecutive steps.*params dense"):
            fit(made.replace(objective=steep(made.objective)))

    in_threads(rank, connected(4, patience=ALL))


def steep(objective):
    def scaled(outputs, batch):
        totals = objective(outputs, batch)
        return totals._replace(sums={k: 1e3 * v for k, v in totals.sums.items()})

    return scaled


@pytest.mark.slow
def test_one_worker_s_bad_gradient_is_no_update():
    """Others get its old model and not its NaN."""

    def rank(transport):
        made = task(
            between_processes(WagmaConfig(workers=4, group_size=2, tau=2)), transport
        )
        good = made.objective

        def objective(outputs, batch):
            # The second worker's examples of the first step have no loss.
            totals = good(outputs, batch)
            bad = jnp.where(jnp.max(jnp.abs(batch["x"])) > limit, jnp.nan, 1.0)
            return totals._replace(sums={k: v * bad for k, v in totals.sums.items()})

        rows = made.dataset.train.inputs
        limit = np.sort(np.abs(rows).max(1))[-2]  # one example of 96
        records, state = fit(made.replace(objective=objective), steps=12)
        return (
            losses(records),
            int(state.skipped),
            np.asarray(state.params["dense"]["kernel"]),
        )

    found = in_threads(rank, connected(4, patience=ALL))
    assert sum(skipped for _, skipped, _ in found) == 3  # 12 steps are 3 epochs
    assert all(np.isfinite(kernel).all() for *_, kernel in found)
    assert sum(np.isnan(own).sum() for own, *_ in found) == 3


def test_what_cannot_be_between_processes_is_refused():
    plain = tiny.task()
    model = MlpConfig(widths=(4,)).make((4,), 3)
    averaged = between_processes(LocalSgdConfig(workers=2))
    given = {"averaged": averaged, "batch_size": 8, "steps": 1}
    (alone,) = connected(1)
    with pytest.raises(ConfigError, match="not K-FAC"):
        train.compose(model, plain.dataset, KfacConfig(), transport=alone, **given)
    with pytest.raises(ConfigError, match="must be given for processes"):
        LocalSgdConfig(between="processes")
    with pytest.raises(ConfigError, match="waits for all: late needs between"):
        DpsgdConfig(late=LateConfig())
    with pytest.raises(ConfigError, match="between devices a late worker"):
        EagerConfig(missed="newest")
    with pytest.raises(ConfigError, match="divide by the 4 devices of 4 processes"):
        on_hosts_of_odd_batch()


def on_hosts_of_odd_batch():
    averaged = between_processes(LocalSgdConfig(**PLACE))

    def rank(transport):
        made = task(averaged, transport)
        config = train.TrainConfig(steps=1, batch_size=10)
        check_batch(made, config, made.mesh(1))

    in_threads(rank, connected(4, patience=ALL))


@pytest.mark.slow
def test_gradients_are_means_over_the_devices_of_a_worker():
    averaged = between_processes(LocalSgdConfig(workers=2))

    def rank(transport, devices):
        made = task(averaged, transport)
        return fit(made, devices=devices)[1].params["dense"]["kernel"]

    one, two = (
        in_threads(rank, connected(2, patience=ALL), devices) for devices in (1, 2)
    )
    np.testing.assert_allclose(one, two, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_draws_are_each_worker_s_own_and_no_statistics_of_a_bad_step_stay(factor):
    """Those of devices are the same."""
    linear = tiny.linear()

    def init(key):
        return linear.init(key)[0], {"drawn": jnp.zeros(())}

    def apply(params, state, x, *, train, key=None, taps=None):
        outputs = linear.apply(params, {}, x, train=train)[0]
        if not train:
            return outputs, state
        return outputs, {"drawn": jax.random.uniform(keys.each_row(key, len(x))[0])}

    def drawn(transport):
        made = task(between_processes(WAITING["local_sgd"]), transport)
        good = made.objective

        def objective(outputs, batch):
            totals = good(outputs, batch)
            return totals._replace(sums={k: v * factor for k, v in totals.sums.items()})

        model = Model(init, apply)
        state = fit(made.replace(model=model, objective=objective), steps=1)[1]
        first = 6 * transport.rank  # of the 24 rows
        key = jax.random.fold_in(keys.derive(state.key, "step", 0), first)
        return float(state.model_state["drawn"]), float(jax.random.uniform(key))

    found, want = zip(*in_threads(drawn, connected(4, patience=ALL)), strict=True)
    assert len(set(want)) == 4
    assert found == (want if factor == 1.0 else (0.0,) * 4)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e25, math.inf])
def test_gradients_that_would_spoil_the_optimizer_s_state_are_no_update(factor):
    """The square of the first is no float32: Adam would divide by it for ever."""

    def rank(transport):
        averaged = between_processes(WagmaConfig(workers=4, group_size=2, tau=2))
        made = task(averaged, transport, AdamWConfig(lr=0.01))
        good = made.objective

        def objective(outputs, batch):
            totals = good(outputs, batch)
            grown = jnp.where(jnp.max(jnp.abs(batch["x"])) > limit, factor, 1.0)
            return totals._replace(sums={k: v * grown for k, v in totals.sums.items()})

        rows = made.dataset.train.inputs
        limit = np.sort(np.abs(rows).max(1))[-2]  # one example of 96
        records, state = fit(made.replace(objective=objective))
        slots = optax.tree.get(state.opt_state, "nu")["dense"]["kernel"]
        return losses(records, "left_out")[-1], np.asarray(slots)

    found = in_threads(rank, connected(4, patience=ALL))
    assert sum(left_out for left_out, _ in found) == 3  # 12 steps are 3 epochs
    assert all(np.isfinite(slots).all() for _, slots in found)


def fit_beside(
    folder, steps, every, least=lambda number: number, paused=lambda: None, **given
):
    """Trains as the first of two workers, the other of which only agrees."""
    (alone,), plain = connected(1), tiny.task()
    made = train_on_hosts(local_sgd(alone, optax.sgd(0.1)), alone)

    def pause(state):
        paused()
        return made.around.pause(state)

    around = made.around._replace(least=least, size=2, pause=pause)
    task = train.supervised(plain.model, made._replace(around=around), plain.dataset)
    config = train.TrainConfig(steps=steps, batch_size=24, checkpoint_every=every)
    records, mesh = tiny.Records(), task.mesh(1)
    given |= {"seed": 0, "mesh": mesh, "recorder": records}
    with train.Checkpoints(folder, keep=2) as checkpoints:
        train.fit(task, config, checkpoints=checkpoints, **given)
        kept = checkpoints.steps()
    return [record["step"] for record in records if "loss" in record], kept


def test_what_others_have_not_saved_is_forgotten(tmp_path):
    """Else it is later taken for what they have saved, or displaces what they have."""
    assert fit_beside(tmp_path, 10, 5)[1] == [5, 10]
    taken, kept = fit_beside(tmp_path, 8, 3, least=lambda number: min(number, 5))
    assert (taken, kept) == ([6, 7, 8], [6, 8])


def test_a_run_begins_again_only_if_all_may_have_saved_nothing(tmp_path):
    nothing = {"least": lambda _: 0}
    fit_beside(tmp_path / "one", 5, 0)
    assert fit_beside(tmp_path / "one", 2, 0, **nothing) == ([1, 2], [2])
    fit_beside(tmp_path / "two", 10, 5)
    with pytest.raises(CheckpointCorrupt, match=r"this one has those of steps \[5, 10"):
        fit_beside(tmp_path / "two", 10, 5, **nothing)


def test_nobody_is_ended_for_waiting_until_others_save(tmp_path):
    limits = []
    with train.Watchdog(tmp_path / "progress", 0, 60.0) as watchdog:
        look = {"watchdog": watchdog, "paused": lambda: limits.append(watchdog.limit())}
        fit_beside(tmp_path / "own", 6, 3, **look)
        assert watchdog.limit() < 1800
    assert limits == [1800.0] * 2


def test_all_have_saved_before_anybody_goes_on(tmp_path):
    """Who deletes an older checkpoint earlier may leave none that all have."""
    told = []

    def least(number):
        told.append((number, (tmp_path / f"{number}" / "MANIFEST.json").exists()))
        return number

    fit_beside(tmp_path, 6, 3, least=least)
    assert told == [(0, False), (0, False), (3, True)]


def test_late_workers_sleep_as_long_as_the_config_says(monkeypatch):
    slept, late = [], LateConfig()
    monkeypatch.setattr(_hosts, "time", types.SimpleNamespace(sleep=slept.append))
    on_hosts(LocalSgdConfig(period=3, late=late, **PLACE | {"between": "processes"}))
    want = late.step_seconds(Run(workers=4, steps=12, seed=0))
    assert sorted(slept) == sorted(want.flat)
