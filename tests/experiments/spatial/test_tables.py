"""The claims of `spatial/halos` in small live runs, and without halos of corners."""

import types

import pytest

from experiments.spatial import tables, windows
from hpcjax import sharding
from hpcjax.collectives import halo
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY

SMALL = {"model.width": "2", "taken": "1", "dataset.patients": "4"}


def row(name, **more):
    """The row's run, in small where it is a network."""
    told = tables.HALOS.tier("cpu").runs[name]
    more = SMALL | more if tables.UNET in name or name == tables.PEER else more
    loaded = discover.load(told.config, {**told.overrides, **more}, REPOSITORY)
    context = types.SimpleNamespace(
        mesh=sharding.data_mesh(8), data_root=REPOSITORY / ".cache/data"
    )
    given = () if "windows" in told.config else (context,)
    return loaded.experiment.run(loaded.config, *given).expand_dims(seed=[0])


@pytest.mark.slow
def test_claims_hold_and_fail_without_corners_or_by_the_compiler():
    names = [*tables.LAYOUTS, tables.CORNERLESS, tables.PEER, tables.NETWORKS[0]]
    rows = {name: row(name) for name in names}
    rows |= dict.fromkeys(tables.NETWORKS[1:3], rows[tables.NETWORKS[0]])
    resnet = row(tables.NETWORKS[3], **{"model.width": "2", "taken": "1"})
    rows |= dict.fromkeys(tables.NETWORKS[2:], resnet)
    table = tables.HALOS.reduce(rows)
    found = {v.name: v for v in judge(tables.HALOS.tier("cpu"), table)}
    assert all(verdict.holds for verdict in found.values()), found
    plane = rows[tables.CUBE]["origin"].isel(seed=0).values
    # The first block is at a corner: nobody, its own, the neighbours', the diagonal's.
    assert [plane[0, 0], plane[2, 2], plane[2, 10], plane[10, 2], plane[10, 10]] == [
        *(-1, 0, 1, 2, 3)
    ]


@pytest.mark.parametrize("counts", tables.LAYOUTS.values())
def test_the_formula_of_bytes_is_the_rule_on_blocks_that_grow(counts):
    for kernel in (1, 3, 5, 7):
        for stride in (1, 2):
            block, bytes_ = [16 // count for count in counts], 0
            for at, count in enumerate(counts):
                half = kernel // 2, kernel // 2
                ((low, high),) = set(halo.halo_widths(16, count, kernel, stride, half))
                if count > 1:
                    others = block[at - 1] * block[at - 2]
                    bytes_ += (low + max(0, high)) * others * 2 * 3 * 4
                    block[at] += low + high
            assert windows.rule(16, counts, kernel, stride) == bytes_
