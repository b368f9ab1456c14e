"""The running mean of gradients' norms, against NumPy and the published fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import optim


def run(tx, gradients):
    """Returns the norm of each update."""
    state, found = tx.init(gradients[0]), []
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(gradient, state)
        found.append(updates)
    return found


def smooth(gradients, momentum, eps, faulty=False):
    """The method in float64; with the published fault, the second term is lost."""
    mean, found = None, []
    for gradient in gradients:
        own = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in gradient))
        if mean is None:
            mean = own
        else:
            mean = momentum * mean + (0 if faulty else (1 - momentum) * own)
        found.append([leaf * mean / (own + eps) for leaf in gradient])
    return found


@pytest.mark.acceptance("mixsize", 3)
def test_updates_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    gradients = [
        [
            rng.normal(size=s).astype(np.float32) * 10 ** rng.normal()
            for s in (3, (2, 5))
        ]
        for _ in range(50)
    ]
    given = [list(map(jnp.asarray, each)) for each in gradients]
    found = run(optim.scale_by_smoothed_norm(0.8, 1e-3), given)
    for ours, theirs in zip(found, smooth(gradients, 0.8, 1e-3), strict=True):
        for one, two in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(
                one, two, rtol=1e-6, atol=1e-6 * np.abs(two).max()
            )


@pytest.mark.acceptance("mixsize", 3)
def test_norms_converge_and_do_not_decay():
    gradients = [jnp.array([0.6, 0.8]) * (10 if n % 2 else 1) for n in range(501)]
    found = [
        float(jnp.linalg.norm(u))
        for u in run(optim.scale_by_smoothed_norm(), gradients)
    ]
    # After a 1 and after a 10: N = 0.9 N' + 0.1, N' = 0.9 N + 1.
    low = (0.9 * 1 + 0.1) / (1 - 0.81)
    assert low == pytest.approx(5.2632, abs=1e-4)
    np.testing.assert_allclose(found[120:122], [low, 0.9 * low + 1], atol=1e-3)
    assert found[500] >= 0.5 * found[5]
    arrays = [[np.asarray(g)] for g in gradients]
    faulty = [np.linalg.norm(u[0]) for u in smooth(arrays, 0.9, 1e-6, faulty=True)]
    assert faulty[500] < 1e-20 * faulty[5]  # as published, training stops


def test_it_comes_before_clipping_and_decay():
    config = optim.SgdConfig(lr=1.0, momentum=0.0, smooth_norm=0.5, weight_decay=0.1)
    tx, params = config.make(9), jnp.array([3.0, 4.0])
    state = tx.init(params)
    _, state = tx.update(jnp.array([0.0, 2.0]), state, params)
    updates, state = tx.update(jnp.array([8.0, 0.0]), state, params)
    np.testing.assert_allclose(updates, [-5.3, -0.4], rtol=1e-5)
    plain = optim.SgdConfig(lr=1.0).make(9).init(params)
    assert jax.tree.structure(plain) == jax.tree.structure(state[1])
    clipped = optim.SgdConfig(lr=1.0, momentum=0.0, smooth_norm=0.5, clip_norm=1.0)
    updates, _ = clipped.make(9).update(params, clipped.make(9).init(params), params)
    np.testing.assert_allclose(jnp.linalg.norm(updates), 1, rtol=1e-5)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_no_gradient_gives_no_update(eps):
    found = run(
        optim.scale_by_smoothed_norm(eps=eps),
        [jnp.zeros(2), jnp.ones(2), jnp.zeros(2)],
    )
    assert np.isfinite(np.stack(found)).all()
    assert (found[0] == 0).all()
    assert (found[2] == 0).all()
    np.testing.assert_allclose(found[1], 0.1, rtol=1e-5)
