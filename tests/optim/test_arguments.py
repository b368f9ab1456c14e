"""What is wrong in a call in one's own code is told in the words of that call."""

import inspect

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, models, optim
from hpcjax.optim import kfac, sparsify

ROOMS = (optim, kfac, sparsify, models)
# What returns something to train with.
MADE = ("Transformation", "Viewed", "FromSgd", "Method", "Optimization", "Gradients")
WEIGHTS = {"kernel": jnp.ones((4, 4))}
GIVEN = {
    "inner": optax.sgd(0.1),
    "chosen": kfac.Plan(()),
    "recipe": optim.SGDRecipe(
        lr=0.1, momentum=0.9, weight_decay=0.0, epochs=3, steps_per_epoch=5
    ),
    "params": WEIGHTS,
    "scores": WEIGHTS,
    "inputs": (4,),
    "outputs": 2,
    "tables": (3,),
    "rounds": 1,
}
# A field of the options of each; of the room `sparsify` it is `exclude`.
FIELDS = {
    "jorge": "update_every",
    "jorge_from_sgd": "update_every",
    "scale_by_jorge": "update_every",
    "shampoo": "roots_every",
    "scale_by_shampoo": "roots_every",
    "scale_by_kfac": "damping",
    "causal_lm": "heads",
    "dlrm": "bottom",
    "kge": "width",
    "ggnn": "width",
    "gnn": "hidden",
}
# Their options are those of a function that is given to them.
OTHERS = {"optax_schedule", "with_schedule"}


def arguments(function):
    return inspect.signature(function).parameters.values()


def required(function):
    """Returns the names of the arguments without a default."""
    empty = inspect.Parameter.empty
    plain = [p for p in arguments(function) if p.kind is not p.VAR_KEYWORD]
    return [p.name for p in plain if p.default is empty]


PUBLIC = [
    getattr(room, name)
    for room in ROOMS
    for name in sorted(dir(room))
    if inspect.isfunction(getattr(room, name))
]
MAKERS = [
    function
    for function in PUBLIC
    if any(kind in str(inspect.signature(function).return_annotation) for kind in MADE)
    and required(function)
    and function is not optim.clip_global_norm  # for which None is no clipping
]
WITH_OPTIONS = [
    function
    for function in PUBLIC
    if any(p.kind is p.VAR_KEYWORD for p in arguments(function))
    and function.__name__ not in OTHERS
]


def test_what_is_public_is_found():
    assert optim.graft in MAKERS
    assert len(MAKERS) > 25
    assert optim.jorge in WITH_OPTIONS
    assert len(WITH_OPTIONS) > 18


@pytest.mark.parametrize("function", MAKERS, ids=lambda function: function.__name__)
def test_none_is_refused_by_the_name_of_the_argument(function):
    with pytest.raises(core.ConfigError) as told:
        function(**dict.fromkeys(required(function)))
    said = str(told.value)
    names = {each.replace("learning_rate", "lr") for each in required(function)}
    assert any(
        said.startswith(f"{each} must be ") for each in (*names, "learning_rate")
    )
    assert said.endswith("=None")


def test_what_was_not_called_is_no_transform():
    with pytest.raises(core.ConfigError, match="inner must be an optax transform"):
        sparsify.prune(optax.sgd)


@pytest.mark.parametrize(
    "function", WITH_OPTIONS, ids=lambda function: function.__name__
)
def test_a_misspelled_option_is_told_with_the_nearest(function):
    given = {name: GIVEN.get(name, 0.5) for name in required(function)}
    right = FIELDS.get(function.__name__, "exclude")
    wrong = right[:-2] + right[-1]
    with pytest.raises(TypeError) as told:
        function(**given, **{wrong: 3})
    assert str(told.value) == (
        f"{function.__name__}() got an unexpected keyword argument {wrong!r}; did you "
        f"mean {right!r}?"
    )


def test_arguments_of_the_function_are_among_the_nearest():
    with pytest.raises(TypeError, match=r"^jorge\(\) .* did you mean 'clip_norm'\?$"):
        optim.jorge(0.1, clip_nrom=1.0)


def test_a_config_that_is_called_tells_its_own_name():
    with pytest.raises(TypeError, match=r"^JorgeConfig\(\) .* mean 'update_every'\?$"):
        optim.JorgeConfig(update_evry=3)


@pytest.mark.parametrize("scalar", [np.float32, np.float64])
def test_numbers_of_numpy_are_checked_too(scalar):
    for wrong in (
        lambda: optim.sgd(scalar(-0.1)),
        lambda: optim.adamw(0.1, b1=scalar(1.5)),
        lambda: optim.clip_global_norm(scalar(np.nan)),
        lambda: optim.add_weight_decay(scalar(-1)),
    ):
        with pytest.raises(core.ConfigError, match="must be"):
            wrong()
    assert optim.sgd(scalar(0.1)).init(WEIGHTS)


def test_freezing_at_random_needs_the_step():
    tx = optim.freeze_at_random(optim.Blocks((("kernel",),)), 0)
    with pytest.raises(TypeError, match="step="):
        tx.update(WEIGHTS, tx.init(WEIGHTS))
