"""Pruning at once: of a trained network, or of one at its initialisation."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.core import checks, masks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.optim.sparsify import _masking
from hpcjax.optim.sparsify._prune import choose_at, plan_of
from hpcjax.optim.sparsify.config import PruneOptions
from hpcjax.optim.sparsify.schedules import Exponential, OneShot

Loss = Callable[[Any, Any], jax.Array]


class LayerCollapseWarning(UserWarning):
    """Scores would remove all of a layer, of which the best unit is kept then."""


def one_shot(params: Any, scores: Any, *, strict: bool = False, **options: Any) -> Any:
    """Returns masks of the units of the largest scores.

    Args:
      params: a tree of arrays.
      scores: a tree like it; None is enough for what is not pruned.
      strict: whether a layer of which scores would keep nothing is an error.
      **options: `structure`, `distribution`, `include`, `exclude` and `stacked` of
        `PruneOptions`.

    Raises:
      ConfigError: scores that are no numbers or no tree like the parameters, or, if
        strict, a layer that they empty; see `prune` for others.

    Examples:
      >>> from hpcjax.optim.sparsify import Uniform
      >>> params = {"kernel": jnp.array([[1.0, -4.0], [3.0, 0.5]])}
      >>> half = Uniform(sparsity=0.5)
      >>> one_shot(params, jax.tree.map(jnp.abs, params), distribution=half)["kernel"]
      Array([[False,  True],
             [ True, False]], dtype=bool)
    """
    chosen = PruneOptions.of({**options, "schedule": OneShot()}, one_shot)
    _check_scores(scores, params, chosen)
    return _keep(params, scores, 0, chosen, strict)


def at_init(
    score: Callable[[Any], Any],
    params: Any,
    *,
    rounds: int = 1,
    strict: bool = False,
    **options: Any,
) -> Any:
    """Returns masks found in several rounds, of which each removes the same share.

    Args:
      score: `params -> scores`, of parameters that are zero where they are pruned, such
        as `lambda params: snip(loss, params, batch)`.
      params: at their initialisation.
      rounds: 1 for SNIP and GraSP, 100 for SynFlow.
      strict: see `one_shot`.
      **options: see `one_shot`.

    References:
      Tanaka et al., Pruning neural networks without any data by iteratively conserving
      synaptic flow, NeurIPS 2020, Algorithm 1.
    """
    gradual = Exponential(updates=rounds, every=1)
    chosen = PruneOptions.of({**options, "schedule": gradual}, at_init)
    rate = jax.jit(score)
    kept = jax.tree.map(lambda _: None, params)
    for number in range(1, rounds + 1):
        scores = rate(masks.apply(params, kept) if number > 1 else params)
        _check_scores(scores, params, chosen)
        if number > 1:
            # What is pruned stays so, whatever the scores of others are.
            scores = masks.map_masks(
                lambda mask, s: s if mask is None else jnp.where(mask, s, -jnp.inf),
                kept,
                scores,
            )
        last = number == rounds
        kept = _keep(params, scores, number, chosen, strict, warn=last)
    return kept


def snip(loss: Loss, params: Any, batch: Any) -> Any:
    """Returns |g·w| / Σ|g·w|, with the gradient of one batch.

    Args:
      loss: `(params, batch) -> loss`.
      params: at their initialisation.
      batch: of ten examples or more of each class.

    References:
      Lee et al., SNIP, ICLR 2019, eq. 6.

    Examples:
      >>> loss = lambda params, batch: (batch * params["w"]).sum()
      >>> snip(loss, {"w": jnp.array([3.0, -1.0])}, 2.0)["w"].tolist()
      [0.75, 0.25]
    """
    grads = jax.grad(loss)(params, batch)
    products = jax.tree.map(lambda w, g: jnp.abs(w * g), params, grads)
    total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(products))
    return jax.tree.map(lambda leaf: leaf / total, products)


def grasp(loss: Loss, params: Any, batch: Any) -> Any:
    """Returns w·Hg, of which the largest are kept: they preserve the gradient's norm.

    The paper's score is −w·Hg, of which it removes the largest. Its loss is of logits
    divided by 200.

    References:
      Wang et al., Picking Winning Tickets Before Training by Preserving Gradient Flow,
      ICLR 2020, eq. 8.

    Examples:
      >>> loss = lambda params, batch: batch * (params["w"] ** 2).sum() / 2
      >>> grasp(loss, {"w": jnp.array([3.0, -1.0])}, 2.0)["w"].tolist()
      [36.0, 4.0]
    """

    def gradient(params):
        return jax.grad(loss)(params, batch)

    grads = gradient(params)
    _, curved = jax.jvp(gradient, (params,), (grads,))
    return jax.tree.map(lambda w, h: w * h, params, curved)


def synflow(apply: Callable[[Any, Any], jax.Array], params: Any, inputs: Any) -> Any:
    """Returns w·∂R/∂w of R = 1ᵀ Π|W| 1: how much flows through a weight; no data.

    Args:
      apply: `(params, inputs) -> outputs`, without norms and other than ReLU-like
        activations.
      params: at their initialisation.
      inputs: an array of the shape of one input, whose values do not matter.

    References:
      Tanaka et al., NeurIPS 2020, §6.

    Examples:
      >>> apply = lambda params, inputs: inputs @ params["w"]
      >>> synflow(apply, {"w": jnp.array([[-3.0], [2.0]])}, jnp.zeros(2))["w"].tolist()
      [[3.0], [2.0]]
    """
    positive = jax.tree.map(jnp.abs, params)

    def flow(params):
        return jnp.sum(apply(params, jnp.ones_like(inputs)))

    return jax.tree.map(lambda w, g: w * g, positive, jax.grad(flow)(positive))


def _check_scores(scores: Any, params: Any, chosen: PruneOptions) -> None:
    """Raises ConfigError unless scores are numbers, one for each weight to prune."""
    leaves, given = trees.flatten(params), trees.flatten(scores)
    wanted = {path for path, prunes in plan_of(params, chosen).pruned.items() if prunes}
    odd = [
        path
        for path in sorted(wanted | given.keys())
        if path not in given.keys() & leaves.keys()
        or given[path].shape != leaves[path].shape
    ]
    rule = "scores must be a tree of arrays like the parameters to prune"
    checks.require(not odd, rule, differing=odd)
    masks.check_scores(scores)


def _keep(
    params: Any,
    scores: Any,
    number: int,
    chosen: PruneOptions,
    strict: bool,
    warn: bool = True,
) -> Any:
    """Returns the masks from change `number` of a plan on."""
    free = _choose(params, scores, number, chosen, 0)
    kept = _masking.hide_unpruned(free)
    empty = [path for path, n in masks.count_true(kept).items() if not int(n)]
    if not empty:
        return kept
    message = f"scores keep nothing of {empty}"
    if strict:
        raise ConfigError(message)
    if warn:
        warnings.warn(message, LayerCollapseWarning, stacklevel=3)
    return _masking.hide_unpruned(_choose(params, scores, number, chosen, 1))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _choose(
    params: Any, scores: Any, number: Any, chosen: PruneOptions, at_least: int
) -> Any:
    plan = plan_of(params, chosen)
    return choose_at(scores, plan, number, params, chosen, at_least)
