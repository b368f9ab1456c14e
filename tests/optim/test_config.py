"""Configs: no JAX at import, fields equal to the factories' arguments, checks."""

import dataclasses
import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from hpcjax import optim
from hpcjax.core.errors import ConfigError

PAIRS = [
    (optim.SgdConfig, optim.sgd, None),
    (optim.AdamWConfig, optim.adamw, None),
    (optim.LambConfig, optim.lamb, None),
    (optim.AdagradConfig, optim.adagrad, None),
    (optim.RowAdagradConfig, optim.row_adagrad, None),
    (optim.JorgeConfig, optim.jorge, optim.JorgeOptions),
    (optim.ShampooConfig, optim.shampoo, optim.ShampooOptions),
    (optim.ShampooOptions, optim.scale_by_shampoo, optim.ShampooOptions),
    (optim.JorgeOptions, optim.scale_by_jorge, optim.JorgeOptions),
    (optim.ConstantConfig, optim.constant_schedule, None),
    (optim.CosineConfig, optim.cosine_schedule, None),
    (optim.StepDecayConfig, optim.step_decay_schedule, None),
]
MAKERS = [
    optim.SgdConfig,
    optim.AdagradConfig,
    optim.AdamWConfig,
    optim.LambConfig,
    optim.RowAdagradConfig,
    optim.JorgeConfig,
    optim.ShampooConfig,
    optim.JorgeFromSgdConfig,
]
FACTORIES = [optim.sgd, optim.adamw, optim.lamb, optim.jorge, optim.shampoo]


def _fields(cls):
    return {field.name: field.default for field in dataclasses.fields(cls)}


@pytest.mark.parametrize(("config", "factory", "options"), PAIRS)
def test_fields_and_defaults_equal_the_factorys(config, factory, options):
    expected = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if name not in ("learning_rate", "options", "peak", "steps")
    }
    expected |= _fields(options) if options else {}
    fields = _fields(config)
    if config in MAKERS:
        assert "lr" in fields
        apart = ("lr", "schedule", "smooth_norm")
        fields = {k: v for k, v in fields.items() if k not in apart}
    assert fields == expected


def test_keys_of_sgd_are_keys_of_jorge_from_sgd():
    extra = set(_fields(optim.JorgeFromSgdConfig)) - set(_fields(optim.SgdConfig))
    assert set(_fields(optim.SgdConfig)) <= set(_fields(optim.JorgeFromSgdConfig))
    assert extra == {"update_every", "init", "stacked"}


