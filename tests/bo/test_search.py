"""Constrained search on a grid, and the golden section, against brute force."""

import itertools
import math

import numpy as np
import pytest

from hpcjax import bo
from hpcjax.core import ConfigError

GRID = bo.Grid(a=[100, 200, 300, 400], b=[1, 2, 4, 8], log=["b"])


def measure(point):
    """Energy has its least at a = 300, b = 8; latency forbids b = 8."""
    a, b = point["a"], point["b"]
    return 1 + (a / 300 - 1) ** 2 + 1 / b, 1 / a + b / 400


def told(count, seed=0, search=None):
    search = search or bo.ConstrainedSearch(GRID, {"l": 0.015}, seed)
    for _ in range(count):
        point = search.ask()
        value, latency = measure(point)
        search.tell(point, value, l=latency)
    return search


def test_values_are_compared_by_their_logarithms_where_a_grid_says_so():
    np.testing.assert_allclose(GRID.x[:4], [[0, n / 3] for n in range(4)], atol=1e-15)
    plain = bo.Grid(b=GRID.values["b"])
    np.testing.assert_allclose(plain.x[:, 0], [0, 1 / 7, 3 / 7, 1], atol=1e-15)


@pytest.mark.acceptance("polythrottle", 4)
def test_it_asks_for_every_point_of_the_grid_once():
    search = told(16)
    asked = {tuple(point.values()) for point in search.points}
    assert asked == set(itertools.product(*GRID.values.values()))
    assert search.stopped
    with pytest.raises(ConfigError, match="all 16 points"):
        search.ask()


@pytest.mark.acceptance("polythrottle", 4)
def test_a_seed_gives_the_points_and_text_the_state():
    first, second, other = (told(7, seed) for seed in (0, 0, 1))
    assert first.points == second.points
    assert first.points[0] == {"a": 400, "b": 8}
    assert first.points[:5] != other.points[:5]
    back = bo.ConstrainedSearch.from_json(first.to_json())
    assert told(5, search=back).points == told(5, search=first).points
    assert back.to_json() == first.to_json()


def test_the_best_is_feasible_and_found_early():
    search = told(10)
    points = [GRID.point(place) for place in range(len(GRID))]
    within = [p for p in points if measure(p)[1] <= 0.015]
    assert search.best_feasible() == min(within, key=lambda p: measure(p)[0])
    assert len(search.rank_feasible()) < 10


def test_a_start_is_asked_first():
    search = bo.ConstrainedSearch(GRID, {}, start={"a": 100, "b": 4})
    assert search.ask() == {"a": 100, "b": 4}
    search.tell({"a": 200, "b": 2}, 1.0)
    assert search.ask() == {"a": 100, "b": 4}


def test_it_stops_when_gains_are_small_and_never_without_a_feasible_point():
    grid = bo.Grid(a=range(1, 31))
    hopeless = bo.ConstrainedSearch(grid, {"l": 1e-9})
    flat = bo.ConstrainedSearch(grid, {"l": 2.0})
    for search in (flat, hopeless):
        stopped = []
        for _ in range(13):
            point = search.ask()
            search.tell(point, 1.0 + 1e-9 * point["a"], l=1.0)
            stopped.append(search.stopped)
        assert not any(stopped[:9])
        assert stopped[-1] == (search is flat)


def test_asking_twice_counts_once_also_after_points_that_were_not_asked_for():
    search = bo.ConstrainedSearch(bo.Grid(a=range(1, 31)), {})
    for a in range(1, 13):
        search.tell({"a": a}, 1.0 + 1e-9 * a)
    assert search.ask() == search.ask()
    assert not search.stopped
    search.tell(search.ask(), 1.0)
    search.ask()
    assert search.stopped


