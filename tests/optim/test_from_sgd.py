"""Jorge's hyper-parameters from an SGD recipe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import optim
from hpcjax.core.errors import ConfigError


def _recipe(**changes):
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    return optim.SGDRecipe(**(given | {"epochs": 90, "steps_per_epoch": 7} | changes))


@pytest.mark.acceptance("jorge", 9)
def test_resnet_recipe():
    tx, schedule, report = optim.jorge_from_sgd(_recipe())
    assert report["learning_rate"].value == 0.1
    assert report["weight_decay"].value == pytest.approx(1e-3, rel=1e-12)
    assert report["decay_epochs"].value == (30, 60)
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(90 * 7)))
    changes = np.flatnonzero(np.diff(rates)) + 1
    assert changes.tolist() == [30 * 7, 60 * 7]
    np.testing.assert_allclose(rates[[0, 210, 420]], [0.1, 0.01, 0.001], rtol=1e-6)
    assert all(derived.rule for derived in report.values())
    state = tx.init({"w": jnp.ones((2, 2))})
    assert float(optim.inspect(state)["learning_rate"]) == pytest.approx(0.1)


@pytest.mark.acceptance("jorge", 9)
def test_the_transform_uses_what_the_report_says():
    recipe = _recipe(warmup_epochs=2.0, nesterov=True)
    tx, schedule, report = optim.jorge_from_sgd(recipe, update_every=2)
    names = ("weight_decay", "graft_momentum", "graft_nesterov", "b1")
    same = optim.jorge(
        schedule, update_every=2, **{name: report[name].value for name in names}
    )
    assert report["warmup_steps"].value == 14
    params = {"w": jnp.asarray([[1.0, 2.0], [3.0, 5.0]])}
    one, two = tx.init(params), same.init(params)
    for _ in range(3):
        got, one = jax.jit(tx.update)(params, one, params)
        expected, two = jax.jit(same.update)(params, two, params)
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5)
    assert float(optim.inspect(one)["learning_rate"]) == pytest.approx(0.1 * 3 / 14)


def test_options_given_replace_derived_ones():
    report = optim.jorge_from_sgd(
        _recipe(), schedule=optim.CosineConfig(warmup=3), b1=0.5
    ).report
    assert report["b1"] == optim.Derived(0.5, "given")
    assert report["schedule"].value == "CosineConfig"
    assert report["warmup_steps"].value == 3
    assert "decay_epochs" not in report


def test_impossible_options_are_refused_at_once():
    for wrong in ({"stacked": ("(",)}, {"decay_rules": ()}, {"order": 4}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            optim.jorge_from_sgd(_recipe(), **wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"momentum": 1.0}, "momentum must be in"),
        ({"lr": -1.0}, "lr must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": 2**20, "steps_per_epoch": 2**11}, "steps must be .* < 2"),
        ({"warmup_epochs": 90.0}, r"warmup_epochs must be in \[0, epochs\)"),
        ({"warmup_epochs": float("nan")}, "warmup_epochs must be"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
    ],
)
def test_impossible_recipes_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        _recipe(**changes)
    assert issubclass(ConfigError, ValueError)


def test_config_gives_the_same_optimizer():
    config = optim.JorgeFromSgdConfig(
        lr=0.1, weight_decay=1e-4, schedule=optim.StepDecayConfig(warmup=3)
    )
    tx = config.make(90)
    recipe = _recipe(epochs=90, steps_per_epoch=1, warmup_epochs=3.0)
    same = optim.jorge_from_sgd(recipe).tx
    params = {"w": jnp.asarray([[1.0, 2.0], [3.0, 5.0]])}
    got, state = jax.jit(tx.update)(params, tx.init(params), params)
    expected, _ = jax.jit(same.update)(params, same.init(params), params)
    np.testing.assert_array_equal(got["w"], expected["w"])
    assert float(optim.inspect(state)["learning_rate"]) == pytest.approx(0.1 / 3)
