"""K-FAC in the training loop: statistics, grids of devices, checkpoints."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from hpcjax import core, models, optim, train
from hpcjax.core import ConfigError
from hpcjax.optim import SgdConfig, kfac
from hpcjax.optim.kfac import KfacConfig
from hpcjax.train.config import TrainConfig
from tests.train import tiny


def task(devices=1, **options):
    """The tiny task's data and model under K-FAC and momentum."""
    plain = tiny.task().replace(model=models.mlp((4,), 3, widths=(5,)))
    options = {"inv_update_steps": 3, **options}
    config = KfacConfig(base=SgdConfig(lr=0.05), **options)
    method = train.compose(
        plain.model, plain.dataset, config, batch_size=16, steps=10, devices=devices
    )
    return train.supervised(plain.model, method, plain.dataset)


def fit(task, devices, steps=8, **arguments):
    config = TrainConfig(steps=steps, batch_size=16, eval_every=4, stall_seconds=0.0)
    records = tiny.Records()
    state = train.fit(
        task, config, seed=0, mesh=task.mesh(devices), recorder=records, **arguments
    )
    return jax.device_get(state), records


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [None, 1 / 4])
def test_eight_devices_train_as_one(fraction):
    one, _ = fit(task(), 1)
    eight, _ = fit(task(8, grad_worker_fraction=fraction), 8)
    for left, right in zip(
        jax.tree.leaves(one.params), jax.tree.leaves(eight.params), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("fisher", "fraction"), [("true", None), ("exact", 1 / 4)])
def test_other_fisher_matrices_train_too(fisher, fraction):
    state, _ = fit(task(4, fisher=fisher, grad_worker_fraction=fraction), 4)
    empirical, _ = fit(task(4, grad_worker_fraction=fraction), 4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    different = jax.tree.map(
        lambda a, b: not np.array_equal(a, b), state.params, empirical.params
    )
    assert any(jax.tree.leaves(different))


@pytest.mark.slow
def test_a_run_on_a_grid_resumes_bit_by_bit(tmp_path):
    own = task(8, grad_worker_fraction=1 / 4)
    straight, _ = fit(own, 8)
    with train.Checkpoints(tmp_path, keep=2) as checkpoints:
        fit(own, 8, steps=4, checkpoints=checkpoints)
        resumed, _ = fit(own, 8, checkpoints=checkpoints)
    for left, right in zip(
        jax.tree.leaves(straight.opt_state),
        jax.tree.leaves(resumed.opt_state),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((8, 1 / 4), (8, 1.0)), ((8, 1.0), (8, 1 / 8)), ((8, 1.0), (2, 1.0))],
)
def test_a_run_goes_on_with_another_grid(before, after, tmp_path, monkeypatch):
    """In the middle of an interval, decompositions are made again: one device's run."""

    def on(devices, fraction, steps, **arguments):
        own = task(devices, grad_worker_fraction=fraction, inv_update_steps=100)
        return fit(own, devices, steps, **arguments)[0]

    with train.Checkpoints(tmp_path, keep=2) as checkpoints:
        on(*before, 4, checkpoints=checkpoints)
        moved = on(*after, 8, checkpoints=checkpoints)
    # The same, made again on one device of the factors at the fourth step.
    with train.Checkpoints(tmp_path / "one", keep=2) as checkpoints:
        on(1, 1.0, 4, checkpoints=checkpoints)
        lost = forgetting(train.Checkpoints.restore)
        monkeypatch.setattr(train.Checkpoints, "restore", lost)
        expected = on(1, 1.0, 8, checkpoints=checkpoints)
    for left, right in zip(
        jax.tree.leaves(moved.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)


def forgetting(restore):
    """Restores a state whose decompositions are lost."""

    def without(*arguments, **options):
        restored = restore(*arguments, **options)
        stripped = jax.tree.map(
            lambda s: kfac.without_decompositions(s) if _is_kfac(s) else s,
            restored.state.opt_state,
            is_leaf=_is_kfac,
        )
        state = dataclasses.replace(restored.state, opt_state=stripped)
        return restored._replace(state=state)

    return without


def test_only_steps_that_are_due_take_statistics():
    own = task(factor_update_steps=3)
    before, _ = fit(own, 1, steps=3)
    after, _ = fit(own, 1, steps=4)
    (first,), (second,) = (
        [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_kfac) if _is_kfac(s)]
        for state in (before, after)
    )
    old, new = (np.asarray(s.factors["head"]["a"]) for s in (first, second))
    assert bool(first.due)
    assert not bool(second.due)
    assert np.abs(old - new).max() > 1e-4
    single, _ = fit(own, 1, steps=2)
    (third,) = (
        s for s in jax.tree.leaves(single.opt_state, is_leaf=_is_kfac) if _is_kfac(s)
    )
    np.testing.assert_array_equal(third.factors["head"]["a"], old)


def _is_kfac(node):
    return isinstance(node, kfac.KfacState)


def test_a_state_that_is_no_kfac_is_refused():
    plain = task()
    observed = core.Optimization(optax.sgd(0.1), plain.method.gradients)
    other = plain.replace(method=optim.data_parallel(observed))
    with pytest.raises(ValueError, match="no state of K-FAC"):
        fit(other, 1)


@pytest.mark.slow
def test_quotients_need_factors_in_one_place():
    with pytest.raises(ConfigError, match="colocate_factors=True"):
        KfacConfig(colocate_factors=False)
    KfacConfig(colocate_factors=False, prediv=False)
