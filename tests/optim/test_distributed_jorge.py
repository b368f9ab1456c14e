"""Jorge's factors shared out over devices: one device's numbers, less work for each."""

import functools

import chex
import jax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import optim, perf, sharding
from hpcjax.core import ConfigError
from hpcjax.optim import jorge_factor

DEVICES = 8
OPTIONS = {"update_every": 2, "block_size": 8, "init": "grad"}
SHAPES = {"a": (12, 5), "b": (7, 6), "c": (3, 3, 2, 4), "d": (9,)}
# Blocks of at most 8: a is 8 + 4 rows by 5, b 7 by 6, c 18 by 4 is 8 + 8 + 2 by 4.
SIDES = [8, 5, 4, 5, 7, 6, 8, 4, 8, 4, 2, 4]


def gradients(number):
    keys = jax.random.split(jax.random.key(number), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def mapped(tx, axis="data"):
    return jax.jit(
        jax.shard_map(
            tx.update,
            mesh=sharding.make_mesh({axis: DEVICES}),
            in_specs=(P(), P()),
            out_specs=(P(), P()),
        )
    )


@functools.cache
def shared():
    """The transform and its compiled update on the devices."""
    tx = optim.scale_by_jorge(axis_name="data", **OPTIONS)
    params = gradients(0)
    return tx, mapped(tx).lower(params, tx.init(params)).compile()


@pytest.mark.slow
def test_eight_devices_give_the_updates_of_one():
    alone = optim.scale_by_jorge(**OPTIONS)
    (tx, step), single = shared(), jax.jit(alone.update)
    one, eight = alone.init(gradients(0)), tx.init(gradients(0))
    for number in range(5):
        expected, one = single(gradients(number), one)
        found, eight = step(gradients(number), eight)
        chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
    largest = jax.tree.map(lambda leaf: abs(leaf).max(), one.factors)
    scaled = (
        jax.tree.map(lambda leaf, most: leaf / most, state.factors, largest)
        for state in (eight, one)
    )
    chex.assert_trees_all_close(*scaled, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_only_factors_are_sent_and_only_when_they_are_due():
    always, sometimes = perf.collectives_by_branch(shared()[1])
    assert not always
    # Each factor, and the seven figures beside it.
    words = sum(n * n + 7 for n in SIDES)
    assert sum(c.pair_bytes for c in sometimes) == (DEVICES - 1) * 4 * words
    assert {c.kind for c in sometimes} == {"collective-permute"}


@pytest.mark.slow
def test_each_factor_is_updated_once(monkeypatch):
    calls, plain = [], jorge_factor.update

    def counted(state, *arguments, **options):
        jax.debug.callback(lambda _: calls.append(state.matrix.shape), state.nu)
        return plain(state, *arguments, **options)

    monkeypatch.setattr(jorge_factor, "update", counted)
    tx = optim.scale_by_jorge(axis_name="data", **OPTIONS)
    step = mapped(tx)
    _, state = step(gradients(0), tx.init(gradients(0)))
    step(gradients(1), state)
    jax.effects_barrier()
    assert sorted(calls) == sorted((n, n) for n in SIDES)


@pytest.mark.parametrize("make", [optim.scale_by_jorge, optim.scale_by_shampoo])
def test_axes_that_are_not_there_are_named(make):
    tx, params = make(axis_name="data"), gradients(0)
    told = r"shares its factors out communicates over .*'data'"
    with pytest.raises(ConfigError, match=told):
        jax.eval_shape(tx.update, params, tx.init(params))
    with pytest.raises(ConfigError, match=r"not among the axes here, \['other'\]"):
        jax.eval_shape(mapped(tx, "other"), params, tx.init(params))


@pytest.mark.slow
def test_the_config_has_it():
    config = optim.JorgeConfig(lr=0.1, axis_name="data", update_every=1)
    params = gradients(0)
    found = mapped(config.make(10))
    state = config.make(10).init(params)
    alone = optim.JorgeConfig(lr=0.1, update_every=1).make(10)
    expected, _ = jax.jit(alone.update)(params, alone.init(params))
    updates, _ = found(params, state)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6, atol=1e-6)
