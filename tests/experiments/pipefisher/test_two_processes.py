"""PipeFisher in two real processes: right, complete, and never waiting for the dead."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import signal
import types

import numpy as np
import pytest

from experiments.pipefisher import tables, two_processes
from hpcjax import hostcomm
from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost
from hpcjax.runs import in_processes
from tests.experiments import rows
from tests.experiments.pipefisher import stages

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TINY = two_processes.Config(
    width=8, layers=2, rows=16, steps=5, warmup=1, runs=1, lr=0.1, damping=0.1
)
RECORD = pathlib.Path(two_processes.__file__).parent / "results/two-processes.cpu.json"
# As if measured: a refresh takes several steps.
SECONDS = {
    "F": 4.0,
    "B": 8.0,
    **{
        f"{kind} {n}": 1.5
        for kind in ("curvA", "curvB", "invA", "invB")
        for n in (0, 1)
    },
}


def has_cores():
    return len(getattr(os, "sched_getaffinity", lambda pid: ())(0)) >= 2


needs_cores = pytest.mark.skipif(not has_cores(), reason="fewer than 2 free cores")


@pytest.fixture
def filled():
    made = two_processes.plan(TINY, [SECONDS, SECONDS])
    assert made.period >= 2
    assert made.visible[0]
    assert made.visible[made.period - 1]
    return made


def ran(mode, cfg=TINY, function=stages.run_once, **options):
    """Returns what both processes have done and hold; `SECONDS` is what all takes."""
    return in_processes(
        function,
        cfg,
        2,
        given=(SECONDS, mode),
        cores=hostcomm.free_cores(2),
        **{"patience": 20.0, **options},
    )


def steps_of(filled):
    return two_processes.lengths(TINY, filled.period)[1]


def figures(filled, told):
    first, _ = two_processes.lengths(TINY, filled.period)
    return two_processes.figures_of(filled, told, first)


def moments(kernels, inputs, targets):
    """Returns gradients and factors of one step, in float64, without a pipeline."""
    grads = [np.zeros_like(k) for k in kernels]
    factors = {}
    for x, target in zip(inputs, targets, strict=True):
        kept, output, rows = [], x, len(x)
        for kernel in kernels:
            kept.append(np.column_stack([output, np.ones(rows)]))
            output = np.tanh(kept[-1] @ kernel)
        error = (output - target) / rows
        for layer in reversed(range(len(kernels))):
            error = error * (1 - output**2)
            given, each = kept[layer], rows * error
            grads[layer] += given.T @ error / len(inputs)
            for side, r in (("A", given), ("B", each)):
                added = np.einsum("ri,rj->ij", r, r) / (rows * len(inputs))
                factors[side, layer] = factors.get((side, layer), 0) + added
            error, output = error @ kernels[layer][:-1].T, given[:, :-1]
    return grads, factors


def emulated(cfg, filled, steps):
    """Returns kernels after `steps` with the inverses that each flush may use."""
    inputs, targets = (each.astype(np.float64) for each in two_processes.batch(cfg))
    kernels = [each.astype(np.float64) for each in two_processes.initial(cfg)]
    active, fresh = {}, {}
    for step in range(steps):
        grads, factors = moments(kernels, inputs, targets)
        place = step % filled.period
        if place == 0:
            fresh = {
                key: np.linalg.inv(f + cfg.damping * np.eye(len(f)))
                for key, f in factors.items()
            }
        if step == 0:
            active = dict(fresh)
        for stage, layer, side in filled.visible[place]:
            key = side, stage * cfg.layers + layer
            active[key] = fresh[key]
        kernels = [
            kernel - cfg.lr * active["A", n] @ grad @ active["B", n]
            for n, (kernel, grad) in enumerate(zip(kernels, grads, strict=True))
        ]
    return kernels


def kernels_of(told):
    return [own["arrays"][f"kernel {n}"] for own in told for n in range(TINY.layers)]


@needs_cores
@pytest.mark.acceptance("pipefisher", 12)
def test_parameters_are_those_of_the_schedules_stale_inverses(filled):
    told = ran("filled")
    wanted = emulated(TINY, filled, steps_of(filled))
    every = tuple(itertools.chain(*filled.visible.values()))
    at_once = types.SimpleNamespace(period=1, visible={0: every})
    fresh = emulated(TINY, at_once, steps_of(filled))
    for found, stale, new in zip(kernels_of(told), wanted, fresh, strict=True):
        np.testing.assert_allclose(found, stale, rtol=1e-3, atol=1e-4)
        assert np.abs(stale - new).max() > 1e-3
    tasks = 2 * 2 * TINY.layers * (TINY.micro_batches + 1)
    made = figures(filled, told)
    assert made["units"] == tasks
    assert 0 < made["utilization"] <= 1
    arrays = dict(told[1]["arrays"])
    two_processes.check_gradients(TINY, 1, arrays)
    two_processes.check_inverses(TINY, arrays)
    for name, check in (
        ("grad 1", lambda wrong: two_processes.check_gradients(TINY, 1, wrong)),
        ("inverse B 0", lambda wrong: two_processes.check_inverses(TINY, wrong)),
    ):
        with pytest.raises(HpcjaxError, match="relative difference"):
            check({**arrays, name: arrays[name] * np.float32(1.05)})


@needs_cores
def test_without_filling_it_is_gradient_descent(filled):
    told = ran("without")
    inputs, targets = (each.astype(np.float64) for each in two_processes.batch(TINY))
    kernels = [each.astype(np.float64) for each in two_processes.initial(TINY)]
    for _ in range(steps_of(filled)):
        grads, _ = moments(kernels, inputs, targets)
        kernels = [k - TINY.lr * g for k, g in zip(kernels, grads, strict=True)]
    for found, wanted in zip(kernels_of(told), kernels, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert figures(filled, told)["units"] == 0


@needs_cores
def test_work_left_out_is_refused():
    with pytest.raises(HpcjaxError, match=r"rank 1.*(?s:.)*ran 0 times instead of 1"):
        ran("filled", function=stages.lose_a_task)


def test_processes_that_share_a_core_are_refused():
    def reply(*cores):
        return {"cores": [list(core) for core in cores]}

    two_processes.check_one_thread([reply([0], [0]), reply([1])])
    for wrong in (
        [reply([0]), reply([0])],
        [reply([0], [0, 1]), reply([1])],
        [reply([0], [2]), reply([1])],
    ):
        with pytest.raises(HpcjaxError, match="each process must have a core"):
            two_processes.check_one_thread(wrong)


def test_one_core_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(two_processes.runs, "in_processes", None)
    with pytest.raises(ConfigError, match="2 processes need a core each"):
        two_processes.run(TINY, None)


@needs_cores
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_partner_that_dies_or_hangs_in_a_step_is_named(number):
    endless = dataclasses.replace(TINY, steps=10**6)
    with pytest.raises(ProcessLost, match="rank 0: rank 1 has"):
        ran(
            int(number),
            endless,
            stages.stop_in_a_step,
            patience=5.0 if number == signal.SIGSTOP else 20.0,
        )


@pytest.mark.parametrize(
    ("share", "seconds", "holds"),
    [
        ((0.6, 0.76), (0.1, 0.119), [True, True]),
        ((0.6, 0.74), (0.1, 0.119), [False, True]),
        ((0.6, 0.76), (0.1, 0.121), [True, False]),
    ],
)
def test_the_table_judges_points_and_steps(share, seconds, holds):
    each = np.ones((2, 5))
    run = rows.run(
        {"row": two_processes.MODES},
        utilization=("row run", np.array(share)[:, None] * each),
        seconds=("row run", np.array(seconds)[:, None] * each),
        cpu=("row run", each),
        units=("row run", each),
    )
    found = rows.verdicts(tables.TWO_PROCESSES, tables.medians({"all": run}))
    assert list(found) == ["points", "step"]
    assert [verdict.holds for verdict in found.values()] == holds


def test_the_recorded_measurement_holds_and_is_of_the_default_work():
    record = json.loads(RECORD.read_text())
    assert record["source"] == "measured"
    assert all(claim["holds"] for claim in record["claims"].values())
    cells = record["cells"]
    gained = cells["filled.utilization"] - cells["without.utilization"]
    assert math.isclose(100 * gained, record["claims"]["points"]["ours"], rel_tol=1e-9)
    for row in two_processes.MODES:
        assert 0 < cells[f"{row}.utilization"] <= 1
        # Who computes is busy: waiting took no time of a core.
        assert cells[f"{row}.cpu"] <= 1.02
    assert cells["without.units"] == 0
    default = two_processes.Config()
    per_layer = 2 * (default.micro_batches + 1)
    assert cells["filled.units"] == two_processes.STAGES * default.layers * per_layer
    origin = record["provenance"]
    assert origin["cpu_count"] >= 2
    assert origin["versions"]["jax"]
    (run,) = record["runs"]
    assert run["config"] == "pipefisher/two_processes"
    assert not run["diverged"]