@pytest.mark.quick("AdamWConfig", "LambConfig", "JorgeFromSgdConfig")
@pytest.mark.parametrize("config", MAKERS)
def test_made_optimizers_step_down_and_show_their_rate(config):
    tx = config(schedule=optim.StepDecayConfig(warmup=2)).make(9)
    params = {"kernel": jnp.eye(2)}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert float((updates["kernel"] * params["kernel"]).sum()) < 0
    rate = optim.inspect(state)["learning_rate"]
    assert float(rate) == pytest.approx(config().lr / 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optim.SgdConfig(lr=float("inf")), "lr must be finite"),
        (lambda: optim.SgdConfig(momentum=1.0), "momentum must be in"),
        (lambda: optim.SgdConfig(clip_norm=0.0), "clip_norm must be finite and > 0"),
        (lambda: optim.AdamWConfig(b2=-0.1), "b2 must be in"),
        (lambda: optim.AdamWConfig(weight_decay=-1.0), "weight_decay must be"),
        (lambda: optim.LambConfig(b1=1.0), "b1 must be in"),
        (lambda: optim.LambConfig(eps=-1.0), "eps must be finite and >= 0"),
        (lambda: optim.LambConfig(trust_rules=()), "trust_rules must be .* at least"),
        (lambda: optim.ConstantConfig(warmup=-1), "warmup must be an integer >= 0"),
        (lambda: optim.CosineConfig(final=2.0), "final must be in"),
        (lambda: optim.StepDecayConfig(at=(0.5, 0.5)), "at must increase"),
        (lambda: optim.StepDecayConfig(factor=0.0), "factor must be in"),
        (lambda: optim.SgdConfig(lr=-0.1), "lr must be finite and >= 0"),
        (lambda: optim.SgdConfig(lr=float("nan")), "lr must be finite"),
        (lambda: optim.SgdConfig(lr=1e39), "lr must be .* the range of float32"),
        (lambda: optim.SgdConfig(lr=1e-39), "lr must be .* the range of float32"),
        (lambda: optim.with_schedule(optim.sgd, -1.0), "learning_rate must be finite"),
        (lambda: optim.constant_schedule(float("nan"), 9), "peak must be finite"),
        (lambda: optim.cosine_schedule(0.1, 9, final=2.0), "final must be in"),
        (lambda: optim.step_decay_schedule(0.1, 9, at=(2.0,)), r"at\[0\] must be"),
        (lambda: optim.step_decay_schedule(0.1, 9, factor=-1.0), "factor must be in"),
        (lambda: optim.ConstantConfig(warmup=2**31), "warmup must be .* < 2"),
        (lambda: optim.JorgeConfig(update_every=2**31), "update_every must be .* < 2"),
        (lambda: optim.ShampooConfig(roots_every=2**31), "roots_every must be .* < 2"),
        (
            lambda: optim.JorgeFromSgdConfig(
                schedule=optim.StepDecayConfig(warmup=5)
            ).make(5),
            r"warmup must be in \[0, steps\): got warmup=5, steps=5",
        ),
        (
            lambda: optim.SgdConfig(schedule=optim.CosineConfig(warmup=5)).make(5),
            r"warmup must be in \[0, steps\): got warmup=5, steps=5",
        ),
        (lambda: optim.sgd(0.1, momentum=2.0), "momentum must be in"),
        (lambda: optim.adamw(-0.1), "lr must be"),
        (lambda: optim.scale_by_momentum(1.0), "momentum must be in"),
    ],
)
def test_values_out_of_range_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("steps", [0, 2**31])
@pytest.mark.parametrize("config", MAKERS)
def test_lengths_of_runs_that_cannot_be_are_refused(config, steps):
    with pytest.raises(ConfigError, match=rf"steps must be .*: got steps={steps}"):
        config().make(steps)


def test_the_least_and_the_most_that_can_be():
    config = optim.SgdConfig(lr=0.0, schedule=optim.ConstantConfig(warmup=2**31 - 2))
    tx = config.make(2**31 - 1)
    params = jnp.ones(2)
    updates, _ = tx.update(params, tx.init(params), params)
    assert not updates.any()


CANNOT_BE_RULES = [
    ((("(", True),), r"decay_rules must hold regular.*got '\(': missing \)"),
    ((("bias", False), ("*", True)), r"got '\*': nothing to repeat"),
    ((), r"at least one: got decay_rules=\(\)"),
]


@pytest.mark.parametrize("make", [*MAKERS, optim.add_weight_decay, *FACTORIES])
@pytest.mark.parametrize(("rules", "words"), CANNOT_BE_RULES)
def test_rules_that_cannot_be_are_refused_at_once(make, rules, words):
    lr = () if make in MAKERS else (0.1,)
    with pytest.raises(ConfigError, match=words):
        make(*lr, decay_rules=rules)


def test_one_rule_is_not_taken_for_a_list_of_rules():
    with pytest.raises(ConfigError, match=r"decay_rules\[0\] must be \[str, bool\]"):
        optim.add_weight_decay(0.1, ("bias", False))


@pytest.mark.parametrize(
    "make",
    [
        optim.JorgeOptions,
        optim.JorgeConfig,
        optim.JorgeFromSgdConfig,
        optim.ShampooOptions,
        optim.ShampooConfig,
        optim.LambConfig,
        optim.scale_by_jorge,
        optim.scale_by_shampoo,
        optim.scale_by_trust_ratio,
        functools.partial(optim.lamb, 0.1),
        functools.partial(optim.jorge, 0.1),
        functools.partial(optim.shampoo, 0.1),
        functools.partial(optim.graft, optax.identity(), optax.identity()),
    ],
)
def test_stacks_that_are_no_regexes_are_refused_at_once(make):
    with pytest.raises(ConfigError, match=r"stacked must hold regular.*got '\('"):
        make(stacked=("^a", "("))


def test_importing_configs_imports_no_jax():
    names = [config.__name__ for config in MAKERS]
    code = (
        f"import sys; from hpcjax.optim import {', '.join(names)}; "
        "sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'optax', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
