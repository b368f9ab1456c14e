"""Schedules of optax in configs: their values, and what is refused."""

import inspect

import numpy as np
import optax
import pytest

from hpcjax import optim
from hpcjax.core import ConfigError
from hpcjax.optim import schedule_config
from hpcjax.runs import overrides, values

STEPS, PEAK = 20, 0.3
SCALES = ((5, 0.5), (12, 0.1))
# What is given, and what optax itself is given.
CASES = {
    "constant_schedule": ({"value": 0.7}, {}),
    "cosine_decay_schedule": (
        {"init_value": 1.0, "alpha": 0.1},
        {"decay_steps": STEPS},
    ),
    "cosine_onecycle_schedule": (
        {"peak_value": 1.0, "pct_start": 0.2},
        {"transition_steps": STEPS},
    ),
    "exponential_decay": (
        {
            "init_value": 1.0,
            "transition_steps": 4,
            "decay_rate": 0.5,
            "staircase": True,
        },
        {},
    ),
    "linear_onecycle_schedule": ({"peak_value": 1.0}, {"transition_steps": STEPS}),
    "linear_schedule": (
        {"init_value": 1.0, "end_value": 0.0, "transition_begin": 3},
        {"transition_steps": STEPS},
    ),
    "piecewise_constant_schedule": (
        {"init_value": 1.0, "boundaries_and_scales": SCALES},
        {},
    ),
    "piecewise_interpolate_schedule": (
        {
            "interpolate_type": "cosine",
            "init_value": 1.0,
            "boundaries_and_scales": SCALES,
        },
        {},
    ),
    "polynomial_schedule": (
        {"init_value": 1.0, "end_value": 0.1, "power": 2},
        {"transition_steps": STEPS},
    ),
    "warmup_constant_schedule": (
        {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 4},
        {},
    ),
    "warmup_cosine_decay_schedule": (
        {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 4},
        {"decay_steps": STEPS},
    ),
    "warmup_exponential_decay_schedule": (
        {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 4, "decay_rate": 0.5},
        {"transition_steps": STEPS},
    ),
}


def test_every_schedule_of_optax_for_numbers_is_there():
    """Those left out take schedules, or a list of dictionaries."""
    made = {
        name
        for name, each in vars(optax.schedules).items()
        if name.endswith(("_schedule", "_decay")) and inspect.isfunction(each)
    }
    assert made - {"sgdr_schedule"} == set(schedule_config.OPTAX_NAMES) == set(CASES)


@pytest.mark.quick(
    "warmup_constant_schedule", "constant_schedule", "polynomial_schedule"
)
@pytest.mark.parametrize("name", CASES)
def test_values_are_optaxs_own_times_the_peak(name):
    given, added = CASES[name]
    # As a command line gives it.
    text = values.show(tuple(given.items()))
    cfg = overrides.parse(
        optim.SgdConfig(lr=PEAK),
        {"schedule": "optax", "schedule.name": name, "schedule.arguments": text},
    )
    assert cfg.schedule == optim.OptaxConfig(name=name, arguments=tuple(given.items()))
    schedule = cfg.schedule.make(PEAK, STEPS)
    plain = {**given, **added}
    if "boundaries_and_scales" in plain:
        plain["boundaries_and_scales"] = dict(plain["boundaries_and_scales"])
    theirs = getattr(optax, name)(**plain)
    for step in range(STEPS + 2):
        np.testing.assert_allclose(
            schedule(step), PEAK * theirs(step), rtol=1e-6, atol=1e-9
        )
    params = np.ones(2, np.float32)
    tx = cfg.make(STEPS)
    updates, state = tx.update(params, tx.init(params), params)
    rate = state.hyperparams["learning_rate"]
    np.testing.assert_allclose(rate, PEAK * theirs(0), rtol=1e-6)
    np.testing.assert_allclose(updates, -rate * params, rtol=1e-6)


def schedule(name, *arguments):
    return optim.OptaxConfig(name=name, arguments=arguments)


def test_a_command_line_with_another_name_is_answered_with_the_nearest():
    choice = {"schedule": "optax", "schedule.name": "cosine_decay_scedule"}
    with pytest.raises(ConfigError, match="did you mean 'cosine_decay_schedule'"):
        overrides.parse(optim.SgdConfig(), choice)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedule("cosine_decay_scedule"), "mean 'cosine_decay_schedule'"),
        (lambda: schedule("linear_schedule", ("a", 1), ("a", 2)), "argument once"),
        (
            lambda: schedule("constant_schedule", ("valu", 1.0)).make(1.0, 9),
            "constant_schedule has no argument 'valu'.* mean 'value'",
        ),
        (
            lambda: schedule("warmup_constant_schedule").make(1.0, 9),
            "needs init_value, peak_value, warmup_steps: got",
        ),
        (
            lambda: schedule(
                "cosine_decay_schedule", ("init_value", 1.0), ("decay_steps", 0)
            ).make(1.0, 9),
            "cosine_decay_schedule: .*positive",
        ),
        (lambda: optim.OptaxConfig().make(1.0, 0), "steps must be"),
        (lambda: optim.OptaxConfig().make(-1.0, 9), "peak must be"),
    ],
)
def test_what_is_no_schedule_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_jorge_from_sgd_takes_one_and_reports_it():
    recipe = optim.SGDRecipe(lr=0.1, epochs=3, steps_per_epoch=3)
    report = optim.jorge_from_sgd(recipe, schedule=optim.OptaxConfig()).report
    assert report["schedule"].value == "OptaxConfig"
    assert "warmup_steps" not in report
