"""Configs as JSON, compared and fingerprinted."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax.core.errors import ConfigError
from hpcjax.runs import config as configs
from hpcjax.runs import overrides
from tests.runs.example_config import (
    CosineConfig,
    ExampleConfig,
    JorgeConfig,
    ModelConfig,
    NeedyConfig,
    SgdConfig,
    StepsConfig,
)

NUMBERS = st.floats(allow_nan=False)
COSINES = st.builds(CosineConfig, warmup=st.integers(), final=NUMBERS)
STEPS = st.builds(StepsConfig, at=st.lists(NUMBERS, max_size=3).map(tuple))
SCHEDULES = st.one_of(COSINES, STEPS)
OPTIMIZERS = st.one_of(
    st.builds(
        SgdConfig,
        lr=NUMBERS,
        momentum=NUMBERS,
        schedule=st.one_of(SCHEDULES, st.none()),
    ),
    st.builds(
        JorgeConfig,
        lr=NUMBERS,
        precond_every=st.integers(),
        damping=st.one_of(NUMBERS, st.just("dynamic")),
        schedule=SCHEDULES,
    ),
)
TUPLES = st.lists(st.integers(1), max_size=3).map(tuple)
MODELS = st.builds(
    ModelConfig,
    widths=TUPLES,
    kernels=st.lists(st.tuples(st.integers(), st.integers()), max_size=2).map(tuple),
    blocks=st.one_of(st.none(), st.lists(TUPLES, max_size=2).map(tuple)),
    norm=st.sampled_from(["batch", "group"]),
    name=st.text(max_size=5).filter(lambda text: text != "refused"),
    clip=st.one_of(st.none(), NUMBERS),
    bias=st.booleans(),
    code=st.one_of(st.integers(), st.text("abc -é", max_size=3)),
    rules=st.lists(st.tuples(st.text(max_size=3), st.booleans()), max_size=2).map(
        tuple
    ),
    tags=st.lists(st.text(max_size=3), max_size=2).map(tuple),
)
PLAIN = st.builds(
    ExampleConfig,
    optimizer=OPTIMIZERS,
    model=MODELS,
    extra=st.one_of(st.none(), COSINES),
    steps=st.integers(),
    seed=st.integers(),
)
EXTRAS = st.one_of(st.none(), COSINES, st.builds(NeedyConfig, size=st.integers(0, 9)))


@settings(max_examples=40)
@given(PLAIN, EXTRAS, st.lists(SCHEDULES, max_size=2))
def test_json_round_trip(config, extra, layers):
    config = dataclasses.replace(config, extra=extra, layers=tuple(layers))
    text = json.dumps(configs.to_json(config), allow_nan=False)
    again = configs.from_json(json.loads(text))
    assert again == config
    assert configs.digest(again) == configs.digest(config)


@settings(max_examples=40)
@given(PLAIN, PLAIN)
def test_changes_lead_from_one_config_to_another(base, config):
    found = configs.changes(base, config)
    assert overrides.parse(base, found) == config
    assert overrides.parse(base, overrides.pairs(f"{k}={v}" for k, v in found.items()))
    assert (found == {}) == (configs.diff(base, config) == {}) == (base == config)


def test_the_form_of_the_json():
    config = ExampleConfig(
        optimizer=SgdConfig(lr=math.inf, schedule=StepsConfig()),
        model=ModelConfig(clip=-math.inf),
        layers=(CosineConfig(), StepsConfig(at=())),
    )
    data = configs.to_json(config)
    assert data["class"] == "tests.runs.example_config:ExampleConfig"
    optimizer = data["values"]["optimizer"]
    assert optimizer["type"] == "sgd"
    assert optimizer["lr"] == "inf"
    assert data["values"]["model"]["clip"] == "-inf"
    assert optimizer["schedule"] == {"type": "steps", "at": [0.5, 0.75]}
    assert "type" not in data["values"]["model"]
    assert data["values"]["extra"] is None
    assert [layer["type"] for layer in data["values"]["layers"]] == ["cosine", "steps"]


def edited(path, value):
    data = json.loads(json.dumps(configs.to_json(ExampleConfig())))
    inner = data["values"]
    *above, last = path.split(".")
    for name in above:
        inner = inner[name]
    inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("steps", "7", ["steps must be int", '"7"']),
        ("steps", 7.0, ["steps must be int"]),
        ("steps", True, ["steps must be int"]),
        ("steps", None, ["steps must be int", "null"]),
        ("optimizer.lr", "0.3", ["optimizer.lr must be float"]),
        ("optimizer.lr", False, ["optimizer.lr must be float"]),
        ("optimizer.damping", "static", ["optimizer.damping", "'dynamic'"]),
        ("model.bias", 0, ["model.bias must be bool"]),
        ("model.widths", 3, ["model.widths must be [int, ...]"]),
        ("model.widths", [3, "4"], ["model.widths[1] must be int"]),
        ("model.kernels", [[1]], ["model.kernels[0]", "[int, int]"]),
        ("model.widhts", [3], ["'model.widhts'", "did you mean 'widths'"]),
        ("model", 3, ["model must be model", "3"]),
        ("optimizer", {"lr": 1.0}, ["optimizer must be jorge | sgd", "'type'"]),
        ("optimizer.type", "sdg", ["'type': 'sdg'", "did you mean 'sgd'"]),
        ("optimizer.type", ["sgd"], ["optimizer must be", "'type': ['sgd']"]),
        ("optimizer.lr", 10**400, ["optimizer.lr", "too large"]),
        ("model.tags", "ab", ["model.tags must be [str, ...]"]),
        ("model.rules", [["a", 1]], ["model.rules[0][1] must be bool", "1"]),
        ("model.norm", "layer", ["model.norm must be 'batch' | 'group'"]),
        ("optimizer.momentum", 1.0, ["'optimizer.momentum'"]),
        ("extra", {"type": "needy"}, ["extra.size has no default"]),
        ("layers", [{"type": "cosine", "warmup": "2"}], ["layers[0].warmup"]),
        ("model.widths", [0], ["model: widths must be positive"]),
    ],
)
def test_json_by_hand_is_checked(path, value, parts):
    with pytest.raises(ConfigError) as caught:
        configs.from_json(edited(path, value))
    for part in parts:
        assert part in str(caught.value)


def test_missing_keys_take_defaults_and_whole_numbers_are_floats():
    data = {"class": "tests.runs.example_config:ExampleConfig", "values": {"seed": 3}}
    assert configs.from_json(data) == ExampleConfig(seed=3)
    got = configs.from_json(edited("optimizer.lr", 3)).optimizer.lr
    assert (got, type(got)) == (3.0, float)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ([], "a config must be"),
        ({"values": {}}, "a config must be"),
        ({"class": "os:path", "values": {}}, "no config class 'path'"),
        ({"class": "antigravity:Config", "values": {}}, "must lie in"),
        ({"class": "experiments.no_such_paper:Config", "values": {}}, "no module"),
        ({"class": "tests.runs.example_config", "values": {}}, "no config class"),
        (
            {"class": "tests.runs.example_config:ExampleConfi", "values": {}},
            "did you mean 'ExampleConfig'",
        ),
        (
            {"class": "tests.runs.example_config:ExampleConfig", "values": []},
            "must be an object",
        ),
    ],
)
def test_the_class_named_in_json(data, part):
    with pytest.raises(ConfigError, match=r"config|values") as caught:
        configs.from_json(data)
    assert part in str(caught.value)


def test_an_expected_class_is_insisted_on():
    with pytest.raises(ConfigError, match="expected"):
        configs.from_json(configs.to_json(SgdConfig()), ExampleConfig)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (ExampleConfig(steps="7"), "steps must be int"),
        (ExampleConfig(optimizer=CosineConfig()), "optimizer must be jorge | sgd"),
        (ExampleConfig(model=ModelConfig(widths=[3])), "model.widths must be"),
        (ExampleConfig(model=ModelConfig(widths=(3.5,))), "model.widths[0]"),
    ],
)
def test_a_wrong_value_in_a_python_config_is_found(config, part):
    with pytest.raises(ConfigError) as caught:
        configs.to_json(config)
    assert part in str(caught.value)


def test_diff():
    base = ExampleConfig()
    other = ExampleConfig(
        optimizer=SgdConfig(lr=3.0), seed=1, model=ModelConfig(clip=math.nan)
    )
    found = configs.diff(base, other)
    assert found["seed"] == (0, 1)
    assert found["optimizer"] == ("jorge", "sgd")
    assert found["optimizer.lr"] == (0.05, 3.0)
    assert found["optimizer.momentum"] == (configs.ABSENT, 0.9)
    assert found["optimizer.precond_every"] == (10, configs.ABSENT)
    assert "model.clip" in found
    assert "steps" not in found
    assert configs.diff(other, other) == {}


def test_digest_depends_on_values_not_on_how_they_are_written():
    base = ExampleConfig(optimizer=SgdConfig(lr=1.0))
    whole = ExampleConfig(optimizer=SgdConfig(lr=1))
    assert configs.digest(base) == configs.digest(whole)
    assert configs.digest(base) != configs.digest(dataclasses.replace(base, seed=1))
    assert configs.digest(SgdConfig()) != configs.digest(JorgeConfig())
    # Recorded: a digest that moves makes every finished run unknown.
    assert configs.digest(CosineConfig()) == "094cf85d40c52e02"
    named = {"name": "a/b", **configs.to_json(base)}
    assert configs.digest_json(named) == configs.digest(base)


def test_resuming_may_change_only_what_the_experiment_lists():
    old = ExampleConfig()
    configs.check_resumable(old, dataclasses.replace(old, steps=900))
    with pytest.raises(ConfigError) as caught:
        configs.check_resumable(old, dataclasses.replace(old, steps=900, seed=4))
    assert "seed: 0 -> 4" in str(caught.value)
    assert "resuming may change steps" in str(caught.value)
    with pytest.raises(ConfigError, match="SgdConfig"):
        configs.check_resumable(old, SgdConfig())
