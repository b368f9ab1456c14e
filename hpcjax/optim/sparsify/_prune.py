"""Pruning on a schedule, as a transform around any optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from hpcjax.core import keys, masks, trees
from hpcjax.core.method import take_extra_args
from hpcjax.optim.full_precision import check_real
from hpcjax.optim.sparsify import _masking, _scores, _stacks
from hpcjax.optim.sparsify._masking import MaskedState
from hpcjax.optim.sparsify._plan import Plan, make_plan
from hpcjax.optim.sparsify._scores import Accumulated, Score
from hpcjax.optim.sparsify.config import PruneOptions
from hpcjax.optim.sparsify.distributions import Lamp


def prune(
    inner: optax.GradientTransformation,
    score: str | Score | Accumulated = "magnitude",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Prunes while an optimizer trains: masks follow a schedule.

    On the steps of the schedule the units of the largest scores are chosen to be kept;
    then, as in every step, the optimizer's updates u become m⊙u − (1 − m)⊙w, so that
    what is pruned is exactly zero. Nothing may scale updates after that: this is the
    outermost transform and wraps the others. Expects averaged gradients, of which all
    devices then make the same masks.

    Args:
      inner: the optimizer.
      score: a name of `SCORES`, a function `(params, grads, state, key) -> scores` with
        the state of `inner`, or an `Accumulated` score.
      **options: the fields of `PruneOptions`.

    Returns:
      A transform whose update needs `params`; `get_masks` finds the masks in its state.

    Raises:
      ConfigError: a value out of its range; at init, regexes that match nothing, or a
        parameter that the structure cannot divide.
      TypeError: at init, for complex or integer parameters.
      ValueError: at update, without `params`.

    References:
      Hoefler et al., Sparsity in Deep Learning, JMLR 2021; Zhu and Gupta, arXiv
      1710.01878, 2017.

    Examples:
      >>> from hpcjax.optim.sparsify import OneShot, Uniform
      >>> chosen = {"distribution": Uniform(sparsity=0.5), "schedule": OneShot()}
      >>> tx = prune(optax.sgd(0.5), include=("w",), **chosen)
      >>> params = {"w": jnp.array([1.0, -3.0, 2.0, 0.5])}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["w"].tolist()
      [0.0, -1.5, 1.0, 0.0]
    """
    chosen, ranked = PruneOptions.of(options, prune), _scores.find_score(score)
    inner = take_extra_args(inner=inner)

    def init(params):
        check_real(params)
        plan = plan_of(params, chosen)
        leaves = trees.flatten(params)
        kept = {
            path: jnp.ones(leaves[path].shape, bool)
            for path, pruned in plan.pruned.items()
            if pruned
        }
        full = _masking.fill_masks(params, kept)
        return MaskedState(
            _masking.store_masks(full, chosen.packed),
            _scores.start_memory(ranked, params),
            jnp.zeros((), jnp.int32),
            inner.init(params),
        )

    def update(updates, state, params=None, **extra_args):
        _masking.require_params(params)
        plan = plan_of(params, chosen)
        memory = _scores.remember(ranked, state.memory, params, updates)
        due, number = _masking.find_change(plan.steps, state.count)

        def change(old):
            del old
            key = keys.derive(jax.random.key(chosen.seed), "prune", state.count)
            scores = memory
            if not isinstance(ranked, Accumulated):
                scores = ranked(params, updates, state.inner, key)
            kept = choose_at(scores, plan, number, params, chosen)
            moments = state.inner
            if chosen.sparse_grads:
                moments = _masking.reset_moments(inner, moments, kept, params)
            return kept, moments

        old = _masking.read_masks(state.masks, params), state.inner
        kept, moments = jax.lax.cond(due, change, lambda old: old, old)
        if chosen.sparse_grads:
            updates = masks.apply(updates, kept)
        updates, moments = inner.update(updates, moments, params, **extra_args)
        stored = _masking.store_masks(kept, chosen.packed)
        count = optax.safe_increment(state.count)
        updates = _masking.mask_updates(kept, updates, params)
        return updates, MaskedState(stored, memory, count, moments)

    return optax.GradientTransformationExtraArgs(init, update)


def sent(state: MaskedState, params: Any, last: int) -> Any:
    """Returns masks of the gradients that a step needs: up to step `last` all."""
    kept = _masking.read_masks(state.masks, params)
    return jax.tree.map(lambda mask: mask | (state.count <= last), kept)


def plan_of(params: Any, chosen: PruneOptions) -> Plan:
    """Returns the plan for parameters."""
    return make_plan(
        params,
        structure=chosen.structure,
        distribution=chosen.distribution,
        schedule=chosen.schedule,
        include=chosen.include,
        exclude=chosen.exclude,
        stacked=chosen.stacked,
    )


def choose_at(
    scores: Any,
    plan: Plan,
    number: Any,
    params: Any,
    chosen: PruneOptions,
    at_least: int = 1,
) -> Any:
    """Returns the masks of a state from change `number` of the plan on."""
    leaves = trees.flatten(scores)
    pruned = {path: leaves[path] for path in leaves if plan.pruned[path]}
    if not pruned:
        return _masking.fill_masks(params, {})
    counts = jax.tree.map(lambda table: jnp.asarray(table)[number], plan.counts)
    rescale = _scores.lamp if isinstance(chosen.distribution, Lamp) else None
    kept = masks.choose(
        chosen.structure,
        _stacks.split(pruned, plan.stacked),
        counts,
        rescale,
        at_least=at_least,
    )
    joined = _stacks.join(kept, pruned, plan.stacked)
    return _masking.fill_masks(params, joined)
