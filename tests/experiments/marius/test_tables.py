"""Tables of orders: what they compute of runs, and what a run is of."""

import dataclasses

import numpy as np
import pytest

from configs.marius import links
from configs.marius import memory as limits
from experiments.marius import memory, tables
from experiments.marius.disk import count_rows
from hpcjax import graphs
from hpcjax.data.link_source import LinkSampler
from hpcjax.data.triples import Triples
from tests.experiments import rows

VARIANTS = {name: name.replace(" ", "_") for name in tables.READS}


@pytest.mark.parametrize("name", tables.READS)
def test_runs_are_of_whole_epochs_and_read_what_the_order_says(name):
    config = getattr(links, VARIANTS[name])
    none = np.zeros((1, 3), np.int32)
    train = np.broadcast_to(none, (86_835, 3))
    sampler = LinkSampler(Triples(train, none, none, 40_943, 11), config.dataset)
    assert config.train.steps == links.EPOCHS * len(sampler)
    order = config.dataset.draw(0, 0)
    swaps = 0 if name == "one fill" else graphs.count_swaps(order.states)
    reads = (order.states.shape[1] + swaps) / len(order.buckets)
    assert reads == tables.READS[name]


def test_rows_of_an_order_are_counted_where_the_last_partitions_are_empty():
    config = dataclasses.replace(links.comet.dataset, partitions=8, capacity=4, group=2)
    held, count = set(), 0  # of 9 rows: 2 in each of 4, then 1, then none
    for state in np.concatenate([config.draw(3, epoch).states for epoch in range(2)]):
        resident = {row for row in range(9) if row // 2 in state}
        held, count = resident, count + len(resident - held)
    assert count_rows(config, 3, 2, 9) == count


def judge(beta, comet):
    scores = {"memory": [0.38, 0.37, 0.39], "one fill": [0.02] * 3}
    scores |= {"beta": beta, "comet": comet}
    coords = {"eval_step": [1, 2], "step": [1, 2, 3]}
    made = {}
    for name in tables.READS:
        run = rows.run(
            coords, seeds=(0, 1, 2), val_hits10="eval_step", seconds="step", key=name
        )
        values = np.stack([np.zeros(3), scores[name]], 1)
        made[name] = run.assign(val_mrr=(("seed", "eval_step"), values))
    return rows.verdicts(tables.LINKS, tables.links(made))


def test_comet_must_close_half_of_a_gap_that_is_one():
    lost = np.array([0.02, 0.021, 0.019])
    memory = np.array([0.38, 0.37, 0.39])
    half = judge(memory - lost, memory - lost / 2)["closes the gap"]
    assert half.ours == pytest.approx(0.5)
    less = judge(memory - lost, memory - 0.7 * lost)["closes the gap"]
    assert (less.ours, less.holds) == (pytest.approx(0.3), False)
    noisy = memory - [0.05, -0.03, 0.001]
    assert judge(noisy, noisy - 0.001)["closes the gap"].ours == 1
    assert not judge(noisy, noisy - 0.01)["closes the gap"].holds


def test_a_limit_is_of_the_bytes_that_files_have_and_an_epoch_is_read_alone():
    config = limits.base
    graph = config.dataset.source
    assert config.graph_bytes == 2_000_000 * 128 * 4 + 20_000_000 * 12
    assert config.train.steps * config.dataset.block == graph.labelled
    small = dataclasses.replace(graph, vertices=500, labelled=10, held=5)
    edges = len(small.stream()[0].graph.senders)
    own = dataclasses.replace(config.dataset, source=small)
    bytes_of = dataclasses.replace(config, dataset=own).graph_bytes
    assert bytes_of == 500 * 128 * 4 + edges * 12
    with memory.Bounded(list(range(9)), 5).iterate(2) as batches:
        assert [next(batches) for _ in range(4)] == [2, 3, 4, 4]


def test_what_died_has_counted_nothing():
    died = {"ended": 0.0, "refused": 1.0, "counted": 0.0, "told": 0.0}
    died["edge_bytes"] = 0.0
    made = {
        tables.FIFTH: {
            **{"ended": 1.0, "refused": 0.0, "counted": 101.0, "told": 100.0},
            "edge_bytes": 4.0,
        },
        tables.SAMPLED: died,
        tables.RESIDENT: died,
    }
    coords = {"moment": [0.0, 50.0, 100.0]}
    names = ("graph_bytes", "limit", "peak", "seconds", "waited")
    shapes = dict.fromkeys(names, "") | {"anon": "moment"}
    resident = {tables.FIFTH: 0.2}
    runs = {
        name: rows.run(
            coords, **shapes, **own, resident=resident.get(name, 1.0), key=name
        )
        for name, own in made.items()
    }
    table = tables.limited(runs)
    assert table["off_rows"].sel(row=tables.FIFTH) == pytest.approx(3)
    told = rows.verdicts(tables.LIMITED, table)
    assert all(verdict.holds for verdict in told.values())
    assert told["counted"].ours == pytest.approx(1)
