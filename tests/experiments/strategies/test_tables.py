"""The claims of `strategies/zero` in small live runs, and with the mechanism broken."""

import types

import pytest

from experiments.strategies import tables
from hpcjax import sharding
from hpcjax.core import ConfigError
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY

SMALL = {
    "model.depth": "2",
    "model.width": "32",
    "model.heads": "2",
    "dataset.context": "4",
}


def row(name, **more):
    """The row's run in small, on 8 devices."""
    told = tables.ZERO.tier("cpu").runs[name]
    loaded = discover.load(told.config, {**told.overrides, **SMALL, **more}, REPOSITORY)
    context = types.SimpleNamespace(
        mesh=sharding.data_mesh(8), data_root=REPOSITORY / ".cache/data"
    )
    return loaded.experiment.run(loaded.config, context).expand_dims(seed=[0])


@pytest.mark.slow
def test_stage_3_equals_one_device_and_summed_gradients_do_not():
    ways = (tables.DP, tables.ZERO3, tables.PEER)
    rows = {way: row(way, memory=str(2**20)) for way in ways}
    rows |= {way + tables.TAKEN: row(way + tables.TAKEN, taken="4") for way in ways}
    rows[tables.BROKEN] = row(tables.BROKEN, taken="4")
    for way in (tables.ZERO1, tables.ZERO2):
        rows |= {way + end: rows[tables.ZERO3 + end] for end in ("", tables.TAKEN)}
    table = tables.ZERO.reduce(rows)
    (equal,) = (v for v in judge(tables.ZERO.tier("cpu"), table) if v.name == "equal")
    assert equal.holds, equal
    assert table["distance"].sel(row=tables.PEER) < 1e-5
    held = {name: float(table["state"].sel(row=name)) for name in ways}
    assert held[tables.DP] == pytest.approx(3, rel=0.02)
    assert held[tables.ZERO3] == pytest.approx(0.375, rel=0.03)  # and the batch
    assert held[tables.PEER] == pytest.approx(0.375, rel=0.15)  # biases are whole
    assert float(table["depth"].sel(row=tables.ZERO3)) > table["depth"].sel(
        row=tables.DP
    )
    assert float(table["sent"].sel(row=tables.ZERO3)) == pytest.approx(3, rel=0.15)


def test_what_is_annotated_is_spread_by_its_annotations_alone():
    with pytest.raises(ConfigError, match="spread by its annotations"):
        discover.load("strategies/annotated", {"parallel": "zero"}, REPOSITORY)
