"""Dropping and growing while training: static masks, SET, RigL, SNFS, DSR."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks, keys, masks, trees
from hpcjax.core.method import take_extra_args
from hpcjax.optim.full_precision import check_real
from hpcjax.optim.sparsify import _masking, _rewiring, _scores, _stacks
from hpcjax.optim.sparsify._masking import MaskedState
from hpcjax.optim.sparsify._plan import find_stacked
from hpcjax.optim.sparsify._prune import choose_at, plan_of
from hpcjax.optim.sparsify._scores import Score
from hpcjax.optim.sparsify.config import DynamicOptions, PruneOptions
from hpcjax.optim.sparsify.distributions import exact
from hpcjax.optim.sparsify.schedules import OneShot

# (key, shape, dtype) -> weights
Fresh = Callable[[Any, Any, Any], jax.Array]


def dynamic(
    inner: optax.GradientTransformation,
    drop: str | Score = "magnitude",
    grow: str | Score | None = "gradient",
    fresh: Fresh | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Trains a network that is sparse from the start, and moves its weights.

    The first masks are random. Every `every` steps, but not in step 0 and not from step
    T on, a share f of each layer's active weights is dropped, those of the smallest
    `drop` scores, and as many inactive ones of the largest `grow` scores become active,
    at zero. In such a step the optimizer does nothing else; its moments of what was
    dropped or grown are zero afterwards. A weight that is dropped and grown again keeps
    its value. Expects averaged gradients, of all weights: inactive ones too.

    RigL is the default, SET is `grow="random", regrow=False, decay="constant"`, SNFS is
    `grow="momentum", redistribute="momentum"`, DSR is `grow="random", compare="all",
    redistribute="survivors"`, with an exact number in place of its adaptive threshold.

    Args:
      inner: the optimizer.
      drop: a score, see `prune`.
      grow: likewise; None for masks that never change.
      fresh: `(key, shape, dtype) -> weights` of what becomes active, such as
        `jax.nn.initializers.normal(0.01)`, as in SET; None for zeros.
      **options: the fields of `DynamicOptions`.

    Returns:
      A transform as that of `prune`.

    Raises:
      ConfigError: a value out of its range, or a regex that matches nothing.
      TypeError: at init, for complex or integer parameters.
      ValueError: at update, without `params`.

    References:
      Evci et al., Rigging the Lottery, ICML 2020, Algorithm 1; Mocanu et al., Nature
      Communications 2018 (SET); Dettmers and Zettlemoyer, 2019 (SNFS); Mostafa and
      Wang, ICML 2019 (DSR).

    Examples:
      >>> from hpcjax.optim.sparsify import get_masks
      >>> tx = dynamic(optax.sgd(0.1), steps=100, every=10)
      >>> params = {"kernel": jnp.ones((20, 20))}
      >>> int(get_masks(tx.init(params), params)["kernel"].sum())
      40
    """
    chosen = DynamicOptions.of(options, dynamic)
    rules = _find_rules(drop, drop if grow is None else grow)
    inner = take_extra_args(inner=inner)
    times, shares = change_table(chosen)
    if grow is None:
        times, shares = times[:0], shares[:0]

    def init(params):
        check_real(params)
        kept = _start(params, chosen)
        return MaskedState(
            _masking.store_masks(kept, chosen.packed),
            (),
            jnp.zeros((), jnp.int32),
            inner.init(params),
        )

    def update(updates, state, params=None, **extra_args):
        _masking.require_params(params)
        old = _masking.read_masks(state.masks, params)

        def change(number):
            share = jnp.asarray(shares)[number]
            left, new = _rewire(old, params, updates, state, share, rules, chosen)
            moments = _masking.reset_moments(inner, state.inner, left, params)
            # What is active again keeps its value, what is new its 0: weights off the
            # masks are 0 since the first step, and that changes no masks.
            born = jax.tree.map(jnp.zeros_like, updates)
            if fresh is not None:
                born = _draw(fresh, old, updates, state.count, chosen.seed)
            return new, _masking.mask_updates(new, born, params), moments

        def step(number):
            del number
            sparse = masks.apply(updates, old)
            made, moments = inner.update(sparse, state.inner, params, **extra_args)
            return old, _masking.mask_updates(old, made, params), moments

        if len(times):
            due, number = _masking.find_change(times, state.count)
            kept, made, moments = jax.lax.cond(due, change, step, number)
        else:
            kept, made, moments = step(0)
        stored = _masking.store_masks(kept, chosen.packed)
        count = optax.safe_increment(state.count)
        return made, MaskedState(stored, (), count, moments)

    return optax.GradientTransformationExtraArgs(init, update)


