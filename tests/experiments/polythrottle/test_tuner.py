"""The tuner on simulated devices: what it finds, guards, refuses and flags."""

import dataclasses
import pathlib

import numpy as np
import pytest

from configs.polythrottle import _devices as devices
from experiments.polythrottle import (
    batch,
    convergence,
    honesty,
    savings,
    tune,
    workloads,
)
from experiments.polythrottle import tuner as module
from experiments.polythrottle.simulator import Here, Simulated
from hpcjax import perf
from hpcjax.core import ConfigError
from hpcjax.runs import cli, discover
from tests.perf import fake_sysfs

ROOT = pathlib.Path(__file__).parents[3]
discover.activate(ROOT)


def simulated(name="efficientnet_b0", batches=(1, 2, 4), seed=0, device=devices.TX2):
    return Simulated(device, workloads.work_of(name), batches, (seed,))


@pytest.mark.acceptance("polythrottle", 5)
@pytest.mark.parametrize("name", ["tx2", "orin"])
def test_fifteen_trials_come_near_the_optimum(name):
    device = devices.TX2 if name == "tx2" else devices.ORIN
    cfg = convergence.Config(device=device)
    found = []
    for strategy in (0, 1):
        case = convergence.make_case(cfg, "efficientnet_b0", 3.0, 0, strategy)
        how = convergence.STRATEGY[convergence.STRATEGIES[strategy]]
        places, measured = how(case, 15)
        found.append(convergence.judge(case, places, measured, 15))
    searched, drawn = found
    assert searched["excess"] <= 0.05
    assert searched["feasible"]
    assert drawn["excess"] > 0.05
    assert len(searched["best"]) == 15


def test_both_phases_save_energy():
    hot = dataclasses.replace(devices.TX2, cpu_w=20.0)
    device = simulated(device=hot)
    objective = 6 * device.spend(device.start).seconds
    found = module.tune(device, objective, budget=8, batches=30, seed=0)
    assert found.feasible
    assert found.checked.p95 <= objective
    assert found.point["cpu_mhz"] < device.cpu_mhz[-1]
    spent = device.spend(found.point)
    assert spent.joules < 0.8 * device.spend(device.start).joules
    without = {k: v for k, v in found.point.items() if k != "cpu_mhz"}
    assert spent.joules < device.spend(without).joules
    # Where the CPU takes little, its gain is in the noise, and it stays.
    cool = module.tune(simulated(), objective, budget=6, batches=30, seed=0)
    assert "cpu_mhz" not in cool.point
    assert found.trials[0] == device.start
    assert len(found.measured) == len(found.trials) == 8


class Scripted:
    """A device whose p95 and joules are given; each measurement is the same."""

    cpu_mhz = ()

    def __init__(self, p95s, spread=0.0):
        self.p95s, self.spread = p95s, spread

    def measure(self, point, batches):
        level = self.p95s[point["batch"]]
        parts = np.repeat([1 - self.spread, 1, 1, 1], batches // 4)
        return module.Measured(1.0, level * parts)


@pytest.mark.acceptance("polythrottle", 8)
def test_the_guard_takes_the_first_with_a_margin():
    points = [{"batch": n} for n in range(3)]
    device = Scripted([0.995, 0.985, 0.5])
    assert module.choose(device, points, 1.0)[0] == {"batch": 1}
    assert module.choose(device, points, 1.0, guard=False)[0] == {"batch": 0}
    # A p95 that differs by a tenth between parts of the queries has a wider margin.
    wide = Scripted([0.995, 0.985, 0.5], spread=0.1)
    assert module.choose(wide, points, 1.0)[0] == {"batch": 2}
    assert module.choose(Scripted([2.0]), points[:1], 1.0) is None


def test_the_guard_takes_as_many_queries_as_a_machine_has_done():
    device = Scripted([0.5])
    device.measure = lambda point, batches: module.Measured(1.0, np.full(203, 0.5))
    assert module.choose(device, [{"batch": 0}], 1.0)[0] == {"batch": 0}


@pytest.mark.slow
@pytest.mark.acceptance("polythrottle", 8)
def test_guarded_choices_are_feasible_afresh():
    cfg = honesty.Config(device=devices.TX2, choices=24)
    guarded, unguarded = np.array(
        [honesty.choose_twice(cfg, choice) for choice in range(cfg.choices)]
    ).T
    assert guarded.mean() >= 0.95
    assert unguarded.mean() < guarded.mean()


@pytest.mark.acceptance("polythrottle", 9)
def test_training_is_admitted_once_the_objective_allows_it():
    halves, left_out = honesty.serve(honesty.Config(device=devices.TX2))
    assert halves["admitted"][0] == 0
    assert halves["admitted"][1] >= 1
    assert max(halves["p95"]) <= 1
    assert halves["always_p95"][0] > 1
    assert left_out < 0.25


def test_an_objective_below_the_fastest_ends_after_one_trial():
    device, calls = simulated(), []
    honest = device.measure
    device.measure = lambda *given: calls.append(given) or honest(*given)
    with pytest.raises(ConfigError, match=r"the objective of 0\.1 ms is below"):
        module.tune(device, 1e-4, budget=8, batches=8, seed=0)
    assert len(calls) == 1


def test_what_is_not_feasible_is_flagged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "choose", lambda *given: None)
    args = ["polythrottle/tune", "model=efficientnet_b0", "batches=[1,2]"]
    args += ["budget=6", "--root", str(tmp_path), "--quiet"]
    assert cli.main(["run", *args]) == 1
    shown = capsys.readouterr().out
    assert "not within the objective: gpu_mhz=" in shown
    assert "J a query (simulated)" in shown
    assert "failed     no trial keeps the objective" in shown


