"""Structured pruning: removes whole layers, heads and features of a trained model.

Parameters are those of a stack of blocks, with the layers along axis 0 of every leaf.
The choice depends on activations; fine-tuning is left to `distil`.

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

# The axis of a kernel [layers, inputs, outputs] from which features are taken.
_OUTPUTS, _INPUTS = -1, -2


def prune_layers(stacked: Any, keep: Sequence[int]) -> Any:
    """Returns the stack of the layers in `keep`, in that order.

    Args:
      stacked: a tree whose leaves have layers along axis 0.
      keep: numbers of the layers, all different.

    Raises:
      ConfigError: no layers, a repeated one, or one that does not exist.

    Examples:
      >>> prune_layers({"kernel": jnp.arange(5)}, (0, 3, 4))["kernel"].tolist()
      [0, 3, 4]
    """
    depth = len(jax.tree.leaves(stacked)[0])
    _check_kept("layers", keep, depth)
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(keep)], stacked)


def keep_ends(depth: int, count: int) -> tuple[int, ...]:
    """Returns the numbers of the first ⌈count/2⌉ and last ⌊count/2⌋ of `depth` layers.

    Raises:
      ConfigError: count is not in [1, depth].

    Examples:
      >>> keep_ends(30, 5)
      (0, 1, 2, 28, 29)
    """
    if not 1 <= count <= depth:
        raise ConfigError(f"count must be in [1, {depth}]: got count={count}")
    first = -(-count // 2)
    return (*range(first), *range(depth - count + first, depth))


def keep_by_angle(
    hidden: Float[Array, "layers_and_1 *places width"], count: int
) -> tuple[int, ...]:
    """Returns the numbers of the layers that turn the residual stream most.

    The measure is the angle between a layer's input and output, averaged over
    positions.

    Args:
      hidden: the residual stream in front of each layer and behind the last.
      count: number of layers.

    Returns:
      `count` numbers in ascending order.

    Raises:
      ConfigError: count is not in [1, layers].

    Examples:
      >>> keep_by_angle(jnp.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.5, 1.0]]), 2)
      (1, 2)
    """
    depth = len(hidden) - 1
    if not 1 <= count <= depth:
        raise ConfigError(f"count must be in [1, {depth}]: got count={count}")
    wide = hidden.astype(jnp.float32)
    unit = wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), 1e-30)
    # The chord between unit vectors at an angle t is 2 sin(t / 2). It resolves small
    # angles, while cos t in float32 is 1 up to angles of 3e-4.
    chord = jnp.minimum(jnp.linalg.norm(unit[1:] - unit[:-1], axis=-1), 2)
    angle = 2 * jnp.arcsin(chord / 2)
    mean_angle = np.asarray(jnp.mean(angle.reshape(depth, -1), axis=1))
    return tuple(sorted(np.argsort(-mean_angle, kind="stable")[:count].tolist()))


def prune_features(
    mlp: Mapping[str, Any], norms: Float[Array, "layers features"], count: int
) -> dict[str, Any]:
    """Returns a stack of MLPs with the hidden features of the largest norms.

    Args:
      mlp: `up`, `down` and, when gated, `gate`, each with `kernel` and maybe `bias`.
      norms: norm of each hidden feature, an input of `down`.
      count: number of features that each layer keeps.

    Raises:
      ConfigError: count is not in [1, features], or norms have a wrong shape.
    """
    layers, features = mlp["up"]["kernel"].shape[0], mlp["up"]["kernel"].shape[-1]
    _check_norms(norms, (layers, features))
    kept = _find_strongest(norms, count, "features")
    return {
        name: _take_features(part, kept, _INPUTS if name == "down" else _OUTPUTS)
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
    """Returns a stack of attention layers with the heads of the largest norms.

    Query heads that share keys and values form a group. The weakest groups are removed
    first; then equally many heads of each remaining group. The size of a head does not
    change, so that the config of the pruned model must state `head_dim`.

    Args:
      attention: `query`, `key`, `value` and `output`, each with `kernel` and maybe
        `bias`; features are ordered by head.
      norms: norm of each feature of the heads, an input of `output`.
      heads: number of query heads.
      kv_heads: number of key and value heads; None for `heads`.
      count: number of query heads to keep.
      kv_count: number of groups to keep; None keeps all groups, or `count` of them if
        every query head has its own keys.

    Raises:
      ConfigError: numbers that do not divide each other or exceed those of the model;
        norms of a wrong shape.
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
    # `strength` is [layers, kv_heads, per_group], the squared norm of each query head.
    groups = _find_strongest(jnp.sum(strength, axis=-1), kv_count, "groups")
    inside = jnp.take_along_axis(strength, groups[:, :, None], axis=1)
    own = _find_strongest(inside, count // kv_count, "heads")
    # Query head j of group g is number g · per_group + j of the model.
    queries = (groups[:, :, None] * per_group + own).reshape(layers, -1)
    size = inner // heads
    kept, shared = _head_features(queries, size), _head_features(groups, size)
    return {
        name: _take_features(
            part,
            shared if name in ("key", "value") else kept,
            _INPUTS if name == "output" else _OUTPUTS,
        )
        for name, part in attention.items()
    }


def _head_features(
    heads: Int[Array, "layers heads"], size: int
) -> Int[Array, "layers features"]:
    """Returns the features of heads of `size` features each."""
    return (heads[..., None] * size + jnp.arange(size)).reshape(len(heads), -1)


def _find_strongest(
    norms: Float[Array, "*axes all"], count: int, what: str
) -> Int[Array, "*axes kept"]:
    """Returns the indices of the largest, in ascending order; of equals, the first."""
    if not 1 <= count <= norms.shape[-1]:
        raise ConfigError(
            f"count must be in [1, {norms.shape[-1]}] {what}: got count={count}"
        )
    order = jnp.argsort(-norms, axis=-1, stable=True)
    return jnp.sort(order[..., :count], axis=-1)


def _take_features(
    part: Mapping[str, Any], kept: Int[Array, "layers kept"], axis: int
) -> dict[str, Any]:
    """Returns a linear layer with the kept inputs or outputs, by layer of the stack."""

    def take(name: str, leaf: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        # A bias has a value for each output, and none for inputs.
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
