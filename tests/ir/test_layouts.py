"""Selection of layouts against all layouts, one by one."""

import math

import numpy as np
import pytest

from hpcjax import ir
from hpcjax.core.errors import ConfigError
from hpcjax.ir import Configuration

LETTERS = "abcd"


def draw(rng, equal):
    """A chain of operators, each with a table over the layouts of two or three tensors.

    A table has an entry of 1 to 7 seconds or, not timed, infinity.
    """
    operators, layouts = int(rng.integers(3, 7)), int(rng.integers(2, 5))
    present = rng.choice([0.4, 0.9])
    tables = {}
    for place in range(operators):
        own = [place, place + 1]
        if place and rng.random() < 0.3:
            own.insert(0, place - 1)
        table = rng.integers(1, 8, (layouts,) * len(own)).astype(float)
        table[rng.random(table.shape) > present] = np.inf
        table.flat[rng.integers(table.size)] = 3.0
        tables[f"op{place}"] = (own, table)
    first = int(rng.integers(0, operators - 1))
    last = int(rng.integers(first + 2, operators + 1))
    same = [(f"t{first}", f"t{last}")] if equal else []
    return tables, same


def times_of(tables):
    return {
        name: [
            Configuration(
                {f"t{t}": LETTERS[x] for t, x in zip(own, place, strict=True)}, seconds
            )
            for place, seconds in np.ndenumerate(table)
            if np.isfinite(seconds)
        ]
        for name, (own, table) in tables.items()
    }


def exhaust(tables, same):
    """The least sum over all layouts, and the first layouts that have it."""
    count = len(tables) + 1
    size = next(iter(tables.values()))[1].shape[0]
    total = np.zeros((size,) * count)
    for own, table in tables.values():
        total = total + np.expand_dims(
            table, [axis for axis in range(count) if axis not in own]
        )
    indices = np.indices(total.shape)
    for one, other in same:
        total[indices[int(one[1:])] != indices[int(other[1:])]] = np.inf
    best = np.unravel_index(np.argmin(total), total.shape)
    return total[best], {f"t{t}": LETTERS[x] for t, x in enumerate(best)}


@pytest.mark.slow
@pytest.mark.acceptance("data-movement", 5)
def test_selection_is_the_best_of_all_layouts():
    rng = np.random.default_rng(0)
    wrong, refused, worse = [], 0, 0
    for trial in range(200):
        equal = trial % 2 == 1
        tables, same = draw(rng, equal)
        times = times_of(tables)
        seconds, layouts = exhaust(tables, same)
        if seconds == np.inf:
            refused += 1
            with pytest.raises(ConfigError, match="no layouts fit"):
                ir.select_layouts(times, same)
            with pytest.raises(ConfigError, match="no path"):
                ir.select_by_paths(times, same)
            continue
        best = ir.select_layouts(times, same)
        if best.seconds != seconds or best.layouts != layouts or best.gap > 1e-9:
            wrong.append((trial, best, seconds, layouts))
        try:
            path = ir.select_by_paths(times, same).seconds
        except ConfigError:
            path = np.inf
        assert path >= seconds
        assert equal or path == seconds
        worse += path > seconds
    assert not wrong
    # Neither kind is missing from the trials.
    assert refused > 5
    assert worse > 5


def test_a_path_in_parts_keeps_what_is_bound():
    rng = np.random.default_rng(1)
    for _ in range(20):
        tables, _ = draw(rng, equal=False)
        times = times_of(tables)
        names = list(times)
        try:
            found = ir.select_by_paths(times, parts=[names[2:], names[:2]])
        except ConfigError:
            continue
        assert found.seconds >= exhaust(tables, [])[0]
        for name, chosen in found.configurations.items():
            assert chosen.layouts.items() <= found.layouts.items(), name


CONFLICT = {
    "free": [Configuration({"w": "ab"}, 1.0)],
    "one": [Configuration({"x": "ab", "y": "ab"}, 1.0)],
    "two": [Configuration({"y": "ab", "z": "ba"}, 1.0)],
}


def test_a_smallest_contradiction_is_named():
    same = [("w", "x"), ("x", "z"), ("y", "w")]
    with pytest.raises(ConfigError) as error:
        ir.select_layouts(CONFLICT, same)
    assert str(error.value) == (
        "no layouts fit operators ['one', 'two'] with [('x', 'z')] equal"
    )
    assert ir.select_layouts(CONFLICT, same[:1]).seconds == 3.0


def test_operators_that_contradict_each_other_are_named():
    times = CONFLICT | {"three": [Configuration({"z": "ab"}, 1.0)]}
    with pytest.raises(
        ConfigError, match=r"no layouts fit operators .'three', 'two'.$"
    ):
        ir.select_layouts(times)


@pytest.mark.parametrize(
    ("times", "same", "message"),
    [
        ({}, [], "layouts need at least one operator"),
        ({"one": []}, [], "no configuration of operator 'one' was timed"),
        *(
            ({"one": [Configuration({"x": "a"}, seconds)]}, [], "seconds of 'one' must")
            for seconds in (math.nan, math.inf, -1.0)
        ),
        (CONFLICT, [("x", "zz")], "no tensor 'zz'; did you mean 'z'"),
        (
            {"one": [Configuration({"x": "a"}, 1.0), Configuration({"y": "a"}, 1.0)]},
            [],
            "configurations of 'one' have different tensors",
        ),
    ],
)
def test_bad_tables_are_told(times, same, message):
    with pytest.raises(ConfigError, match=message):
        ir.select_layouts(times, same)


def test_parts_have_every_operator_once():
    with pytest.raises(ConfigError, match="parts must have every operator once"):
        ir.select_by_paths(CONFLICT, parts=[["free"], ["one"]])


def test_fastest_ignores_the_others():
    either = [Configuration({"x": "ab"}, 1.0), Configuration({"x": "ba"}, 2.0)]
    times = {"first": either, "second": [Configuration({"x": "ba"}, 1.5)]}
    best = ir.select_layouts(times)
    assert (best.seconds, best.fastest) == (3.5, 2.5)
