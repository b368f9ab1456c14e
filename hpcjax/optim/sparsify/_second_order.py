"""Scores by curvature and by the inputs of layers; what is left makes up for the rest.

All are functions of arrays; `one_shot` takes trees of what they return. Layer-wise
elimination with the full Hessian of a layer's inputs is `compress.prune`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hpcjax.core import checks, keys, masks, trees

Loss = Callable[[Any], jax.Array]


def hutchinson_diagonal(loss: Loss, params: Any, key: jax.Array, samples: int) -> Any:
    """Returns the mean of v·Hv over random signs v, an estimate of the diagonal of H.

    Args:
      loss: `params -> loss`.
      params: where H is taken.
      key: of the signs.
      samples: number of products with H.

    References:
      Bekas, Kokiopoulou and Saad, Applied Numerical Mathematics 57, 2007.
    """
    checks.require_count(1, samples=samples)

    def draw(number: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        signs = [
            jax.random.rademacher(keys.derive(key, str(i), number), p.shape, p.dtype)
            for i, p in enumerate(leaves)
        ]
        vector = jax.tree.unflatten(structure, signs)
        _, product = jax.jvp(jax.grad(loss), (params,), (vector,))
        return jax.tree.map(jnp.multiply, vector, product)

    drawn = jax.lax.map(draw, jnp.arange(samples))
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), drawn)


def obd(params: Any, diagonal: Any) -> Any:
    """Returns ½ H_ii w²: what removing w adds to the loss where H is diagonal.

    References:
      LeCun, Denker and Solla, Optimal Brain Damage, NeurIPS 1989.

    Examples:
      >>> obd({"w": jnp.array([2.0])}, {"w": jnp.array([3.0])})["w"].tolist()
      [6.0]
    """
    return jax.tree.map(lambda w, h: h * jnp.square(w) / 2, params, diagonal)


def obs(
    weights: Float[Array, "*blocks n"], inverse: Float[Array, "*blocks n n"]
) -> Float[Array, "*blocks n"]:
    """Returns w_q² / (2 [H⁻¹]_qq): what removing w_q adds, if the others adapt.

    Args:
      weights: w.
      inverse: H⁻¹.

    References:
      Hassibi and Stork, Optimal Brain Surgeon, NeurIPS 1992.
    """
    return jnp.square(weights) / (2 * jnp.diagonal(inverse, axis1=-2, axis2=-1))


def obs_remove(
    weights: Float[Array, "*blocks n"],
    inverse: Float[Array, "*blocks n n"],
    kept: Bool[Array, "*blocks n"],
) -> Float[Array, "*blocks n"]:
    """Removes weights, of which each is made up for as if it went alone.

    w ← m⊙(w − Σ_q (w_q/[H⁻¹]_qq) H⁻¹e_q) over the removed q. With a single q that is
    the least of the quadratic model w + δ of H where δ_q = −w_q.

    References:
      Singh and Alistarh, WoodFisher, NeurIPS 2020, §3.3.

    Examples:
      >>> inverse = jnp.array([[2.0, 1.0], [1.0, 2.0]])
      >>> obs_remove(jnp.array([4.0, 3.0]), inverse, jnp.array([False, True])).tolist()
      [0.0, 1.0]
    """
    diagonal = jnp.diagonal(inverse, axis1=-2, axis2=-1)
    share = jnp.where(kept, 0, weights / diagonal)
    moved = weights - jnp.einsum(
        "...ij,...j->...i", inverse, share, precision="highest"
    )
    return jnp.where(kept, moved, 0)


def fisher_inverse(
    grads: Float[Array, "examples n"], block: int, damping: float = 1e-5
) -> Float[Array, "blocks size size"]:
    """Returns the inverse of λI + (1/N) Σ gᵢgᵢᵀ in blocks, without forming it.

    F⁻¹ ← F⁻¹ − (F⁻¹g)(F⁻¹g)ᵀ / (N + gᵀF⁻¹g), one example after the other, from I/λ.

    Args:
      grads: gᵢ, gradients of single examples; n is a multiple of the block.
      block: side of a block.
      damping: λ > 0.

    Raises:
      ConfigError: no examples, the block does not divide n, or λ is not positive.

    References:
      Singh and Alistarh, WoodFisher, NeurIPS 2020, eq. 5.
    """
    examples, n = grads.shape
    checks.require_count(1, examples=examples, block=block)
    checks.require_positive(damping=damping)
    checks.require(not n % block, "block must divide the weights", block=block, n=n)
    start = jnp.broadcast_to(
        jnp.eye(block, dtype=grads.dtype) / damping, (n // block, block, block)
    )

    def add(inverse: Array, grad: Array) -> tuple[Array, None]:
        own = grad.reshape(n // block, block)
        moved = jnp.einsum("bij,bj->bi", inverse, own, precision="highest")
        scale = examples + jnp.einsum("bi,bi->b", own, moved, precision="highest")
        outer = moved[:, :, None] * moved[:, None, :]
        return inverse - outer / scale[:, None, None], None

    return jax.lax.scan(add, start, grads)[0]


class WoodFisher(NamedTuple):
    """What is known of the removal of weights from a network.

    Attributes:
      scores: what removing each weight adds to the loss, see `obs`.
      remove: `masks -> params`, with what is left adapted, see `obs_remove`.
    """

    scores: Any
    remove: Callable[[Any], Any]


def woodfisher(
    params: Any, grads: Any, block: int = 64, damping: float = 1e-5
) -> WoodFisher:
    """Measures removals by the Fisher matrix of single examples, in blocks of weights.

    Args:
      params: a tree of arrays.
      grads: a tree like it, of gradients `[examples, ...]` of single examples' losses.
      block: neighbouring weights of a parameter that share a block of the matrix.
      damping: λ, see `fisher_inverse`.

    Raises:
      ConfigError: `grads` are not of single examples of `params`, or a value is out of
        its range.

    Examples:
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> found = woodfisher(params, {"w": jnp.eye(2)}, block=2)
      >>> found.remove({"w": jnp.array([False, True])})["w"].tolist()
      [0.0, 2.0]
    """
    checks.require_count(1, block=block)
    wanted, found = (
        {path: jnp.shape(leaf)[skip:] for path, leaf in trees.flatten(tree).items()}
        for tree, skip in ((params, 0), (grads, 1))
    )
    rule = "grads must have the shapes of params behind their first axis, of examples"
    checks.require(wanted == found, rule, params=wanted, grads=found)

    def cut(leaf: Array) -> Array:
        """Returns an array in blocks; what pads the last one has no gradient."""
        flat = leaf.ravel()
        return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)

    def invert(gradients: Array) -> Array:
        rows = jax.vmap(cut)(gradients).reshape(len(gradients), -1)
        return fisher_inverse(rows, block, damping)

    def join(blocks: Array, like: Array) -> Array:
        return blocks.ravel()[: like.size].reshape(like.shape)

    inverses = jax.tree.map(invert, grads)
    scores = jax.tree.map(lambda w, f: join(obs(cut(w), f), w), params, inverses)

    def remove(kept: Any) -> Any:
        def adapt(mask: Any, weights: Array, inverse: Array) -> Array:
            if mask is None:
                return weights
            return join(obs_remove(cut(weights), inverse, cut(mask)), weights)

        return masks.map_masks(adapt, kept, params, inverses)

    return WoodFisher(scores, remove)


def wanda(
    kernel: Float[Array, "inputs outputs"], norms: Float[Array, " inputs"]
) -> Float[Array, "inputs outputs"]:
    """Returns |w|·‖x‖, with the norm of each input over the calibration.

    Raises:
      ConfigError: not one norm for each input.

    References:
      Sun et al., A Simple and Effective Pruning Approach for LLMs, ICLR 2024.
    """
    rule = f"wanda needs one norm for each of the {len(kernel)} inputs"
    checks.require(norms.shape == kernel.shape[:1], rule, shape=norms.shape)
    return jnp.abs(kernel) * norms[:, None]


def kfac_obs(
    kernel: Float[Array, "inputs outputs"],
    a: Float[Array, "inputs inputs"],
    g: Float[Array, "outputs outputs"],
    damping: float = 0.0,
) -> Float[Array, "inputs outputs"]:
    """Returns OBS's score for H = A⊗G: w_ji² / (2 [A⁻¹]_jj [G⁻¹]_ii).

    Args:
      kernel: w.
      a: A, the second moment of the inputs, as K-FAC has it.
      g: G, that of the gradients of the outputs.
      damping: added to both diagonals; at least 0.

    Raises:
      ConfigError: a damping below zero.

    References:
      Wang et al., EigenDamage, ICML 2019, §3.
    """
    checks.require_finite(0, damping=damping)

    def inverse_diagonal(factor: Array) -> Array:
        damped = factor + damping * jnp.eye(len(factor), dtype=factor.dtype)
        return jnp.diagonal(jnp.linalg.inv(damped))

    rows, columns = inverse_diagonal(a), inverse_diagonal(g)
    return jnp.square(kernel) / (2 * rows[:, None] * columns[None, :])


def activity(outputs: Float[Array, "*batch channels"]) -> Float[Array, " channels"]:
    """Returns the mean |a| of each channel.

    Examples:
      >>> activity(jnp.array([[1.0, 0.0], [-3.0, 0.0]])).tolist()
      [2.0, 0.0]
    """
    return jnp.abs(outputs).mean(axis=tuple(range(outputs.ndim - 1)))


def share_of_nonzeros(
    outputs: Float[Array, "*batch channels"],
) -> Float[Array, " channels"]:
    """Returns 1 − APoZ of each channel: the share of its activations that are not 0.

    References:
      Hu et al., Network Trimming, arXiv 1607.03250, 2016.

    Examples:
      >>> share_of_nonzeros(jnp.array([[1.0, 0.0], [-3.0, 4.0]])).tolist()
      [1.0, 0.5]
    """
    axes = tuple(range(outputs.ndim - 1))
    return jnp.mean(outputs != 0, axis=axes, dtype=outputs.dtype)
