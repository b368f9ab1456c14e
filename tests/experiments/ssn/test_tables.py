"""The reduction of `ssn/fashion`, and the sizes of the networks that it compares."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from configs.ssn import digits as configs_digits
from configs.ssn import fashion
from experiments.ssn import digits, tables
from hpcjax import core
from hpcjax.data import DigitsConfig


def made_up(errors):
    values = np.asarray(errors, float)[:, None] / 100
    return xr.Dataset({"val_error": (("seed", "eval_step"), values)})


def test_gains_are_paired_by_seed():
    rows = {
        "unshared": made_up([10, 12, 14]),
        "5 %": made_up([13, 15, 17.3]),
        "narrow, 5 %": made_up([15, 17, 19]),
        "1 %": made_up([20, 22, 24]),
        "narrow, 1 %": made_up([20.5, 22.5, 24.5]),
    }
    table = tables.FASHION.reduce(rows)
    own = table.sel(row="5 %")
    assert own["above"] == pytest.approx(3.1)
    assert own["gained"] == pytest.approx(1.9)
    gains = np.array([2, 2, 1.7])
    # The 90 % point of Student's t with two degrees of freedom.
    bound = gains.mean() - 1.885618 * gains.std(ddof=1) / np.sqrt(3)
    assert own["surely_gained"] == pytest.approx(bound, rel=1e-5)
    claim = tables.FASHION.tier("cpu").claims["narrow"]
    assert claim.ours(table) == pytest.approx(bound, rel=1e-5)
    rows["1 %"] = made_up([22, 24, 26])
    assert claim.ours(tables.FASHION.reduce(rows)) == -np.inf


def test_accuracies_are_paired_by_seed():
    def row(*accuracy):
        others = dict.fromkeys(("weights", "others", "mflop", "groups"), 1.0)
        own = {"accuracy": ("seed", list(accuracy))}
        return xr.Dataset(own | {name: ("seed", [1.0] * 2) for name in others})

    rows = {
        "unshared": row(99, 97),
        "1.7 %": row(97, 96),
        "narrow, 1.7 %": row(96, 93),
        "1.7 %, frozen": row(90, 80),
    }
    table = tables.BUDGET.reduce(rows)
    own = table.sel(row="1.7 %")
    assert own["below"] == pytest.approx(1.5)
    assert own["gained"] == pytest.approx(2.0)
    assert table["gained"].sel(row="1.7 %, frozen") == pytest.approx(-9.5)
    assert table["gained"].sel(row="narrow, 1.7 %") == 0
    rows |= {"25 %, drawn": row(96, 95), "25 %, learned": row(97, 99)}
    learned = tables.CHOICES.reduce(rows).sel(row="25 %, learned")
    assert learned["gained"] == pytest.approx(2.5)
    # Gains of 1 and 4; the 90 % point of Student's t with one degree of freedom.
    assert learned["sure"] == pytest.approx(2.5 - 3.077684 * 1.5, rel=1e-5)


@pytest.mark.parametrize("share", tables.EQUAL)
def test_budgets_of_digits_are_those_of_narrow_networks(share):
    def weights(config):
        model = config.model.make((8, 8, 1), 10)
        if config.sharing is not None:
            model = config.sharing.apply_to(model)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        return digits.count_weights(params)

    sharing = dataclasses.replace(
        configs_digits.shared.sharing, budget=float(tables.EQUAL[share])
    )
    narrow = dataclasses.replace(
        configs_digits.unshared.model, width=int(tables.NARROWER[share])
    )
    shared = dataclasses.replace(configs_digits.shared, sharing=sharing)
    alone = dataclasses.replace(configs_digits.unshared, model=narrow)
    assert weights(shared) == weights(alone)


@pytest.mark.slow
def test_frozen_stores_stay_and_groups_are_learned():
    cfg = dataclasses.replace(configs_digits.shared, steps=3, learned=3)
    model = cfg.model.make((8, 8, 1), 10)
    data = DigitsConfig().load()
    labels = digits.learn_groups(cfg, cfg.sharing, model, data)
    assert set(labels) == {0, 1, 2}
    given = dataclasses.replace(cfg.sharing, groups="given", labels=labels, budget=0.9)
    frozen = digits.freeze_stores(given.apply_to(model))
    start, _ = frozen.init(core.derive(jax.random.key(cfg.seed), "init"))
    params, _ = digits.train(cfg, frozen, data, 3)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), start, params)
    assert not any(digits.stores_of(moved).values())
    assert moved["head"]["bias"]


def count(config):
    model = config.model.make((14, 14, 1), 10)
    if config.sharing is not None:
        model = config.sharing.apply_to(model)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("budget", tables.NARROW)
def test_narrower_networks_have_no_fewer_parameters(budget):
    own = float(tables.BUDGETS[budget])
    sharing = dataclasses.replace(fashion.shared.sharing, budget=own)
    shared = count(dataclasses.replace(fashion.shared, sharing=sharing))
    width = tables.NARROW[budget]

    def narrow(width):
        model = dataclasses.replace(fashion.unshared.model, width=width)
        return count(dataclasses.replace(fashion.unshared, model=model))

    assert narrow(width - 1) < shared <= narrow(width)
