"""The claims of `hybrid3dcnn/networks`: counts at full size, memory in small."""

import dataclasses

import pytest

from experiments.hybrid3dcnn import networks, tables
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY

SMALL = networks.Config(block_width=32)


def row(name):
    told = tables.NETWORKS.tier("cpu").runs[name]
    loaded = discover.load(told.config, told.overrides, REPOSITORY)
    return loaded.experiment.run(loaded.config).expand_dims(seed=[0])


@pytest.mark.acceptance("hybrid3dcnn", 5)
def test_claims_hold_and_fail_for_another_network(monkeypatch):
    def share(cfg, devices, cut):
        return 100.0 / (devices if cut else 1)

    monkeypatch.setattr(networks, "temporaries", share)
    table = tables.NETWORKS.reduce({n: row(n) for n in (tables.PAPER, tables.OTHER)})
    found = judge(tables.NETWORKS.tier("cpu"), table)
    assert len(found) == 4
    assert all(verdict.holds for verdict in found), found


@pytest.mark.slow
def test_blocks_save_memory_and_thin_ones_are_told():
    whole = networks.temporaries(SMALL, 1, False)
    assert networks.temporaries(SMALL, 4, True) < 0.5 * whole
    with pytest.raises(ValueError, match="blocks of 8 at least"):
        networks.temporaries(SMALL, 8, True)


@pytest.mark.slow
@pytest.mark.acceptance("hybrid3dcnn", 10)
def test_eight_blocks_need_a_seventh_of_the_memory():
    full = dataclasses.replace(SMALL, block_width=128)
    one, eight = (networks.temporaries(full, count, True) for count in (1, 8))
    assert eight <= 0.15 * one
