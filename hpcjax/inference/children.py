"""Smaller language models of a large one: layers, heads and features that do most."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import compress, core
from hpcjax.models.pretrained import Pretrained


def prune_language_model(
    parent: Pretrained,
    tokens: np.ndarray,
    *,
    layers: int,
    choice: Literal["ends", "angle"] = "ends",
    heads: int | None = None,
    kv_heads: int | None = None,
    mlp_width: int | None = None,
) -> Pretrained:
    """Returns what is left of a model, untrained; such as a draft of its target.

    Heads and inner features are kept by the norm of what they put out on the windows.

    Args:
      parent: the model.
      tokens: windows that activations are measured on, `[windows, time]`.
      layers: how many are left.
      choice: the first and the last ones, or those that turn the residual stream most.
      heads: query heads left in each layer; None for all.
      kv_heads: key and value heads left; None for all.
      mlp_width: inner features left; None for all.
    """
    old: Any = parent.config
    seen = jnp.asarray(tokens)
    places = ("blocks/attention/output", "blocks/mlp/down")
    taps = {place: core.Tap(forward=_squares) for place in places}
    _, state = parent.model.apply(parent.params, {}, seen, train=False, taps=taps)
    head_norms, feature_norms = (jnp.sqrt(state[core.SEEN][place]) for place in places)
    if choice == "ends":
        keep = compress.keep_ends(old.depth, layers)
    else:
        keep = compress.keep_by_angle(residual_stream(parent, tokens), layers)
    blocks = compress.prune_layers(parent.params["blocks"], keep)
    chosen = jnp.asarray(keep)
    new = dataclasses.replace(
        old,
        depth=layers,
        heads=heads or old.heads,
        kv_heads=kv_heads or (old.kv_heads or old.heads),
        head_dim=old.head_size,
        mlp_width=mlp_width or old.mlp_width or 4 * old.width,
    )
    attention = compress.prune_heads(
        blocks["attention"],
        head_norms[chosen],
        heads=old.heads,
        kv_heads=old.kv_heads,
        count=new.heads,
        kv_count=new.kv_heads,
    )
    mlp = compress.prune_features(blocks["mlp"], feature_norms[chosen], new.mlp_width)
    blocks = {**blocks, "attention": attention, "mlp": mlp}
    params = {**parent.params, "blocks": blocks}
    return dataclasses.replace(parent, params=params, config=new)


def residual_stream(parent: Pretrained, tokens: np.ndarray) -> jax.Array:
    """Returns it before each layer and after the last, `[layers + 1, windows, ...]`."""
    parts = parent.parts
    first, _ = parts.embed.apply(parent.params, {}, jnp.asarray(tokens), train=False)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, jax.Array]:
        y, _ = parts.block.apply(params, {}, x, train=False)
        return y, y

    _, others = jax.lax.scan(layer, first, parent.params["blocks"])
    return jnp.concatenate([first[None], others])


def _squares(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the sum of squares of each input, over all places."""
    del y
    wide = x.astype(jnp.float32)
    return jnp.sum(wide**2, axis=tuple(range(wide.ndim - 1)))
