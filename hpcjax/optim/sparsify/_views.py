"""Methods in which the network sees other weights than the optimizer holds.

Each returns a `Viewed`: what is trained, the weights made of it for a forward pass, a
penalty to add to the loss, and the masks it arrives at. `view` is differentiated along
with the network.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from hpcjax.core import checks, masks, trees
from hpcjax.core.method import take_extra_args
from hpcjax.core.patterns import matches_any
from hpcjax.optim.sparsify import _masking
from hpcjax.optim.sparsify._masking import mask_tree
from hpcjax.optim.sparsify._plan import choose_pruned
from hpcjax.optim.sparsify._prune import choose_at, plan_of
from hpcjax.optim.sparsify.config import PruneOptions
from hpcjax.optim.sparsify.distributions import Uniform
from hpcjax.optim.sparsify.schedules import OneShot


class Viewed(NamedTuple):
    """A method in which the network sees other weights than are trained.

    Attributes:
      tx: the optimizer of what is trained.
      start: `params -> trained`.
      view: `(trained, key) -> params` of a forward pass; None as key for evaluation.
      penalty: `trained -> scalar`, to be added to the loss.
      masks: `trained -> masks`.
      beside: the key of what is learned beside `trained["weights"]`; "" if `trained` is
        a tree like the parameters.
    """

    tx: optax.GradientTransformationExtraArgs
    start: Callable[[Any], Any]
    view: Callable[..., Any]
    penalty: Callable[[Any], jax.Array]
    masks: Callable[[Any], Any]
    beside: str = ""


def ste(
    inner: optax.GradientTransformation, decay: float = 0.0, **options: Any
) -> Viewed:
    """Sees only the largest weights, and trains all by the gradients of these.

    Forward m⊙w, backward as if the view were w. SR-STE adds λ(1 − m)⊙w to the gradient,
    which keeps the weights that are not seen small, so that masks settle.

    Args:
      inner: the optimizer.
      decay: λ; 2e-4 in SR-STE.
      **options: all fields of `PruneOptions` that say what is pruned.

    Raises:
      ConfigError: a decay below zero.

    References:
      Zhou et al., Learning N:M Fine-grained Structured Sparse Neural Networks From
      Scratch, ICLR 2021, eq. 9.

    Examples:
      >>> from hpcjax.optim.sparsify import Uniform
      >>> half = ste(optax.sgd(0.1), distribution=Uniform(sparsity=0.5))
      >>> params = {"kernel": jnp.array([[1.0, -2.0]])}
      >>> half.view(params)["kernel"].tolist()
      [[0.0, -2.0]]
      >>> jax.grad(lambda p: half.view(p)["kernel"].sum())(params)["kernel"].tolist()
      [[1.0, 1.0]]
    """
    checks.require_finite(0, decay=decay)
    kept = _by_magnitude(options, ste)

    def view(trained: Any, key: Any = None) -> Any:
        del key
        return masks.map_masks(_straight_through, kept(trained), trained)

    def shrink(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        del extra
        _masking.require_params(params)

        def add(mask: Any, update: Any, weights: Any) -> Any:
            if mask is None:
                return update
            return update + decay * jnp.where(mask, 0, weights).astype(update.dtype)

        return masks.map_masks(add, kept(params), updates, params), state

    link = optax.GradientTransformationExtraArgs(optax.init_empty_state, shrink)
    tx = optax.chain(link, take_extra_args(inner=inner))
    return Viewed(tx, _same, view, no_penalty, kept)


def topkast(
    inner: optax.GradientTransformation,
    forward: float = 0.9,
    backward: float = 0.8,
    decay: float = 1e-4,
    **options: Any,
) -> Viewed:
    """Sees the largest weights A, and trains these and some more, B ⊃ A.

    Weights outside of B have no gradient and are not changed. The gradient of
    λ/2·(‖A‖² + ‖B∖A‖²/D) is added, with the density D of A.

    Args:
      inner: the optimizer.
      forward: sparsity of A in each parameter, 1 − D.
      backward: that of B.
      decay: λ.
      **options: `include`, `exclude` and `stacked` of `PruneOptions`.

    Raises:
      ConfigError: B is sparser than A, or a value out of its range.

    References:
      Jayakumar et al., Top-KAST: Top-K Always Sparse Training, NeurIPS 2020, §2.
    """
    rule = "backward must be at most forward, and forward below 1"
    checks.require(
        0 <= backward <= forward < 1, rule, forward=forward, backward=backward
    )
    checks.require_finite(0, decay=decay)
    seen = _by_magnitude(
        {**options, "distribution": Uniform(sparsity=forward)}, topkast
    )
    moved = _by_magnitude(
        {**options, "distribution": Uniform(sparsity=backward)}, topkast
    )

    def view(trained: Any, key: Any = None) -> Any:
        del key

        def see(a: Any, b: Any, weights: Any) -> Any:
            if a is None:
                return weights
            held = jnp.where(b, weights, jax.lax.stop_gradient(weights))
            return held + jax.lax.stop_gradient(jnp.where(a, weights, 0) - weights)

        return masks.map_masks(see, seen(trained), moved(trained), trained)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        _masking.require_params(params)
        small, large = seen(params), moved(params)

        def pull(a: Any, b: Any, gradient: Any, weights: Any) -> Any:
            if a is None:
                return gradient
            rate = jnp.where(a, decay, decay / (1 - forward)).astype(gradient.dtype)
            return jnp.where(b, gradient + rate * weights.astype(gradient.dtype), 0)

        pulled = masks.map_masks(pull, small, large, updates, params)
        made, state = chained.update(pulled, state, params, **extra)
        return masks.apply(made, large), state

    chained = take_extra_args(inner=inner)
    tx = optax.GradientTransformationExtraArgs(chained.init, update)
    return Viewed(tx, _same, view, no_penalty, seen)


def movement(inner: optax.GradientTransformation, **options: Any) -> Viewed:
    """Learns scores S of weights beside these, and sees those of the largest scores.

    Forward m(S)⊙w; S has the gradient g·w, as if m were S, and w that of m⊙w.

    Args:
      inner: the optimizer of both.
      **options: all fields of `PruneOptions` that say what is pruned.

    References:
      Sanh et al., Movement Pruning, NeurIPS 2020, §4.
    """
    chosen = PruneOptions.of({"schedule": OneShot(), **options}, movement)

    def start(params: Any) -> Any:
        return pair(params, "scores", jnp.zeros_like, chosen)

    def kept(trained: Any) -> Any:
        params = trained["weights"]
        scores = {path: jnp.zeros(()) for path in trees.flatten(params)}
        return _choose(params, scores | trained["scores"], chosen)

    def view(trained: Any, key: Any = None) -> Any:
        del key
        found = trees.flatten(kept(trained))

        def see(path: str, weights: Array, scores: Array) -> Array:
            gate = jnp.where(found[path], 1, 0).astype(weights.dtype)
            # This difference is exactly 0: the gate is not rounded by large scores.
            return weights * (gate + (scores - jax.lax.stop_gradient(scores)))

        return see_beside(trained, "scores", see)

    tx = take_extra_args(inner=inner)
    return Viewed(tx, start, view, no_penalty, kept, "scores")


def soft_threshold(
    inner: optax.GradientTransformation,
    start_at: float = -5.0,
    **options: Any,
) -> Viewed:
    """Learns a threshold for each layer: w = sign(θ)·max(|θ| − σ(s), 0), STR.

    A parameter has one s, or one for each layer of a stack. How sparse it becomes
    depends on the weight decay of θ and s, which `inner` has.

    Args:
      inner: the optimizer of θ and s.
      start_at: the first s.
      **options: `include`, `exclude` and `stacked` of `PruneOptions`.

    Raises:
      ConfigError: `start_at` is not finite.

    References:
      Kusupati et al., Soft Threshold Weight Reparameterization for Learnable Sparsity,
      ICML 2020, eq. 4.
    """
    checks.require_finite(start_at=start_at)
    chosen = PruneOptions.of(options, soft_threshold)

    def start(params: Any) -> Any:
        trained = pair(params, "s", jnp.zeros_like, chosen)
        for path, like in trained["s"].items():
            layers = like.shape[:1] if matches_any(chosen.stacked, path) else ()
            trained["s"][path] = jnp.full(layers, start_at, like.dtype)
        return trained

    def view(trained: Any, key: Any = None) -> Any:
        del key

        def see(_: str, weights: Array, s: Array) -> Array:
            each = s.reshape(*s.shape, *[1] * (weights.ndim - s.ndim))
            over = jax.nn.relu(jnp.abs(weights) - jax.nn.sigmoid(each))
            return jnp.sign(weights) * over

        return see_beside(trained, "s", see)

    def kept(trained: Any) -> Any:
        seen = trees.flatten(view(trained))
        return mask_tree(
            trained["weights"], {path: seen[path] != 0 for path in trained["s"]}
        )

    tx = take_extra_args(inner=inner)
    return Viewed(tx, start, view, no_penalty, kept, "s")


def powerprop(
    inner: optax.GradientTransformation, power: float = 2.0, **options: Any
) -> Viewed:
    """Sees w = θ|θ|^(a−1), in which small weights move little, and so stay small.

    Args:
      inner: the optimizer of θ.
      power: a.
      **options: of what `masks` keeps by magnitude, see `ste`.

    References:
      Schwarz et al., Powerpropagation, NeurIPS 2021, eq. 1.

    Examples:
      >>> squared = powerprop(optax.sgd(0.1))
      >>> trained = squared.start({"kernel": jnp.array([[4.0, -9.0]])})
      >>> squared.view(trained)["kernel"].tolist()
      [[4.0, -9.0]]
    """
    checks.require(power >= 1, "power must be at least 1", power=power)
    chosen = PruneOptions.of({"schedule": OneShot(), **options}, powerprop)

    def bend(params: Any, exponent: float) -> Any:
        pruned = choose_pruned(params, chosen.include, chosen.exclude, chosen.stacked)
        bent = {
            path: jnp.sign(w) * jnp.abs(w) ** exponent if pruned[path] else w
            for path, w in trees.flatten(params).items()
        }
        return trees.unflatten(params, bent)

    def start(params: Any) -> Any:
        return bend(params, 1 / power)

    def view(trained: Any, key: Any = None) -> Any:
        del key
        return bend(trained, power)

    kept = _by_magnitude(options, powerprop)
    return Viewed(take_extra_args(inner=inner), start, view, no_penalty, kept)


def _straight_through(mask: Any, weights: Any) -> Any:
    if mask is None:
        return weights
    return weights + jax.lax.stop_gradient(jnp.where(mask, weights, 0) - weights)


def _by_magnitude(
    options: dict[str, Any], function: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Returns a function of parameters to the masks of their largest magnitudes."""
    chosen = PruneOptions.of({"schedule": OneShot(), **options}, function)

    def kept(params: Any) -> Any:
        sizes = {path: jnp.abs(leaf) for path, leaf in trees.flatten(params).items()}
        return _choose(params, sizes, chosen)

    return kept


def _choose(params: Any, scores: dict[str, Array], chosen: PruneOptions) -> Any:
    found = choose_at(
        jax.lax.stop_gradient(scores), plan_of(params, chosen), 0, params, chosen
    )
    return _masking.hide_unpruned(found)


def pair(
    params: Any, name: str, make: Callable[[Any], Any], chosen: PruneOptions
) -> Any:
    """Returns the weights and, by path, what is learned beside those to prune."""
    pruned = choose_pruned(params, chosen.include, chosen.exclude, chosen.stacked)
    leaves = trees.flatten(params)
    beside = {path: make(leaves[path]) for path in leaves if pruned[path]}
    return {"weights": params, name: beside}


def see_beside(trained: Any, name: str, see: Callable[[str, Any, Any], Any]) -> Any:
    """Returns the weights, where something is learned beside them made of both."""
    beside = trained[name]
    seen = {
        path: see(path, leaf, beside[path]) if path in beside else leaf
        for path, leaf in trees.flatten(trained["weights"]).items()
    }
    return trees.unflatten(trained["weights"], seen)


def _same(params: Any) -> Any:
    return params


def no_penalty(trained: Any) -> jax.Array:
    """Returns 0."""
    del trained
    return jnp.zeros(())
