"""The reduction of `ssn/budgets`, and the sizes of the networks that it compares."""

import dataclasses

import jax
import numpy as np
import pytest
import xarray as xr

from configs.ssn import fashion
from experiments.ssn import tables


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
    table = tables.BUDGET.reduce(rows)
    own = table.sel(row="5 %")
    assert own["above"] == pytest.approx(3.1)
    assert own["gained"] == pytest.approx(1.9)
    gains = np.array([2, 2, 1.7])
    # The 90 % point of Student's t with two degrees of freedom.
    bound = gains.mean() - 1.885618 * gains.std(ddof=1) / np.sqrt(3)
    assert own["surely_gained"] == pytest.approx(bound, rel=1e-5)
    claim = tables.BUDGET.tier("cpu").claims["narrow"]
    assert claim.ours(table) == pytest.approx(bound, rel=1e-5)
    rows["1 %"] = made_up([22, 24, 26])
    assert claim.ours(tables.BUDGET.reduce(rows)) == -np.inf


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
