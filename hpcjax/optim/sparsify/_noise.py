"""Learned noise: weights that are there by chance, or that bear noise of their own."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from hpcjax.core import checks, keys, trees
from hpcjax.core.method import take_extra_args
from hpcjax.optim.sparsify._views import Viewed, mask_tree, pair, see_beside
from hpcjax.optim.sparsify.config import PruneOptions

# β, γ and ζ of hard-concrete gates; k₁, k₂ and k₃ of the divergence of dropout.
HARD_CONCRETE = 2 / 3, -0.1, 1.1
DIVERGENCE = 0.63576, 1.87320, 1.48695
LARGEST_LOG_ALPHA = 3.0


def l0(
    inner: optax.GradientTransformation,
    weight: float,
    start_at: float = 0.9,
    **options: Any,
) -> Viewed:
    """Learns the chance of each weight to be there, by hard-concrete gates.

    u ~ U(0, 1), s = σ((log u − log(1 − u) + log α)/β), z = clip(s(ζ − γ) + γ, 0, 1);
    the weight seen is z·w. In evaluation z = clip(σ(log α)(ζ − γ) + γ, 0, 1). The
    penalty is λ Σ P(z ≠ 0) = λ Σ σ(log α − β log(−γ/ζ)).

    Args:
      inner: the optimizer of weights and gates.
      weight: λ.
      start_at: the first chance of σ(log α).
      **options: `include`, `exclude` and `stacked` of `PruneOptions`.

    Raises:
      ConfigError: a value out of its range.

    References:
      Louizos, Welling and Kingma, Learning Sparse Neural Networks through L0
      Regularization, ICLR 2018, eqs. 10-13.
    """
    checks.require(0 < start_at < 1, "start_at must be in (0, 1)", start_at=start_at)
    checks.require_finite(0, weight=weight)
    chosen = PruneOptions.of(options, l0)
    logit = float(jnp.log(start_at / (1 - start_at)))

    def start(params: Any) -> Any:
        return pair(params, "log_alpha", lambda w: jnp.full_like(w, logit), chosen)

    def view(trained: Any, key: Any = None) -> Any:
        def see(path: str, weights: Array, log_alpha: Array) -> Array:
            own = None if key is None else keys.derive(key, path)
            return weights * hard_concrete(log_alpha, own)

        return see_beside(trained, "log_alpha", see)

    def penalty(trained: Any) -> Array:
        return weight * _sum_all(map(chance_of_gates, trained["log_alpha"].values()))

    def kept(trained: Any) -> Any:
        gates = {p: hard_concrete(a) > 0 for p, a in trained["log_alpha"].items()}
        return mask_tree(trained["weights"], gates)

    tx = take_extra_args(inner=inner)
    return Viewed(tx, start, view, penalty, kept, "log_alpha")


def hard_concrete(
    log_alpha: Float[Array, "*shape"], key: jax.Array | None = None
) -> Float[Array, "*shape"]:
    """Returns gates between 0 and 1, of which many are exactly either, see `l0`."""
    beta, gamma, zeta = HARD_CONCRETE
    # In half precision the tails of the noise, which open and close gates, are coarse.
    logit = log_alpha.astype(jnp.float32)
    if key is not None:
        logit = (jax.random.logistic(key, log_alpha.shape) + logit) / beta
    gates = jnp.clip(jax.nn.sigmoid(logit) * (zeta - gamma) + gamma, 0, 1)
    return gates.astype(log_alpha.dtype)


def chance_of_gates(log_alpha: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the chance that a gate is not 0, σ(log α − β log(−γ/ζ))."""
    beta, gamma, zeta = HARD_CONCRETE
    return jax.nn.sigmoid(log_alpha - beta * jnp.log(-gamma / zeta))


def vardrop(
    inner: optax.GradientTransformation,
    weight: float,
    start_at: float = -10.0,
    **options: Any,
) -> Viewed:
    """Learns the noise that each weight bears; weights that are all noise are pruned.

    w ~ N(θ, σ²) with σ² = αθ². In evaluation w is θ where log α ≤ 3, and 0 elsewhere.
    The penalty is λ Σ KL(α), see `dropout_divergence`.

    Args:
      inner: the optimizer of θ and log σ².
      weight: λ, such as one over the number of examples.
      start_at: the first log σ².
      **options: `include`, `exclude` and `stacked` of `PruneOptions`.

    Raises:
      ConfigError: a value out of its range.

    References:
      Molchanov, Ashukha and Vetrov, Variational Dropout Sparsifies Deep Neural
      Networks, ICML 2017, eqs. 13-15.
    """
    checks.require_finite(0, weight=weight)
    checks.require_finite(start_at=start_at)
    chosen = PruneOptions.of(options, vardrop)

    def start(params: Any) -> Any:
        return pair(params, "log_var", lambda w: jnp.full_like(w, start_at), chosen)

    def view(trained: Any, key: Any = None) -> Any:
        def see(path: str, weights: Array, log_var: Array) -> Array:
            if key is None:
                return jnp.where(
                    log_alphas(weights, log_var) <= LARGEST_LOG_ALPHA, weights, 0
                )
            noise = jax.random.normal(
                keys.derive(key, path), weights.shape, weights.dtype
            )
            return weights + jnp.exp(log_var / 2) * noise

        return see_beside(trained, "log_var", see)

    def alphas(trained: Any) -> dict[str, Array]:
        leaves = trees.flatten(trained["weights"])
        return {p: log_alphas(leaves[p], v) for p, v in trained["log_var"].items()}

    def penalty(trained: Any) -> Array:
        return weight * _sum_all(map(dropout_divergence, alphas(trained).values()))

    def kept(trained: Any) -> Any:
        own = {p: a <= LARGEST_LOG_ALPHA for p, a in alphas(trained).items()}
        return mask_tree(trained["weights"], own)

    tx = take_extra_args(inner=inner)
    return Viewed(tx, start, view, penalty, kept, "log_var")


def log_alphas(
    weights: Float[Array, "*shape"], log_var: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns log σ² − log θ², which is finite for θ = 0 too."""
    smallest = jnp.finfo(weights.dtype).tiny
    return log_var - jnp.log(jnp.maximum(jnp.square(weights), smallest))


def dropout_divergence(log_alpha: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns −(k₁σ(k₂ + k₃ log α) − ½ log(1 + 1/α) − k₁), close to the divergence.

    References:
      Molchanov et al., ICML 2017, eq. 14.
    """
    k1, k2, k3 = DIVERGENCE
    rise = k1 * jax.nn.sigmoid(k2 + k3 * log_alpha)
    return k1 - rise + jax.nn.softplus(-log_alpha) / 2


def local_reparametrization(
    inputs: Float[Array, "*batch inputs"],
    weights: Float[Array, "inputs outputs"],
    log_var: Float[Array, "inputs outputs"],
    key: jax.Array,
) -> Float[Array, "*batch outputs"]:
    """Returns x·w with w ~ N(θ, σ²), drawn anew for every example.

    References:
      Kingma, Salimans and Welling, NeurIPS 2015, eq. 6.
    """
    mean, variance = inputs @ weights, jnp.square(inputs) @ jnp.exp(log_var)
    noise = jax.random.normal(key, mean.shape, mean.dtype)
    return mean + jnp.sqrt(variance) * noise


def _sum_all(parts: Iterable[Array]) -> Array:
    """Returns the sum of all numbers of some arrays, float32."""
    return sum((jnp.sum(part, dtype=jnp.float32) for part in parts), jnp.zeros(()))
