"""Look-ahead on random streams in whole numbers, and the experiment in small."""

import numpy as np
import pytest

from experiments.bagpipe import streams
from hpcjax import data
from hpcjax.runs import execute


def drawn(seed):
    """A stream, and what it is trained with."""
    rng = np.random.default_rng(seed)
    stream = (40 * rng.random((18, 8, 2)) ** 2).astype(np.int64)
    ahead = seed % 8 + 1
    every = int(rng.integers(1, max(ahead - 1, 1) + 1))
    return stream, 40, ahead, every, (1, 2, 4)[seed % 3]


@pytest.mark.acceptance("bagpipe", 1, 2)
def test_trainers_whose_sums_come_late_make_the_table_of_one():
    for seed in range(48):
        given = drawn(seed)
        stream, rows, ahead, every, _ = given
        trainers = streams.Trainers(*given)
        assert trainers.train() == streams.train_whole(stream, rows)
        needed = data.rows_needed(stream, ahead)
        assert trainers.most <= needed
        if every == 1:
            assert trainers.most == needed


@pytest.mark.acceptance("bagpipe", 1)
@pytest.mark.parametrize("order", streams.ORDERS[1:])
def test_every_other_order_is_wrong(order):
    given = [drawn(seed) for seed in range(24)]
    wrong = [
        streams.Trainers(*each, order).train() != streams.train_whole(*each[:2])
        for each in given
    ]
    assert sum(wrong) > 12


def test_moves_evict_and_fetch_what_the_papers_trainers_do():
    for seed in range(24):
        stream, rows, ahead, every, workers = drawn(seed)
        trainers = streams.Trainers(stream, rows, ahead, every, workers)
        moves = data.lookahead_moves(
            stream, rows, ahead, every=every, late=trainers.late
        )
        inside = {*next(moves).fetch.tolist()}
        trainers.fetch(ahead - 1)
        assert inside == set(trainers.caches[0])
        for plan, move in zip(trainers.plans, moves, strict=True):
            trainers.step(plan)
            inside = (inside - {*move.evict.tolist()}) | {*move.fetch.tolist()}
            if plan.step < len(stream) - 1:
                assert inside == set(trainers.caches[0])


@pytest.mark.acceptance("bagpipe", 4)
def test_sums_that_are_not_late_make_the_same_table():
    for seed in range(24):
        given = drawn(seed)
        trainers = streams.Trainers(*given)
        trainers.late = 0
        assert trainers.train() == streams.train_whole(*given[:2])


SMALL = {
    "dataset.examples": "400",
    "dataset.tables": "3",
    "dataset.rows": "60",
    "model.width": "4",
    "model.bottom": "[5]",
    "model.top": "[6]",
    "train.batch_size": "8",
    "train.steps": "20",
    "warm": "1",
    "cool": "2",
    "pace": "0.0",
}
CACHE = {
    "state.lookahead": "4",
    "state.capacity": "80",
    "state.latency": "0.0",
    "state.piece": "16",
}


@pytest.mark.slow
def test_all_caches_train_the_same_in_small_and_leaving_early_does_not(tmp_path):
    found = {
        name: execute.run(
            f"bagpipe/lookahead:{name}",
            SMALL | ({} if name == "whole" else CACHE),
            root=tmp_path,
            quiet=True,
        ).dataset
        for name in ("whole", "base", "static_hot_1", "lru_2", "evict_first")
    }
    digest = {name: float(each["digest"]) for name, each in found.items()}
    right = digest.pop("whole")
    assert [name for name in digest if digest[name] != right] == ["evict_first"]
    ours = {name: float(each) for name, each in found["base"].items() if each.ndim == 0}
    row = 4 * (4 + 1)  # four numbers, and one of Adagrad
    assert ours["bytes"] == pytest.approx(2 * row * ours["fetched"] * ours["unique"])
    assert ours["compiled"] == 1
