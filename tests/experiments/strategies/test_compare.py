"""`strategies/compare`: the gate in small live runs, and the table's arithmetic."""

import types

import numpy as np
import pytest
import xarray as xr

from experiments.strategies import tables, ways
from hpcjax import sharding
from hpcjax.runs import discover, packing
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY

SMALL = {"model.width": "16", "dataset.context": "4", "taken": "20"}
GATE = 1e-5  # of ||a - b|| / (||b|| + sqrt(size) / 10), for each parameter


def take(name):
    """What the row's run finds in small, of 20 steps."""
    told = tables.COMPARE.tier("cpu").runs[name]
    loaded = discover.load(told.config, {**told.overrides, **SMALL}, REPOSITORY)
    context = types.SimpleNamespace(
        mesh=sharding.data_mesh(8), data_root=REPOSITORY / ".cache/data"
    )
    return loaded.experiment.run(loaded.config, context)


@pytest.mark.slow
@pytest.mark.acceptance("how-to-train", 1)
@pytest.mark.parametrize("name", [*tables.SAME, tables.DROPS])
def test_what_is_synchronous_passes_the_gate(name):
    found = take(name)
    assert found["apart"] <= GATE
    assert found["distance"] <= 1e-6


@pytest.mark.slow
@pytest.mark.acceptance("how-to-train", 1)
@pytest.mark.acceptance("how-to-train", 7)
@pytest.mark.parametrize("name", [tables.MISSING, tables.BROKEN, tables.KEYED])
def test_what_is_broken_does_not(name):
    assert take(name)["apart"] > 100 * GATE


@pytest.mark.slow
def test_one_stage_is_sgd_and_stale_weights_are_theirs_on_any_number_of_devices():
    one, plain, late = (take(name) for name in (tables.SINGLE, tables.DP, tables.STASH))
    assert np.array_equal(one["losses"], plain["losses"])
    assert late["apart"] <= GATE  # from one device with the same stale weights
    assert abs(late["losses"] / plain["losses"] - 1).max() > 1e-3


def test_schedules_idle_and_keep_what_the_formulas_say():
    plans = {name: ways.plan(name) for name in tables.SAME}
    formula = pytest.approx(3 / (8 + 3))  # (p - 1) / (m + p - 1)
    assert plans[tables.GPIPE] == {"bubble": formula, "held": 8}
    assert plans[tables.F1B1] == {"bubble": formula, "held": 4}
    assert plans[ways.ZB]["bubble"] < 3 / 11
    assert plans[tables.THREE] == {"bubble": pytest.approx(1 / 9), "held": 2}
    assert plans[tables.DP] == {"bubble": 0}


def made(losses, state=2.0, sent=1.75):
    steps = {"number": np.arange(1, 101)}
    run = {
        "state": state,
        "psi": 1.0,
        "temporaries": 1.0,
        "sent": ("axis", [sent]),
        "rounds": 14.0,
        "distance": 0.0,
    }
    if losses is not None:
        run["losses"] = ("number", losses)
    return xr.Dataset(run, steps if losses is not None else {}).expand_dims(seed=[0])


@pytest.mark.acceptance("how-to-train", 10)
def test_steps_to_the_target_and_divergence():
    plain = 4 - np.arange(100) / 50
    late = 4 - np.arange(100) / 100
    gone = np.where(np.arange(100) < 50, plain, np.nan)
    gone[90:] = np.inf
    table = tables.compare(
        {
            tables.ONE: made(plain),
            tables.DP: made(plain),
            tables.F1B1: made(plain, sent=1.0),
            tables.SLOW: made(late),
            tables.STASH: made(gone),
            tables.DOUBLE: made(plain),
            tables.MISSING: made(late),
            tables.TENSOR_64: made(None),
        }
    )
    # Steps 51 to 60 have a mean of 4 - 54.5 / 50; half as fast it is out of reach.
    steps = table["steps"].sel(row=[tables.DP, tables.SLOW, tables.STASH]).values
    np.testing.assert_array_equal(steps, [60, np.inf, np.inf])
    same = table.sel(row=tables.DP)
    assert (float(same["apart"]), float(same["differ"])) == (0, 0)
    assert np.isinf(table["loss"].sel(row=tables.STASH))  # not missing: it diverged
    for name in (tables.TENSOR_64, tables.MISSING):  # not run, and not ranked
        assert np.isnan(table["steps"].sel(row=name))
    assert same["sent"] == 2
    curves = packing.unpack(table)["losses"]
    np.testing.assert_allclose(curves.sel(row=tables.SLOW), late, rtol=1e-3)
    # A parameter, 256 tokens, 8 devices of 1e10; the link; 60 steps.
    work = 6 * 256 / 4 / 8 / 1e10
    slow = work + 1.75 / 1.25e8 + 14 * 5e-5
    assert float(same["slow_step"]) == pytest.approx(1e3 * slow)
    assert float(same["slow_time"]) == pytest.approx(60 * slow)
    piped = table["slow_time"].sel(row=[tables.F1B1, tables.DOUBLE]).values / 60
    sends = 1 / 1.25e8 + 14 * 5e-5
    np.testing.assert_allclose(piped, [work * 11 / 8 + sends, work + sends])
    names = [tables.DP, tables.DOUBLE, tables.MISSING]
    ranked = table["ranked"].sel(row=names).values.tolist()
    assert ranked == ["one device's", "others", "broken"]
    # What is excluded is told with how far it is off.
    apart = max(abs(late / plain - 1))
    assert float(table["apart"].sel(row=tables.MISSING)) == pytest.approx(apart)


def test_claims_fail_for_what_they_are_about():
    """A table in which all holds, and one in which a strategy is another."""
    good = {name: made(np.ones(100)) for name in tables.COMPARE.tier("cpu").runs}
    good |= {
        tables.ZERO3: made(np.ones(100), 0.25),
        tables.TENSOR_64: made(None, sent=3.5),
        tables.STASH: made(np.full(100, 1.1)),
        tables.MISSING: made(np.full(100, 1.1)),
        tables.BROKEN: made(np.full(100, np.nan)),
        tables.KEYED: made(np.ones(100)).assign(distance=0.1),
    }
    verdicts = judge(tables.COMPARE.tier("cpu"), tables.compare(good))
    assert {v.name: v.holds for v in verdicts} == dict.fromkeys(
        tables.COMPARE.tier("cpu").claims, True
    )
    bad = judge(
        tables.COMPARE.tier("cpu"),
        tables.compare(good | {ways.ZB: made(np.full(100, 1 + 2e-5))}),
    )
    assert [v.name for v in bad if not v.holds] == ["equal"]
