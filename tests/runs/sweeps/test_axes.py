import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjax.core import ConfigError
from hpcjax.runs import overrides
from hpcjax.runs.sweeps import axes
from hpcjax.runs.sweeps.axes import Axis


def one(text):
    (axis,), fixed = axes.parse({"k": text})
    assert not fixed
    return axis


def test_lists_are_split_outside_brackets_only():
    varied, fixed = axes.parse(
        {"a": "1, 2", "b": "[64,10],[32]", "c": "[1,2]", "d": "x"}
    )
    assert [axis.values for axis in varied] == [("1", "2"), ("[64,10]", "[32]")]
    assert fixed == {"c": "[1,2]", "d": "x"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,1", "different values"),
        ("1,,2", "different values"),
        ("lug(1,2)", r"unknown range k=lug\(1,2\); did you mean 'log'"),
        ("uniform(2,1)", "the lower first"),
        ("uniform(1,1)", "the lower first"),
        ("uniform(0,inf)", "finite numbers"),
        ("uniform(nan,1)", "finite numbers"),
        ("uniform(a,b)", "must be numbers"),
        ("int(1.5,3)", "whole numbers"),
        ("log(0,1)", "> 0"),
        ("logint(0,4)", "> 0"),
    ],
)
def test_what_is_no_axis_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        axes.parse({"k": text})


@given(
    kind=st.sampled_from(["uniform", "log", "int", "logint"]),
    low=st.integers(1, 50),
    size=st.integers(1, 500),
    share=st.floats(0, 1, exclude_max=True),
)
def test_every_value_lies_in_its_range(kind, low, size, share):
    axis = one(f"{kind}({low},{low + size})")
    value = axis.at(share)
    assert low <= value <= low + size
    assert isinstance(value, int) == axis.whole
    assert float(axis.text(value)) == pytest.approx(value)


def test_ranges_are_even_in_what_they_say():
    shares = (np.arange(4000) + 0.5) / 4000
    uniform = [one("uniform(2,6)").at(s) for s in shares]
    logarithmic = [one("log(1e-3,1)").at(s) for s in shares]
    assert np.median(uniform) == pytest.approx(4, rel=1e-2)
    assert np.median(logarithmic) == pytest.approx(math.sqrt(1e-3), rel=1e-2)
    whole = [one("int(1,4)").at(s) for s in shares]
    assert np.bincount(whole)[1:].tolist() == [1000] * 4  # the ends count fully
    chosen = [one("a,b,c,d").at(s) for s in shares]
    assert [chosen.count(x) for x in "abcd"] == [1000] * 4


def test_a_grid_is_every_combination_in_order():
    varied, _ = axes.parse({"a": "1,2", "b": "x,y,z"})
    cells = axes.points(varied, "grid", None, seed=0)
    assert [(c["a"], c["b"]) for c in cells] == [
        (a, b) for a in ("1", "2") for b in ("x", "y", "z")
    ]


@pytest.mark.parametrize("sampler", ["random", "halton"])
def test_longer_sequences_begin_alike_and_seeds_differ(sampler):
    varied = [one("log(1e-3,1)"), Axis(key="b", values=("x", "y"))]
    short = axes.points(varied, sampler, 5, seed=3)
    assert axes.points(varied, sampler, 9, seed=3)[:5] == short
    assert axes.points(varied, sampler, 5, seed=4) != short


def test_halton_fills_space_more_evenly_than_chance():
    axis = one("uniform(0,1)")
    largest = {}
    for sampler in ("random", "halton"):
        gaps = []
        for seed in range(10):
            found = axes.points([axis], sampler, 64, seed=seed)
            values = sorted(point["k"] for point in found)
            gaps.append(np.diff([0, *values, 1]).max())
        largest[sampler] = np.mean(gaps)
    assert largest["halton"] < 0.6 * largest["random"]


@pytest.mark.parametrize(
    ("varied", "sampler", "trials", "words"),
    [
        ({}, "grid", None, "nothing is varied"),
        ({"k": "uniform(0,1)"}, "grid", None, r"lists of values: got k=uniform\(0,1\)"),
        ({"k": "1,2"}, "grid", 3, "its own number"),
        ({"k": "1,2"}, "random", None, "needs a number of trials"),
        ({"k": "1,2"}, "tpe", 0, "needs a number of trials"),
        ({"k": "1,2"}, "haltom", 3, "did you mean 'halton'"),
    ],
)
def test_samplers_that_cannot_are_refused(varied, sampler, trials, words):
    with pytest.raises(ConfigError, match=words):
        axes.check_sampler(axes.parse(varied)[0], sampler, trials)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AConfig:
    lr: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BConfig:
    momentum: float = 0.9
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    optimizer: AConfig | BConfig = AConfig(lr=0.5)
    name: str = ""
    label: str | None = None
    steps: int = 3
    parts: tuple[tuple[str, ...] | None, ...] = ()
    pair: tuple[float | None, bool] = (None, False)


def test_axes_of_a_config_file():
    found = axes.from_mapping(
        {"optimizer.lr": (0.1, "0.30"), "pair": ((None, True),), "label": (None, "x")},
        Config(),
    )
    texts = {axis.key: axis.values for axis in found}
    assert texts == {
        "optimizer.lr": ("0.1", "0.30"),
        "pair": ("[none,true]",),
        "label": ("none", "x"),
    }


@pytest.mark.parametrize(
    ("key", "listed"),
    [
        ("name", ("two words", "a,b", 'it\'s "q"', " edges ", "[x]", "true", "#")),
        ("label", (None, "a: b")),
        ("steps", tuple(np.arange(3))),
        ("optimizer.lr", np.logspace(-3, 0, 4)),
        ("optimizer.lr", [math.inf, 1e-300]),
        ("pair", ((None, True), (0.1, False))),
        ("parts", ((("a,b", "c d"), None), (("",), ()), (("none", "1"),), ())),
        ("parts", ((("#no comment", "x: y", "'", '"', "[", "é"),),)),
    ],
)
def test_every_value_of_a_config_file_reads_back(key, listed):
    (axis,) = axes.from_mapping({key: listed}, Config())
    assert len(axis.values) == len(listed)
    for text, value in zip(axis.values, listed, strict=True):
        config = overrides.parse(Config(), {key: text})
        assert overrides.keys(config)[key].value == value


def test_keys_below_a_choice_that_is_varied_too():
    listed = {"optimizer.names": (("a,b",),), "optimizer": ("b",)}
    found = axes.from_mapping(listed, Config())
    assert [(axis.key, axis.values) for axis in found] == [
        ("optimizer.names", ("['a,b']",)),
        ("optimizer", ("b",)),
    ]
    # One that is fixed is not varied, and chooses as well.
    below = {"optimizer": ("a",), "optimizer.momentum": (0.5,)}
    (axis,) = axes.from_mapping(below, Config(), {"optimizer": "b"})
    assert str(axis) == "optimizer.momentum=0.5"


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"lr": 0.1}, "such as .*: got lr: 0.1"),
        ({"steps": {1, 2}}, "got steps: {1, 2}"),
        ([("lr", (1,))], "such as"),
        ({"stesp": (1,)}, "did you mean 'steps'"),
        ({"steps": (1, 2.5)}, "steps: no override gives 2.5 for int"),
        ({"optimizer": (AConfig(lr=0.3),)}, r"no override gives AConfig\(lr=0.3\)"),
    ],
)
def test_what_a_config_file_cannot_sweep(listed, words):
    with pytest.raises(ConfigError, match=words):
        axes.from_mapping(listed, Config())