def begin(params: Any, chosen: DynamicOptions) -> Any:
    """Returns parameters that are zero where the first masks are."""
    return masks.apply(params, _start(params, chosen))


def sent(state: MaskedState, params: Any, times: tuple[int, ...]) -> Any:
    """Returns masks of the gradients that a step needs: all in one that moves them."""
    due = jnp.isin(state.count, jnp.asarray(times, jnp.int32))
    kept = _masking.read_masks(state.masks, params)
    return jax.tree.map(lambda mask: mask | due, kept)


def _draw(fresh: Fresh, old: Any, like: Any, count: Any, seed: int) -> Any:
    """Returns new weights where none were active, and zeros elsewhere."""
    key = keys.derive(jax.random.key(seed), "fresh", count)
    active = trees.flatten(old)
    drawn = {
        path: jnp.where(
            active[path], 0, fresh(keys.derive(key, path), leaf.shape, leaf.dtype)
        )
        for path, leaf in trees.flatten(like).items()
        if active[path].ndim
    }
    rest = {path: jnp.zeros_like(leaf) for path, leaf in trees.flatten(like).items()}
    return trees.unflatten(like, rest | drawn)


def _rewire(
    kept: Any,
    params: Any,
    grads: Any,
    state: MaskedState,
    share: jax.Array,
    rules: tuple[Score, ...],
    chosen: DynamicOptions,
) -> tuple[Any, Any]:
    """Returns the masks of what is not dropped, and of what is active then."""
    active = {path: mask for path, mask in trees.flatten(kept).items() if mask.ndim}
    stacks = find_stacked(params, chosen.stacked)

    def parts(tree: Any) -> dict[str, jax.Array]:
        leaves = trees.flatten(tree)
        return _stacks.split({path: leaves[path] for path in active}, stacks)

    key = keys.derive(jax.random.key(chosen.seed), "rewire", state.count)
    drop, grow = (
        parts(rule(params, grads, state.inner, keys.derive(key, name)))
        for rule, name in zip(rules, ("drop", "grow"), strict=True)
    )
    momenta = None
    if chosen.redistribute == "momentum":
        momenta = parts(_scores.momentum_score(params, grads, state.inner, key))
    found = _rewiring.rewire(
        parts(kept), parts(params), drop, grow, momenta, share, chosen
    )
    left, new = (
        _masking.fill_masks(params, _stacks.join(own, active, stacks)) for own in found
    )
    return left, new


def change_table(chosen: DynamicOptions) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps that change masks, and the share that each of them drops.

    Examples:
      >>> change_table(DynamicOptions(steps=400, every=100))[0].tolist()
      [100, 200]
    """
    # In fractions: as floats, 0.55 · 100 is above 55, and step 55 would be before T.
    end = exact(chosen.until) * chosen.steps
    times = np.arange(chosen.every, math.ceil(end), chosen.every, dtype=np.int32)
    if chosen.decay == "constant":
        return times, np.full(len(times), chosen.fraction, np.float32)
    shares = chosen.fraction / 2 * (1 + np.cos(np.pi * times / float(end)))
    return times, shares.astype(np.float32)


def _find_rules(*names: str | Score) -> tuple[Score, ...]:
    """Returns scores of the present weights; sums would be of weights that are gone."""
    rules = [_scores.find_score(name) for name in names]
    present = [rule for rule in rules if not isinstance(rule, _scores.Accumulated)]
    checks.require(
        len(present) == len(rules),
        "drop and grow must be no sums over steps",
        got=names,
    )
    return tuple(present)


def _start(params: Any, chosen: DynamicOptions) -> Any:
    """Returns random masks, of the counts of a plan that changes nothing later."""
    fields = "distribution", "include", "exclude", "stacked"
    once = PruneOptions(
        schedule=OneShot(), **{name: getattr(chosen, name) for name in fields}
    )
    key = keys.derive(jax.random.key(chosen.seed), "start")
    draws = _scores.random_score(params, None, None, key)
    return choose_at(draws, plan_of(params, once), 0, params, once)
