"""Schedules of optax in configs: their values, and what is refused."""

import dataclasses
import inspect

import numpy as np
import optax
import pytest

from hpcjax import optim
from hpcjax.core import ConfigError, parts
from hpcjax.runs import overrides

STEPS, PEAK = 20, 0.3
SCALES = {5: 0.5, 12: 0.1}
BOUNDARIES = "[[5,0.5],[12,0.1]]"
# The keys that a command line gives, and the whole call of optax that is meant.
CASES = {
    "linear": (
        {"transition_begin": "3"},
        lambda: optax.linear_schedule(1.0, 0.0, STEPS - 3, transition_begin=3),
    ),
    "polynomial": (
        {"end_value": "0.1", "power": "3"},
        lambda: optax.polynomial_schedule(1.0, 0.1, 3, STEPS),
    ),
    "exponential": (
        {"transition_steps": "4", "decay_rate": "0.5", "staircase": "true"},
        lambda: optax.exponential_decay(1.0, 4, 0.5, staircase=True),
    ),
    "piecewise": (
        {"boundaries_and_scales": BOUNDARIES},
        lambda: optax.piecewise_constant_schedule(1.0, SCALES),
    ),
    "piecewise_interpolate": (
        {"boundaries_and_scales": BOUNDARIES, "interpolate_type": "cosine"},
        lambda: optax.piecewise_interpolate_schedule("cosine", 1.0, SCALES),
    ),
    "onecycle": (
        {"pct_start": "0.2"},
        lambda: optax.cosine_onecycle_schedule(STEPS, 1.0, pct_start=0.2),
    ),
    "linear_onecycle": ({}, lambda: optax.linear_onecycle_schedule(STEPS, 1.0)),
    "warmup_cosine": (
        {},
        lambda: optax.warmup_cosine_decay_schedule(0.0, 1.0, STEPS // 10, STEPS),
    ),
    "warmup_exponential": (
        {"warmup_steps": "4", "decay_rate": "0.5"},
        lambda: optax.warmup_exponential_decay_schedule(0.0, 1.0, 4, STEPS - 4, 0.5),
    ),
}
# Schedules of the house that are optax's, with their call of it.
OWN = {
    "constant_schedule": ("constant", {}, lambda: optax.constant_schedule(1.0)),
    "cosine_decay_schedule": (
        "cosine",
        {"final": "0.2"},
        lambda: optax.cosine_decay_schedule(1.0, STEPS, alpha=0.2),
    ),
    # Optax's first rate is zero, which wastes a batch: the house is a step ahead.
    "warmup_constant_schedule": (
        "constant",
        {"warmup": "4"},
        lambda: lambda t: optax.warmup_constant_schedule(0.0, 1.0, 4)(t + 1),
    ),
}


def parse(name, given):
    """The optimizer's config, as a command line gives it."""
    keys = {f"schedule.{key}": text for key, text in given.items()}
    return overrides.parse(optim.SgdConfig(lr=PEAK), {"schedule": name} | keys)


def test_every_schedule_of_optax_for_numbers_has_a_name():
    """Those left out take schedules, or a list of dictionaries."""
    made = {
        name
        for name, each in vars(optax.schedules).items()
        if name.endswith(("_schedule", "_decay")) and inspect.isfunction(each)
    }
    classes = parts.classes("schedule")
    named = {getattr(cls, "function", "") for cls in classes.values()} - {""}
    assert made - {"sgdr_schedule"} == named | set(OWN)
    assert set(CASES) == {n for n, c in classes.items() if hasattr(c, "function")}


@pytest.mark.parametrize("name", CASES)
def test_fields_are_arguments_of_optaxs_function(name):
    cls = parts.classes("schedule")[name]
    arguments = set(inspect.signature(getattr(optax, cls.function)).parameters)
    fields = {field.name for field in dataclasses.fields(cls)}
    assert fields == arguments - {"peak_value"}


@pytest.mark.quick("warmup_cosine", "piecewise", "cosine_decay_schedule")
@pytest.mark.parametrize("name", [*CASES, *OWN])
def test_values_are_optaxs_own_times_the_peak(name):
    part, given, theirs = OWN[name] if name in OWN else (name, *CASES[name])
    cfg, theirs = parse(part, given), theirs()
    schedule = cfg.schedule.make(PEAK, STEPS)
    for step in range(STEPS + 2):
        np.testing.assert_allclose(
            schedule(step), PEAK * theirs(step), rtol=1e-6, atol=1e-7
        )
    params = np.ones(2, np.float32)
    tx = cfg.make(STEPS)
    updates, state = tx.update(params, tx.init(params), params)
    rate = state.hyperparams["learning_rate"]
    np.testing.assert_allclose(rate, PEAK * theirs(0), rtol=1e-6)
    np.testing.assert_allclose(updates, -rate * params, rtol=1e-6)


@pytest.mark.parametrize("name", ["warmup_cosin", "piecewise_intrpolate"])
def test_a_name_that_is_none_is_answered_with_the_nearest(name):
    with pytest.raises(ConfigError, match=r"warmup_exponential: got .* did you mean '"):
        parse(name, {})


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("piecewise", {}, "schedule.boundaries_and_scales has no default: give it"),
        ("piecewise", {"boundaries_and_scales": "[]"}, "at least one"),
        ("piecewise", {"boundaries_and_scales": "[[5,1],[5,2]]"}, "increasing steps"),
        ("onecycle", {"pct_start": "1.5"}, r"pct_start must be in \(0, 1\)"),
        ("linear", {"end_value": "-1"}, "end_value must be"),
    ],
)
def test_what_is_no_schedule_is_refused(name, given, words):
    with pytest.raises(ConfigError, match=words):
        parse(name, given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optim.WarmupCosineConfig(warmup_steps=9).make(1.0, 9), "within the"),
        (
            lambda: optim.WarmupCosineConfig(warmup_steps=5, decay_steps=4).make(1, 9),
            "warmup_cosine_decay_schedule: .*positive",
        ),
        (lambda: optim.LinearConfig().make(1.0, 0), "steps must be"),
        (lambda: optim.LinearConfig().make(-1.0, 9), "peak must be"),
    ],
)
def test_a_run_that_a_schedule_does_not_fit_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_jorge_from_sgd_takes_one_and_reports_it():
    recipe = optim.SGDRecipe(lr=0.1, epochs=3, steps_per_epoch=3)
    report = optim.jorge_from_sgd(recipe, schedule=optim.LinearConfig()).report
    assert report["schedule"].value == "LinearConfig"
    assert "warmup_steps" not in report
