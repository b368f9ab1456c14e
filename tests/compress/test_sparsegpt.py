"""SparseGPT against elimination in numpy, magnitude pruning and Wanda."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress
from hpcjax.compress import PruneOptions
from hpcjax.core import ConfigError
from tests.compress.test_gptq import problem


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def prune(kernel, hessian, **options):
    return compress.prune(
        jnp.asarray(kernel), jnp.asarray(hessian), PruneOptions(**options)
    )


def by_elimination(kernel, hessian, kept, damping=0.01, choose=None):
    """Sets what is not kept to zero, input after input, with the whole inverse.

    `choose(i, weights, inverse)` may change `kept` when input i is reached.
    """
    inputs = len(kernel)
    weights = kernel.copy()
    damped = hessian + damping * np.mean(np.diag(hessian)) * np.eye(inputs)
    inverse = np.linalg.inv(damped)
    values = np.zeros_like(kernel)
    for i in range(inputs):
        if choose is not None:
            choose(i, weights, inverse)
        values[i] = np.where(kept[i], weights[i], 0)
        error = (weights[i] - values[i]) / inverse[i, i]
        weights = weights - inverse[:, i : i + 1] * error
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, :], inverse[:, i] = 0, 0
    off = kernel - values
    return values, np.trace(off.T @ damped @ off) / 2


@pytest.mark.parametrize("block", [5, 24, 128])
@pytest.mark.parametrize("pattern", [None, (2, 4), (1, 3)])
def test_values_are_those_of_eliminating_one_after_another(block, pattern):
    kernel, hessian = problem(seed=3)
    found = prune(kernel, hessian, block=block, pattern=pattern, sparsity=0.4)
    values, loss = by_elimination(kernel, hessian, np.asarray(found.kept))
    np.testing.assert_allclose(found.kernel, values, atol=1e-10)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-9)


@pytest.mark.parametrize("pattern", [None, (1, 3)])
def test_inputs_that_were_always_zero_are_dropped(pattern):
    kernel, hessian = problem(seed=8)
    dead = [0, 9, 23]
    hessian[dead], hessian[:, dead] = 0, 0
    found = prune(kernel, hessian, pattern=pattern, sparsity=0.1)
    kernel[dead], hessian[dead, dead] = 0, 1
    values, loss = by_elimination(kernel, hessian, np.asarray(found.kept))
    np.testing.assert_allclose(found.kernel, values, atol=1e-10)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-9)


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_what_goes_is_chosen_by_what_the_weights_have_become(pattern):
    kernel, hessian = problem(seed=6)
    found = prune(kernel, hessian, block=8, pattern=pattern)
    damped = hessian + 0.01 * np.mean(np.diag(hessian)) * np.eye(24)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    kept, size = np.ones(kernel.shape, bool), 4 if pattern else 8

    def choose(place, weights, _):
        if place % size:
            return
        rows = slice(place, place + size)
        score = weights[rows] ** 2 / np.diag(upper)[rows, None] ** 2
        flat = None if pattern is None else 0
        kept[rows] = score > np.median(score, axis=flat)

    by_elimination(kernel, hessian, kept, choose=choose)
    np.testing.assert_array_equal(found.kept, kept)


@pytest.mark.parametrize("block", [5, 24])
def test_the_share_of_every_block(block):
    kernel, hessian = problem(seed=4)
    kept = np.asarray(prune(kernel, hessian, block=block, sparsity=0.4).kept)
    for start in range(0, 24, block):
        part = kept[start : start + block]
        assert (~part).sum() == np.round(0.4 * part.size)


def test_a_pattern_holds_for_every_output():
    kernel, hessian = problem(seed=5)
    kept = np.asarray(prune(kernel, hessian, pattern=(2, 4), block=10).kept)
    assert ((~kept).reshape(6, 4, -1).sum(1) == 2).all()


@pytest.mark.acceptance("sparsity", 9)
def test_with_an_identity_the_least_weights_go_and_the_rest_stays():
    kernel, _ = problem(seed=6)
    found = prune(kernel, np.eye(24))
    least = np.sort(np.abs(kernel).ravel())[kernel.size // 2]
    expected = np.where(np.abs(kernel) >= least, kernel, 0)
    np.testing.assert_array_equal(found.kernel, expected)


@pytest.mark.acceptance("sparsity", 9)
def test_keeping_everything_changes_nothing():
    kernel, hessian = problem(seed=7)
    found = prune(kernel, hessian, sparsity=0.0)
    np.testing.assert_array_equal(found.kernel, kernel)
    assert found.loss == 0


@pytest.mark.quick("1", "2", "4")
@pytest.mark.acceptance("sparsity", 9)
@pytest.mark.parametrize("seed", range(5))
def test_on_correlated_inputs_it_beats_magnitude_and_wanda(seed):
    kernel, hessian = problem(256, 32, seed=seed, samples=400)

    def lost(values):
        off = kernel - np.asarray(values)
        return np.trace(off.T @ hessian @ off)

    def largest(score):
        return np.where(score >= np.median(score), kernel, 0)

    def largest_by_output(score):
        return np.where(score >= np.median(score, axis=0), kernel, 0)

    ours = lost(prune(kernel, hessian).kernel)
    norms = np.sqrt(np.diag(hessian))[:, None]
    assert ours < lost(largest(np.abs(kernel)))
    assert ours < lost(largest_by_output(np.abs(kernel) * norms))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"pattern": (4, 4)}, r"pattern=\(4, 4\)"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"block": 0}, "block=0"),
        ({"pattern": (2, 5)}, r"divide the inputs: got pattern=\(2, 5\), inputs=24"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options, message):
    kernel, hessian = problem()
    with pytest.raises(ConfigError, match=message):
        prune(kernel, hessian, **options)


@pytest.mark.parametrize("pattern", [(1, 2, 3), (0.5, 2), [2, 4], 2])
def test_patterns_of_other_types_are_refused(pattern):
    wrong = PruneOptions()
    # The type checker of the tests would be first.
    object.__setattr__(wrong, "pattern", pattern)
    with pytest.raises(
        ConfigError, match=r"pattern(\[0\])? must be .*int.*: got pattern"
    ):
        wrong.__post_init__()
