"""Whole layers, heads and features taken out of a trained model.

Parameters are those of a stack of blocks, layers along axis 0 of every leaf. Which of
them go is decided by what they do to activations; fine-tuning afterwards is left to
`distil`.

References:
  Yan, Agarwal and Venkataraman, Decoding Speculative Decoding, NAACL 2025; for the
  angles Gromov et al., arXiv 2403.17887.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from hpcjax.core.errors import ConfigError

# How heads lie in kernels [layers, inputs, outputs]: along inputs or along outputs.
_OUTPUTS, _INPUTS = -1, -2


def prune_layers(stacked: Any, keep: Sequence[int]) -> Any:
    """Returns a stack of some of the layers, in the order of `keep`.

    Args:
      stacked: a tree whose leaves have layers along axis 0.
      keep: which layers; none twice.

    Raises:
      ConfigError: none, one twice, or one that is not there.

    Examples:
      >>> prune_layers({"kernel": jnp.arange(5)}, (0, 3, 4))["kernel"].tolist()
      [0, 3, 4]
    """
    depth = len(jax.tree.leaves(stacked)[0])
    _check_kept("layers", keep, depth)
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(keep)], stacked)


def ends(depth: int, count: int) -> tuple[int, ...]:
    """Returns the first ⌈count/2⌉ and the last ⌊count/2⌋ of `depth` layers.

    Raises:
      ConfigError: count is not in [1, depth].

    Examples:
      >>> ends(30, 5)
      (0, 1, 2, 28, 29)
    """
    if not 1 <= count <= depth:
        raise ConfigError(f"count must be in [1, {depth}]: got count={count}")
    first = -(-count // 2)
    return (*range(first), *range(depth - count + first, depth))


def by_angle(
    hidden: Float[Array, "layers_and_1 *places width"], count: int
) -> tuple[int, ...]:
    """Returns the layers that turn the residual stream most, in their order.

    The angle between what a layer is given and what it gives, on average over places.

    Args:
      hidden: the residual stream before each layer and after the last.
      count: how many layers.

    Raises:
      ConfigError: count is not in [1, layers].

    Examples:
      >>> by_angle(jnp.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.5, 1.0]]), 2)
      (1, 2)
    """
    depth = len(hidden) - 1
    if not 1 <= count <= depth:
        raise ConfigError(f"count must be in [1, {depth}]: got count={count}")
    wide = hidden.astype(jnp.float32)
    unit = wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), 1e-30)
    # Not by the cosine, which in float32 is 1 up to angles of 3e-4.
    chord = jnp.minimum(jnp.linalg.norm(unit[1:] - unit[:-1], axis=-1), 2)
    angle = 2 * jnp.arcsin(chord / 2)
    turned = np.asarray(jnp.mean(angle.reshape(depth, -1), axis=1))
    return tuple(sorted(np.argsort(-turned, kind="stable")[:count].tolist()))


def prune_features(
    mlp: Mapping[str, Any], norms: Float[Array, "layers features"], count: int
) -> dict[str, Any]:
    """Returns a stack of feed-forward parts with the strongest inner features.

    Args:
      mlp: `up`, `down` and, when gated, `gate`, each with `kernel` and maybe `bias`.
      norms: of each feature, what `down` is given.
      count: features left of each layer.

    Raises:
      ConfigError: count is not in [1, features], or norms of another shape.
    """
    layers, features = mlp["up"]["kernel"].shape[0], mlp["up"]["kernel"].shape[-1]
    _check_norms(norms, (layers, features))
    kept = _strongest(norms, count, "features")
    return {
        name: _taken(part, kept, _INPUTS if name == "down" else _OUTPUTS)
        for name, part in mlp.items()
    }


def prune_heads(
    attention: Mapping[str, Any],
    norms: Float[Array, "layers inner"],
    *,
    heads: int,
    kv_heads: int | None = None,
    count: int,
    kv_count: int | None = None,
) -> dict[str, Any]:
    """Returns a stack of attentions with the strongest heads.

    Query heads that share keys and values stay together: first whole groups are left
    out, the weakest, then as many heads of each group that is left. The size of a head
    stays, so that a model of them needs `head_dim`.

    Args:
      attention: `query`, `key`, `value` and `output`, each with `kernel` and maybe
        `bias`; heads lie one behind the other.
      norms: of each feature of the heads, what `output` is given.
      heads: query heads there are.
      kv_heads: key and value heads there are; None means as many.
      count: query heads left.
      kv_count: groups left; None means all, or `count` where each head has its own.

    Raises:
      ConfigError: numbers that do not divide, or more than there are; norms of another
        shape.
    """
    kv_heads = kv_heads or heads
    kv_count = kv_count or (count if kv_heads == heads else kv_heads)
    _check_heads(heads, kv_heads, count, kv_count)
    per_group = heads // kv_heads
    layers, _, inner = attention["query"]["kernel"].shape
    _check_norms(norms, (layers, inner))
    strength = jnp.sum(
        norms.astype(jnp.float32).reshape(layers, kv_heads, per_group, -1) ** 2, axis=-1
    )
    groups = _strongest(jnp.sum(strength, axis=-1), kv_count, "groups")
    inside = jnp.take_along_axis(strength, groups[:, :, None], axis=1)
    own = _strongest(inside, count // kv_count, "heads")
    queries = (groups[:, :, None] * per_group + own).reshape(layers, -1)
    size = inner // heads
    kept, shared = _features_of(queries, size), _features_of(groups, size)
    return {
        name: _taken(
            part,
            shared if name in ("key", "value") else kept,
            _INPUTS if name == "output" else _OUTPUTS,
        )
        for name, part in attention.items()
    }


def _features_of(
    heads: Int[Array, "layers heads"], size: int
) -> Int[Array, "layers features"]:
    return (heads[..., None] * size + jnp.arange(size)).reshape(len(heads), -1)


def _strongest(
    norms: Float[Array, "*axes all"], count: int, what: str
) -> Int[Array, "*axes kept"]:
    """Returns the places of the largest, in their order; of equal ones the first."""
    if not 1 <= count <= norms.shape[-1]:
        raise ConfigError(
            f"count must be in [1, {norms.shape[-1]}] {what}: got count={count}"
        )
    order = jnp.argsort(-norms, axis=-1, stable=True)
    return jnp.sort(order[..., :count], axis=-1)


def _taken(
    part: Mapping[str, Any], kept: Int[Array, "layers kept"], axis: int
) -> dict[str, Any]:
    """Returns one matrix with some of its inputs or outputs, others in each layer."""

    def take(name: str, leaf: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        # A bias belongs to outputs.
        if name == "bias":
            return jnp.take_along_axis(leaf, kept, 1) if axis == _OUTPUTS else leaf
        index = kept[:, None, :] if axis == _OUTPUTS else kept[:, :, None]
        return jnp.take_along_axis(leaf, index, axis=axis)

    return {name: take(name, leaf) for name, leaf in part.items()}


def _check_kept(what: str, keep: Sequence[int], have: int) -> None:
    if (
        not keep
        or len(set(keep)) != len(keep)
        or not 0 <= min(keep) <= max(keep) < have
    ):
        raise ConfigError(
            f"{what} kept must be different ones of 0 … {have - 1}: got {tuple(keep)}"
        )


def _check_heads(heads: int, kv_heads: int, count: int, kv_count: int) -> None:
    if (
        heads % kv_heads
        or not 1 <= kv_count <= kv_heads
        or not 1 <= count // kv_count <= heads // kv_heads
        or count % kv_count
    ):
        raise ConfigError(
            "kv_count must be in [1, kv_heads] and divide count, with no more heads a "
            f"group than there are: got heads={heads}, kv_heads={kv_heads}, "
            f"count={count}, kv_count={kv_count}"
        )


def _check_norms(norms: Array, shape: tuple[int, ...]) -> None:
    if norms.shape != shape:
        raise ConfigError(f"norms must have the shape {shape}: got {norms.shape}")
