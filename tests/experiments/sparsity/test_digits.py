"""The comparison of methods on digits: pairs by seed, and what is left."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.sparsity import digits, pruning, views
from experiments.sparsity import comparison, tables
from experiments.sparsity import digits as experiment
from tests.experiments import rows
from tests.experiments.rows import verdicts

SEEDS = range(5)
# Of 359 held-out images each.
STATIC = np.array([0.90, 0.92, 0.91, 0.93, 0.90])


def row(accuracy, kept=1000):
    return rows.run(
        seeds=SEEDS,
        kept=kept,
        size=10_000,
        sparsity=1 - kept / 10_000,
    ).assign(accuracy=("seed", accuracy))


def made_up(**changed):
    made = {
        "dense": row(np.full(5, 0.98), kept=10_000),
        "static, 95 %": row(STATIC),
        "SET, 95 %": row(STATIC + np.array([0.01, 0.01, 0.02, 0.01, 0.01])),
        "RigL, 95 %": row(STATIC + np.array([0.02, 0.01, 0.02, 0.03, 0.02])),
        "RigL, 80 %": row(np.full(5, 0.977), kept=2_000),
        "one shot, 95 %": row(STATIC - 0.5),
        "gradual, 95 %": row(STATIC + 0.03),
        "straight-through, 95 %": row(STATIC + 0.02),
    }
    return comparison.compare(made | changed)


def test_methods_are_compared_seed_by_seed():
    table = made_up()
    claims = verdicts(tables.DIGITS, table)
    assert all(claim.holds for claim in claims.values()), claims
    assert claims["RigL and SET"].ours == pytest.approx(0.8)
    assert claims["gradual"].ours == pytest.approx(53)
    rigl = table.sel(row="RigL, 95 %")
    # t = 2 / (0.7071 / sqrt(5)) with four degrees of freedom.
    assert rigl["over_static"] == pytest.approx(2)
    assert rigl["over_static_chance"] == pytest.approx(0.0016, abs=1e-4)
    # As good on average, but by one seed alone.
    lucky = verdicts(tables.DIGITS, made_up(**{"RigL, 95 %": row([*STATIC[:4], 1.0])}))
    assert not lucky["RigL"].holds
    worse = verdicts(tables.DIGITS, made_up(**{"SET, 95 %": row(STATIC - 0.01)}))
    assert not worse["SET"].holds
    assert worse["SET"].ours > 0.5


def test_efficiency_and_slack_are_those_of_the_means():
    table = made_up()
    rigl = table.sel(row="RigL, 95 %")
    assert rigl["efficiency"] == pytest.approx(0.932)
    assert rigl["hard_efficiency"] == pytest.approx(1 / 0.068)
    assert rigl["slack_0"] == 1
    assert rigl["slack_half"] == 5
    perfect = made_up(**{"gradual, 95 %": row(np.ones(5))})
    assert perfect.sel(row="gradual, 95 %")["hard_efficiency"] == pytest.approx(718)
    assert perfect.sel(row="gradual, 95 %")["slack_0"] == 10


def test_what_is_left_is_counted_by_the_masks():
    params = {
        "conv": {"kernel": jnp.ones((10, 20)), "bias": jnp.ones(20)},
        "head": {"kernel": jnp.ones((20, 10))},
    }
    rigl = dataclasses.replace(digits.RIGL, exclude=("head/",))
    state = (rigl.make(optax.sgd(0.1), steps=10).init(params), ())
    found = experiment.count_left(*experiment.read_network(rigl, params, state))
    assert found == {"kept": 10 + 20 + 200, "size": 420, "sparsity": 0.95}
    dense = experiment.count_left(*experiment.read_network(None, params, ()))
    assert dense == {"kept": 420, "size": 420, "sparsity": 0.0}


def test_what_is_claimed_has_five_seeds_or_more_and_one_optimizer():
    tier = tables.DIGITS.tier("cpu")
    for method in tables.METHODS:
        assert len(tier.runs[f"{method}, 95 %"].seeds) >= 5
    assert not any(runs.tune for runs in tier.runs.values())
    variants = [v for file in (digits, pruning, views) for v in vars(file).values()]
    made = [v for v in variants if isinstance(v, experiment.Config)]
    # The decay of the weights is what soft thresholds have in place of a sparsity.
    plain = [dataclasses.replace(v.optimizer, weight_decay=0.0) for v in made]
    assert [v.optimizer for v in made if v.optimizer.weight_decay] == [
        views.soft_threshold.optimizer
    ]
    assert len({(o, v.model, v.train) for o, v in zip(plain, made, strict=True)}) == 1
