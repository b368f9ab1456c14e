"""K-FAC on part of a model: what `optax.masked` takes out is not in the plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax.core import ConfigError
from hpcjax.optim import kfac
from tests.optim.kfac import problems

OPTIONS = {"damping": 0.1, "kl_clip": None, "factor_decay": 0.5}


@pytest.fixture(scope="module")
def problem():
    """Model, plan, parameters, gradients and statistics of one batch of eight."""
    model, (x, y) = problems.mlp(), problems.batch(8)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    found = problems.differentiated(chosen, model, params, x, y)
    return model, chosen, params, found.grads, found.statistics


def labels(params, rule):
    return jax.tree.map_with_path(
        lambda path, _: "kfac" if rule(jax.tree_util.keystr(path)) else "rest", params
    )


def step(tx, problem):
    _, _, params, grads, statistics = problem
    state = tx.init(params)
    return tx.update(grads, state, params, taps=statistics, loss_terms=8)


def by_solving(grad, a, g):
    """(A⊗G + γI)⁻¹ of a matrix, in float64, with factors half way from identities."""
    a, g = (0.5 * np.eye(len(f)) + 0.5 * np.asarray(f, np.float64) for f in (a, g))
    curvature = np.kron(a, g) + 0.1 * np.eye(len(a) * len(g))
    return np.linalg.solve(curvature, np.ravel(grad)).reshape(np.shape(grad))


@pytest.mark.slow
@pytest.mark.parametrize("skip", [kfac.SKIP, (*kfac.SKIP, "^head")])
def test_layers_of_a_part_are_preconditioned_as_in_the_whole(problem, skip):
    """Whether or not a rule of skip names what the partition leaves out."""
    model, chosen, params, grads, _ = problem
    whole, _ = step(kfac.scale_by_kfac(chosen, **OPTIONS), problem)
    part = kfac.scale_by_kfac(kfac.plan(model, skip=skip), **OPTIONS)
    own = labels(params, lambda path: "head" not in path)
    tx = optax.partition({"kfac": part, "rest": optax.scale(2.0)}, own)
    found, _ = step(tx, problem)
    for layer in ("dense_0", "dense_1"):
        jax.tree.map(np.testing.assert_array_equal, found[layer], whole[layer])
    doubled = jax.tree.map(lambda g: 2 * g, grads["head"])
    jax.tree.map(np.testing.assert_array_equal, found["head"], doubled)


def test_a_kernel_without_its_bias_has_the_block_of_the_kernel(problem):
    _, chosen, params, grads, statistics = problem
    kernels = labels(params, lambda path: "kernel" in path)
    transforms = {
        "kfac": kfac.scale_by_kfac(chosen, g_scale="mean_loss", **OPTIONS),
        "rest": optax.identity(),
    }
    found, _ = step(optax.partition(transforms, kernels), problem)
    for path, seen in statistics.items():
        grad = grads[path]["kernel"]
        expected = by_solving(grad, seen["a"][:-1, :-1], seen["g"])
        np.testing.assert_allclose(
            found[path]["kernel"], expected, rtol=2e-4, atol=2e-5 * np.abs(grad).max()
        )
        np.testing.assert_array_equal(found[path]["bias"], grads[path]["bias"])


def test_a_bias_without_its_kernel_is_refused(problem):
    _, chosen, params, _, _ = problem
    biases = jax.tree.map(lambda p: p.ndim == 1, params)
    tx = optax.masked(kfac.scale_by_kfac(chosen), biases)
    with pytest.raises(ConfigError, match=r"masked out: \['dense_0/bias'"):
        tx.init(params)


def test_parameters_of_the_part_in_no_block_are_still_named(problem):
    model, _, params, _, _ = problem
    chosen = kfac.plan(model, skip=(*kfac.SKIP, "^head$"))
    rest = labels(params, lambda path: "dense_0" not in path)
    transforms = {"kfac": kfac.scale_by_kfac(chosen), "rest": optax.identity()}
    with pytest.raises(ConfigError, match=r"no rule of skip: \['head/bias', 'head/k"):
        optax.partition(transforms, rest).init(params)


@pytest.mark.parametrize("distributed", [False, True])
def test_without_layers_gradients_pass(problem, distributed):
    _, chosen, params, grads, _ = problem
    grid = kfac.Distribution(2, 0.5) if distributed else None
    tx = optax.masked(
        kfac.scale_by_kfac(chosen, distribution=grid),
        jax.tree.map(lambda _: False, params),
    )
    found, _ = step(tx, problem)
    jax.tree.map(np.testing.assert_array_equal, found, grads)


def test_huge_gradients_are_clipped_and_not_lost(problem):
    """The clip makes the step as long whatever the gradient's scale."""
    _, chosen, params, grads, statistics = problem
    tx = kfac.scale_by_kfac(chosen, learning_rate=1.0, kl_clip=1e-3)

    def updates(scale):
        scaled = jax.tree.map(lambda g: scale * g, grads)
        return tx.update(
            scaled, tx.init(params), params, taps=statistics, loss_terms=8
        )[0]

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8),
        updates(jnp.float32(2.0**60)),
        updates(jnp.float32(2.0**10)),
    )
