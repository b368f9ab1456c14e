"""Propagation, counting and overlaps against enumeration."""

import itertools
import math

import numpy as np
import pytest

from hpcjax import ir
from hpcjax.core.errors import ConfigError
from hpcjax.ir import affine, overlap
from hpcjax.ir.affine import Affine, Range
from hpcjax.ir.sdfg import Access, Memlet


def drawn_range(rng, names, *, wide):
    """A range whose start and end may depend on names; steps may miss the end."""
    start = f"{rng.integers(-3, 4)}"
    stop = f"{start} + {rng.integers(0 if wide else 1, 7)}"
    if names and rng.random() < 0.3:
        name = rng.choice(names)
        start, stop = f"{start} + {name}", f"{stop} + {rng.choice([1, 1, 2])}*{name}"
    return Range.of(f"{start}:{stop}:{rng.integers(1, 4)}")


def drawn(seed):
    rng = np.random.default_rng(seed)
    names = ["i", "j", "k"][: rng.integers(1, 4)]
    ranges = tuple(
        (n, drawn_range(rng, names[:p], wide=True)) for p, n in enumerate(names)
    )
    terms = " + ".join(f"{rng.integers(-2, 3)}*{name}" for name in names)
    start = Affine.of(f"{terms} + {rng.integers(-5, 6)}")
    length = int(rng.choice([0, 0, 3, 5]))
    return ranges, Range(start, (start + length,), int(rng.integers(1, 4)))


@pytest.mark.acceptance("sdfg", 4)
def test_reaches_hold_all_elements_and_are_exact_where_they_say_so():
    exact = 0
    for seed in range(1000):
        ranges, own = drawn(seed)
        taken = [
            index for values in affine.iterate(ranges, {}) for index in own.at(values)
        ]
        assert affine.count(ranges, (own,)) == len(taken)
        reach = ir.propagate((own,), ranges)
        if reach.subset is None:
            assert not taken
            continue
        box = reach.subset[0].at({})
        assert set(taken) <= set(box), (seed, box)
        if reach.exact:
            exact += 1
            difference = math.gcd(*(index - taken[0] for index in taken))
            assert (box[0], box[-1]) == (min(taken), max(taken)), seed
            assert len(box) == 1 or box.step == difference, seed
    assert exact > 600


@pytest.mark.acceptance("sdfg", 4)
@pytest.mark.parametrize(
    ("subset", "ranges", "wanted"),
    [
        (["i", "j:j+10:2"], {"i": "1:N", "j": "0:25"}, ["1:N", "0:33"]),
        (["2*i + 1"], {"i": "1:N"}, ["3:2*N:2"]),
        (["i", "i"], {"i": "0:N"}, ["0:N", "0:N"]),
        (["N - 1 - i"], {"i": "0:N"}, ["0:N"]),
        (["i:j + 1"], {"i": "0:4", "j": "i:i + 3"}, ["0:6"]),
    ],
)
def test_symbols_stay(subset, ranges, wanted):
    given = [(name, Range.of(text)) for name, text in ranges.items()]
    reach = ir.propagate([Range.of(text) for text in subset], given)
    assert [str(each) for each in reach.subset] == wanted


def test_volumes_of_triangles_are_polynomials():
    nest = [("i", Range.of("0:1000")), ("j", Range.of("0:i"))]
    assert affine.count(nest) == 1000 * 999 // 2


@pytest.mark.parametrize("text", ["A[i*j]", "A[i:]", "A[0:4:0]", "A[i", "2", "A[i/2]"])
def test_what_is_not_affine_is_refused(text):
    with pytest.raises(ConfigError, match=r"must be|needs"):
        affine.read_subset(text)


def edge(index, stop):
    ranges = (("i", Range.of(f"0:{stop}")),)
    return Access(Memlet("A", (Range.of(index),)), True, ranges, "node")


@pytest.mark.parametrize("stop", ["6", "N", "100000"])
@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("i", "i", False),
        ("2*i", "2*i + 1", False),
        ("4*i + 1", "2*i", False),
        ("i", "i + 100000", False),
        ("i", "i + 1", True),
        ("i", "5 - i", True),
        ("0", "0", True),
    ],
)
def test_what_is_not_decided_is_never_apart(one, other, meet, stop):
    if stop == "N" and other == "i + 100000":
        meet = True
    found = overlap.meeting(edge(one, stop), edge(other, stop), ["i"])
    assert (found is not None) == meet
    if found:
        assert found.known == (stop == "6")


def test_overlaps_of_drawn_edges_are_those_of_all_pairs(monkeypatch):
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(300):
        one, other = (
            edge(f"{rng.integers(-2, 4)}*i + {rng.integers(0, 9)}", rng.integers(1, 5))
            for _ in range(2)
        )
        pairs = itertools.product(
            *(
                [
                    (v["i"], each.memlet.subset[0].at(v)[0])
                    for v in affine.iterate(each.ranges, {})
                ]
                for each in (one, other)
            )
        )
        truth = any(a != b and x == y for (a, x), (b, y) in pairs)
        assert (overlap.meeting(one, other, ["i"]) is not None) == truth
        with monkeypatch.context() as patch:
            patch.setattr(overlap, "MOST", 0)
            found = overlap.meeting(one, other, ["i"])
        assert found is not None or not truth
        decided += found is None
    assert decided > 30