class Watts:
    """A counter that is read as often as a batch ends."""

    def __init__(self):
        self.joules = 0.0

    def read_joules(self):
        self.joules += 1.0
        return self.joules


def test_this_machine_is_measured_at_the_clocks_that_are_set(tmp_path):
    root = fake_sysfs.make(tmp_path)
    (root / fake_sysfs.GPU / "cur_freq").unlink()
    (root / fake_sysfs.POLICY / "scaling_cur_freq").unlink()
    seen = []
    calls = {size: lambda: seen.append(fake_sysfs.limits(root)) for size in (1, 2)}
    with perf.Sysfs(root / "journal", allow_write=True, root=root) as clocks:
        here = Here(calls, Watts(), clocks, ("gpu",), seconds=0.01)
        assert here.start == {"gpu": 1300, "batch": 1}
        found = here.measure({"gpu": 500, "batch": 2}, 3)
    assert set(map(tuple, seen)) == {((800, 2000), (500, 500))}
    assert len(found.latencies) >= 3
    assert found.joules == pytest.approx(1 / (2 * len(found.latencies)))
    assert fake_sysfs.limits(root) == fake_sysfs.ORIGINAL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"knobs": ("gpu",)}, "knobs are set on this machine only"),
        ({"knobs": ("gpu",), "counter": "rapl"}, "with allow_write=true"),
        ({"batches": ()}, "batches must not be empty"),
        ({"model": "efficientnet_b0", "counter": "rapl"}, "model must be one of"),
        ({"model": "bert"}, "did you mean 'bert_base'"),
    ],
)
def test_configs_that_cannot_be(changes, message):
    cfg = tune.Config(device=devices.TX2)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(cfg, **changes)


def test_both_halves_of_a_trace_have_an_arrival():
    with pytest.raises(ConfigError, match=r"length >= 2 interval: got length=1\.4"):
        honesty.Config(device=devices.TX2, length=1.4)
    shortest = honesty.Config(device=devices.TX2, length=1.5)
    halves, _ = honesty.serve(shortest)
    assert halves["always_admitted"] == [1.0, 1.0]


def test_savings_are_of_the_batch_that_they_are_said_to_be():
    with pytest.raises(ConfigError, match="batches must ascend from 1"):
        savings.Config(device=devices.TX2, batches=(4, 1))
    with pytest.raises(ConfigError, match="batches must ascend from 1"):
        savings.Config(device=devices.TX2, batches=(2, 4))


def test_a_device_of_one_clock_saves_nothing():
    fixed = {name: getattr(devices.TX2, name)[-1:] for name in ("gpu_mhz", "mem_mhz")}
    device = dataclasses.replace(devices.TX2, **fixed)
    cfg = savings.Config(device=device, models=("efficientnet_b0",), batches=(1, 2))
    found = savings.run(cfg, None)
    assert (found["fixed"] == 0).all()
    assert (found["gpu_place"] == 0).all()
    assert (found["mem_place"] == 0).all()


def test_assumed_watts_are_called_simulated():
    cfg = batch.Config(
        model="resnet8",
        batches=(1, 2),
        counter="assumed",
        seconds=0.01,
        repetitions=1,
    )
    found = batch.run(cfg, None)
    assert found.attrs["source"] == "simulated"
    assert (found["joules"] > 0).all()
