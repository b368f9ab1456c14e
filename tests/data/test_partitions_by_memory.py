"""Partitions that are chosen by the memory that there is."""

import dataclasses

import pytest

from hpcjax import data
from hpcjax.core import ConfigError

GRAPH = data.CommunityGraphConfig(
    vertices=400, degree=6.0, width=16, labelled=40, held=40
)
OWN = data.PartitionedGraphConfig(
    source=GRAPH, block=8, fanouts=(2, 2), memory=20_000.0, disk_block=288
)


def test_a_graph_in_files_has_as_many_partitions_as_memory_is_for(
    tmp_path, monkeypatch
):
    """25,600 bytes of rows and 28,800 of edges: 4 of 10 partitions, 19,456 bytes."""
    chosen = OWN.choose(tmp_path)
    assert (chosen.partitions, chosen.capacity, chosen.memory) == (10, 4, None)
    train = OWN.load(tmp_path).train
    train.sample(0, 1, 0, (0, 1))
    told = train.figures()
    assert told["resident_bytes"] <= 20_000 < told["graph_bytes"] == 54_400
    # The source is asked once.
    monkeypatch.setattr(data.CommunityGraphConfig, "stream", None)
    assert len(OWN.load(tmp_path).train) == len(train)


def test_all_is_resident_where_it_fits(tmp_path):
    chosen = dataclasses.replace(OWN, memory=1e6).choose(tmp_path)
    assert (chosen.partitions, chosen.capacity) == (1, 1)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"memory": 5_000.0}, "two partitions and their edges, of at most 10: got"),
        ({"disk_block": 40_000}, "of at most 2: got .*=20000"),
    ],
)
def test_memory_below_two_partitions_is_refused(own, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        dataclasses.replace(OWN, **own).load(tmp_path)
