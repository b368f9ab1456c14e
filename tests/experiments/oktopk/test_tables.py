"""Ok-Topk's tables: how they are reduced, and what was recorded of them."""

import json
import pathlib

import numpy as np
import pytest
import xarray as xr

from experiments.oktopk import tables
from experiments.oktopk.link import Config as Link
from tests.experiments import rows

RESULTS = pathlib.Path(tables.__file__).parent / "results"


def record(name):
    """Returns a committed result."""
    return json.loads((RESULTS / f"{name}.cpu.json").read_text())


def test_bounds_are_of_the_entries_of_each_step():
    names = ("sent", "received", "summed", "selected", "kept")
    counts = [[4000, 1000], [1000, 1000], [3, 1], [1000, 100], [900, 900]]
    run = rows.run(
        wire=np.nan,
        **{n: ("step member", [own]) for n, own in zip(names, counts, strict=True)},
    )
    made = tables.VOLUME.reduce({"ok_topk, P=2": run, "top_k, P=2": run})
    bound = max(4000 / (3 * 1000 + 144), 1000 / (3 * 900 + 144))
    assert made["bound"].sel(row="ok_topk, P=2") == pytest.approx(bound)
    assert np.isnan(made["asked"].sel(row="top_k, P=2"))
    assert made["most"].sel(row="top_k, P=2") == 2000
    assert tables.BALANCE.reduce({"a": run})["summed"].item() == 1.5


def test_selections_are_compared_after_warm_up():
    steps = np.arange(1, 201)
    counts = np.where(steps <= tables.WARM_UP, 1000.0, 110.0)
    off = tables._off(xr.DataArray(counts, dims="step", coords={"step": steps}), 100.0)
    assert off == pytest.approx(0.1)


def test_recorded_accuracy_is_within_a_point_of_dense():
    found = record("accuracy")
    assert found["source"] == "measured"
    cells = found["cells"]
    seeds = [cells[f"ok_topk.seed_{seed}"] for seed in tables.SEEDS]
    dense = [cells[f"dense.seed_{seed}"] for seed in tables.SEEDS]
    assert np.mean(seeds) >= np.mean(dense) - 1.0
    runs = [run for run in found["runs"] if run["row"] == "ok_topk"]
    assert {run["config"] for run in runs} == {"oktopk/digits:ok_topk"}
    assert len({run["id"] for run in runs}) == len(tables.SEEDS)
    assert tables.ACCURACY.tier("cpu").devices == 8


def test_recorded_exchanges_of_the_default_link_are_as_much_faster():
    found = record("throughput")
    assert found["source"] == "measured"
    (run,) = found["runs"]
    assert (run["config"], run["overrides"]) == ("oktopk/link", {"seed": "0"})
    cfg = Link()
    assert (cfg.processes, cfg.numbers, cfg.bits_per_second) == (4, 4_000_000, 100e6)
    assert cfg.steps >= 2 * cfg.tau_prime
    assert cfg.dense_steps >= 5
    cells = found["cells"]
    assert cells["dense.milliseconds"] >= 5 * cells["ok_topk.milliseconds"]
    for column in ("milliseconds", "communicating"):
        assert cells[f"top_k.{column}"] >= 1.3 * cells[f"ok_topk.{column}"]
    assert found["claims"].keys() == tables.THROUGHPUT.tier("cpu").claims.keys()
