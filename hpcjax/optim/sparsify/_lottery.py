"""Tickets: pruning a trained network and training what is left again from early on."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core import checks, masks, trees
from hpcjax.core.structures import Unstructured, count_kept
from hpcjax.optim.sparsify import _stacks
from hpcjax.optim.sparsify._masking import mask_tree
from hpcjax.optim.sparsify._prune import plan_of
from hpcjax.optim.sparsify.config import PruneOptions
from hpcjax.optim.sparsify.distributions import exact

# (params, masks, first step, last step or None for the end) -> params
Train = Callable[[Any, Any, int, int | None], Any]


class Ticket(NamedTuple):
    """A round of a lottery.

    Attributes:
      params: with which the round began, zero where it is pruned.
      masks: of the round.
      trained: what became of the parameters.
    """

    params: Any
    masks: Any
    trained: Any


def lottery(
    train: Train,
    params: Any,
    *,
    rounds: int,
    share: float = 0.2,
    rewind_step: int = 0,
    rewind: Literal["weights", "rate"] = "weights",
    **options: Any,
) -> list[Ticket]:
    """Trains, prunes the least weights of each layer, goes back, and trains again.

    Args:
      train: `(params, masks, start, stop) -> params` takes the steps from `start` on,
        up to `stop` or the end, and keeps pruned weights at 0.
      params: at their initialisation.
      rounds: times of pruning.
      share: of what is left, that a round removes: (1 − share)^r is left after r.
      rewind_step: k; what is left begins again at step k.
      rewind: whether it has its weights of step k then, or those it has reached and
        only the learning rate of step k.
      **options: `include`, `exclude` and `stacked` of `PruneOptions`.

    Returns:
      The dense network and the ticket of each round, the last one trained too.

    References:
      Frankle and Carbin, The Lottery Ticket Hypothesis, ICLR 2019; Renda, Frankle and
      Carbin, Comparing Rewinding and Fine-tuning, ICLR 2020.
    """
    checks.require_count(1, rounds=rounds)
    checks.require_count(0, rewind_step=rewind_step)
    checks.require(0 < share < 1, "share must be in (0, 1)", share=share)
    checks.require_choice("rewind", rewind, ("weights", "rate"))
    plan = plan_of(params, PruneOptions.of(options, lottery))
    kept = mask_tree(
        params,
        {
            path: jnp.ones(leaf.shape, bool)
            for path, leaf in trees.flatten(params).items()
            if plan.pruned[path]
        },
    )
    early = train(params, kept, 0, rewind_step) if rewind_step else params
    tickets = [Ticket(early, kept, train(early, kept, rewind_step, None))]
    for number in range(1, rounds + 1):
        reached = tickets[-1].trained
        sparsity = 1 - (1 - exact(share)) ** number
        kept = _prune_least(reached, kept, sparsity, plan.stacked)
        start = masks.apply(early if rewind == "weights" else reached, kept)
        tickets.append(Ticket(start, kept, train(start, kept, rewind_step, None)))
    return tickets


def mask_distance(one: Any, other: Any) -> float:
    """Returns the share of entries in which two trees of masks differ.

    Examples:
      >>> one, other = np.array([True, False]), np.array([True, True])
      >>> mask_distance({"w": one}, {"w": other})
      0.5
    """
    pairs = list(zip(*map(jax.tree.leaves, (one, other)), strict=True))
    differ = sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in pairs)
    return differ / max(1, sum(np.size(a) for a, _ in pairs))


def is_early_bird(
    history: Sequence[Any], window: int = 5, tolerance: float = 0.1
) -> bool:
    """Says whether the last masks differ so little that training may stop to prune.

    Args:
      history: masks, such as those of the largest scales of norms after each epoch.
      window: how many of the last are compared, each with each.
      tolerance: their largest distance stays below this.

    References:
      You et al., Drawing Early-Bird Tickets, ICLR 2020, §4.

    Examples:
      >>> steady = [{"w": np.array([True, False])}] * 5
      >>> is_early_bird(steady), is_early_bird(steady[:4])
      (True, False)
    """
    checks.require_count(2, window=window)
    last = list(history)[-window:]
    pairs = itertools.combinations(last, 2)
    return len(last) == window and all(mask_distance(*p) < tolerance for p in pairs)


def _prune_least(
    params: Any, kept: Any, sparsity: Fraction, stacked: frozenset[str]
) -> Any:
    """Returns masks within `kept` of the largest weights."""
    leaves, old = trees.flatten(params), trees.flatten(kept)
    scores = _stacks.split(
        {p: jnp.where(mask, jnp.abs(leaves[p]), -1) for p, mask in old.items()}, stacked
    )
    counts = {p: count_kept(leaf.size, sparsity) for p, leaf in scores.items()}
    found = masks.choose(Unstructured(), scores, counts)
    return mask_tree(params, _stacks.join(found, old, stacked))