def test_the_unit_of_energy_does_not_matter():
    asked = []
    for unit in (1.0, 1000.0):
        search = bo.ConstrainedSearch(GRID, {"l": 0.015})
        for _ in range(9):
            point = search.ask()
            value, latency = measure(point)
            search.tell(point, value * unit, l=latency)
        asked.append((search.points, search.stopped))
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"a": 250, "b": 1}, "a=250 is not on the grid: the nearest are 200 and 300"),
        ({"a": 100}, r"a point must have \['a', 'b'\]"),
    ],
)
def test_points_off_the_grid(point, message):
    with pytest.raises(ConfigError, match=message):
        bo.ConstrainedSearch(GRID, {}).tell(point, 1.0)


@pytest.mark.parametrize(
    ("value", "constraints", "message"),
    [
        (0.0, {"l": 1.0}, "value must be finite and > 0"),
        (1.0, {}, r"a measurement needs \['l'\]: got \[\]"),
        (1.0, {"l": 1.0, "m": 1.0}, r"got \['l', 'm'\]; did you mean|allowed"),
        (1.0, {"l": math.nan}, "l must be finite"),
    ],
)
def test_bad_measurements(value, constraints, message):
    search = bo.ConstrainedSearch(GRID, {"l": 1.0})
    with pytest.raises(ConfigError, match=message):
        search.tell({"a": 100, "b": 1}, value, **constraints)


def test_scalars_of_arrays_are_numbers():
    grid = bo.Grid(a=np.arange(1, 4), b=np.linspace(1, 2, 3))
    search = bo.ConstrainedSearch(grid, {"l": np.float32(2.0)})
    search.tell(search.ask(), np.float32(2.0), l=np.float32(0.5))
    back = bo.ConstrainedSearch.from_json(search.to_json())
    assert back.best_feasible() == {"a": 3, "b": 2.0}
    with pytest.raises(ConfigError, match="value must be finite and > 0"):
        search.tell(search.ask(), np.float32(np.nan), l=np.float32(0.5))
    with pytest.raises(ConfigError, match="l must be finite and > 0"):
        search.tell(search.ask(), 1.0, l=np.float32(-1.0))
    assert len(search.points) == 1


@pytest.mark.parametrize("name", ["value", "point"])
def test_a_constraint_cannot_have_a_name_of_tells_own(name):
    with pytest.raises(ConfigError, match="must not be called value or point"):
        bo.ConstrainedSearch(GRID, {name: 1.0})


def test_a_point_is_told_once():
    search = told(1)
    with pytest.raises(ConfigError, match="measured before"):
        search.tell(search.points[0], 1.0, l=1.0)


@pytest.mark.parametrize(
    ("values", "log", "message"),
    [
        ({}, (), "a grid needs values"),
        ({"a": [1, 1]}, (), "a must have different finite values"),
        ({"a": [0, 1]}, ("a",), "positive if in log"),
        ({"a": [1, math.nan]}, (), "different finite values"),
        ({"a": [1, 2]}, ("b",), "log must be one of"),
    ],
)
def test_bad_grids(values, log, message):
    with pytest.raises(ConfigError, match=message):
        bo.Grid(log=log, **values)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12, 13, 30])
def test_the_golden_section_finds_the_least(count):
    for best in range(count):
        calls = []

        def measure(place, best=best, calls=calls):
            calls.append(place)
            return bo.Measurement(abs(place - best), 0.0)

        seen = bo.golden_section(count, measure)
        assert min(seen, key=seen.get) == best
        assert len(calls) == len(set(calls)) == len(seen)
        assert len(seen) <= math.ceil(math.log(count) / math.log(1.618034)) + 1


def test_what_is_not_allowed_lies_below():
    def measure(place):
        return bo.Measurement(place if place >= 6 else math.inf, 0.0)

    seen = bo.golden_section(12, measure)
    assert min(seen, key=seen.get) == 6


def test_close_values_are_measured_again():
    rng, calls = np.random.default_rng(0), []

    def measure(place):
        calls.append(place)
        return bo.Measurement(1.0 + 1e-6 * rng.standard_normal(), 0.1)

    seen = bo.golden_section(4, measure)
    assert max(calls.count(place) for place in seen) == 4
    assert all(error < 0.1 for _, error in seen.values())
