"""Pieces of a batch on two queues."""

import itertools

import pytest

from hpcjax import cost
from hpcjax.core import ConfigError


@pytest.mark.parametrize("early", [False, True])
def test_one_piece_of_a_layer_by_hand(early):
    step = cost.overlap_pieces(1, 0.5, pieces=1, early=early)
    # y, its sum (3), dx, its sum; dW before the sum or beside it.
    assert step.makespan == (1 + 3 + 1 + 3 if early else 1 + 3 + 2 + 3)
    assert step.exposed == step.makespan - 3
    kinds = [bar.kind for bar in step.bars]
    sums = ["dx", "all-reduce", "dW"] if early else ["dx", "dW", "all-reduce"]
    assert kinds == ["y", "all-reduce", *sums]


def test_no_queue_does_two_things_at_once():
    step = cost.overlap_pieces(5, 0.8, pieces=3)
    for queue in (0, 1):
        bars = sorted(bar[1:3] for bar in step.bars if bar.device == queue)
        for (_, end), (start, _) in itertools.pairwise(bars):
            assert start >= end - 1e-12
    computed = sum(bar.end - bar.start for bar in step.bars if bar.device == 0)
    assert computed == pytest.approx(15)


def test_pieces_in_turn_hide_nothing():
    one, turns = (
        cost.overlap_pieces(9, 1.0, pieces=pieces, early=False, in_turn=True)
        for pieces in (1, 2)
    )
    assert turns.exposed == pytest.approx(one.exposed)
    with pytest.raises(ConfigError, match="ratio=0"):
        cost.overlap_pieces(1, 0)
    with pytest.raises(ConfigError, match="pieces"):
        cost.overlap_pieces(1, 1.0, pieces=0)
