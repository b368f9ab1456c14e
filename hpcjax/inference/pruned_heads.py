"""SpAtten and Deja Vu: decoding without unimportant heads and tokens.

Both keep the whole cache, since a later token may need what this one does without.

References:
  Wang, Zhang and Han, SpAtten, HPCA 2021. Liu et al., Deja Vu, ICML 2023.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hpcjax import layers, models
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.structs import pytree
from hpcjax.inference.generation import LanguageModel
from hpcjax.inference.head_pruning import (
    Cascade,
    Importance,
    fit_predictor,
    gather_importance,
    init_predictor,
    kept_counts,
    observe_layer,
    output_labels,
    predict_heads,
    prune_heads_and_tokens,
    start_cascade,
    top_heads,
)
from hpcjax.inference.scoring import check_text, decoded_losses


@pytree
class CascadingMemory:
    """Memory of a run of layers that prune in a cascade.

    The cache cannot be truncated, since the importance of removed tokens would remain.

    Attributes:
      kept: keys and values.
      heads: number of heads that the query at each position keeps, `[layers, size]`.
      tokens: number of tokens that it keeps, `[layers, size]`.
      earlier: importance measured by all queries so far, in the layers before.
    """

    kept: models.KeysValues
    heads: Int[Array, "*layers size"]
    tokens: Int[Array, "*layers size"]
    earlier: Importance


def attend_cascading(
    memory: CascadingMemory, shared: Cascade, heads: models.Heads
) -> tuple[jax.Array, CascadingMemory, Cascade]:
    """Attends with the most important heads to the most important tokens."""
    heads.require_no_slopes("pruned tokens")
    positions = heads.positions
    kept = models.write_heads(memory.kept, heads)
    known = gather_importance(memory.earlier, shared.shown)
    left = prune_heads_and_tokens(
        shared,
        known,
        positions,
        keep_heads=memory.heads[positions],
        keep_tokens=memory.tokens[positions],
    )
    # Maps of all keys are what importance is measured by, whatever room there is.
    keys, values = (
        rows[kept.layer].astype(heads.query.dtype) for rows in (kept.keys, kept.values)
    )
    seen = layers.attention(heads.query, keys, values, causal=False, mask=left.tokens)
    mixed = _mask_heads(left.heads, seen)
    # Once more, since `attention` does not return them.
    maps = layers.attention_maps(heads.query, keys, left.tokens)
    # The last query of this call knows the sum over all queries so far.
    earlier = jax.tree.map(lambda rows: rows[:, -1], known)
    memory = dataclasses.replace(memory, kept=kept, earlier=earlier)
    return mixed, memory, observe_layer(left, mixed, maps)


def cascading_cache(
    language_model: LanguageModel,
    batch: int,
    size: int,
    *,
    heads: Sequence[float],
    tokens: Sequence[float],
    window: int = 5,
) -> models.Cache:
    """Returns an empty cache for `cascading_decoding`.

    Args:
      language_model: the model with its parameters.
      batch: number of sequences.
      size: tokens of each that the cache has room for.
      heads: share of the heads that each layer keeps, see `kept_counts`.
      tokens: share of the tokens up to a query that each layer keeps.
      window: number of first tokens for which nothing is pruned.

    Raises:
      ConfigError: not one share for each layer, shares that increase, and whatever
        `models.empty_cache` raises.
    """
    decoder = models.decoder_of(language_model.model)
    _check_layers(decoder.depth, heads=heads, tokens=tokens)
    cache = models.empty_cache(language_model.model, batch, size)
    # The query at position t has t + 1 tokens, of which each layer keeps a share; in
    # the window, all of them.
    shares = [kept_counts(place + 1, tokens) for place in range(size)]
    every = np.arange(1, size + 1)
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    run = CascadingMemory(
        kept=cache.runs[0],
        heads=_heads_table(
            kept_counts(decoder.heads, heads), decoder.heads, size, window
        ),
        tokens=jnp.asarray(np.where(every <= window, every, np.transpose(shares))),
        earlier=Importance(
            heads=zeros((decoder.depth, batch, decoder.heads)),
            tokens=zeros((decoder.depth, batch, size)),
        ),
    )
    return dataclasses.replace(cache, runs=(run,))


def cascading_decoding(
    language_model: LanguageModel, tokens: Int[Array, "batch time"], cache: models.Cache
) -> models.Decoding:
    """Returns the `Decoding` that reads tokens with SpAtten's cascade pruning.

    For each query, every layer prunes the least important heads and tokens, which stay
    pruned in deeper layers. Importance is measured in the layers before, by this query
    and those before it. So tokens read at once are treated as if read one by one.

    Args:
      language_model: the model with its parameters.
      tokens: the tokens to read.
      cache: see `cascading_cache`.

    References:
      Wang, Zhang and Han, HPCA 2021.
    """
    heads = models.decoder_of(language_model.model).heads
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
    size = cache.runs[0].tokens.shape[-1]
    return models.Decoding(
        tokens=tokens,
        cache=cache,
        shared=start_cascade(positions, heads, size),
        attend=attend_cascading,
    )


def cascading_losses(
    language_model: LanguageModel,
    tokens: Int[Array, "batch time"],
    *,
    heads: Sequence[float],
    tokens_kept: Sequence[float],
    window: int = 5,
) -> Float[Array, "batch ahead"]:
    """Returns −log p(token | tokens before it) of tokens predicted with a cascade.

    Args:
      language_model: the model with its parameters.
      tokens: the texts.
      heads: share of the heads that each layer keeps, see `cascading_cache`.
      tokens_kept: share of the tokens that each layer keeps.
      window: number of first tokens for which nothing is pruned.

    Returns:
      `[batch, time − window − 1]`, float32, in nats: the first token read with pruning
      is number `window`, and the first that is predicted with it the one behind it.
    """
    batch, time = tokens.shape
    check_text(time, window)
    cache = cascading_cache(
        language_model, batch, time, heads=heads, tokens=tokens_kept, window=window
    )
    x = cascading_decoding(language_model, tokens[:, :-1], cache)
    return _losses_after_window(language_model, x, tokens, window)


@pytree
class PredictingMemory:
    """Memory of a run of layers whose important heads are predicted.

    Attributes:
      kept: keys and values.
      heads: number of heads that the query at each position keeps, `[layers, size]`.
      predictor: parameters, see `init_predictor`. None keeps the heads with the largest
        outputs, which only an oracle knows before it computes them.
    """

    kept: models.KeysValues
    heads: Int[Array, "*layers size"]
    predictor: dict[str, Float[Array, "..."]] | None = None


def attend_predicting(
    memory: PredictingMemory, shared: jax.Array | None, heads: models.Heads
) -> tuple[jax.Array, PredictingMemory, jax.Array | None]:
    """Attends with the heads that a predictor or, without one, an oracle chooses.

    `shared` is the residual stream in front of the previous layer, float32; None for an
    oracle.
    """
    # All heads are computed and then masked: this measures quality, not time.
    mixed, kept, _ = models.attend_cached(memory.kept, None, heads)
    keep = memory.heads[heads.positions]
    if memory.predictor is None or shared is None:
        chosen = output_labels(mixed, keep)
    else:
        chosen = top_heads(predict_heads(memory.predictor, shared), keep)
        shared = heads.hidden.astype(jnp.float32)
    return _mask_heads(chosen, mixed), dataclasses.replace(memory, kept=kept), shared


def predicting_cache(
    language_model: LanguageModel,
    batch: int,
    size: int,
    *,
    heads: Sequence[int],
    predictors: dict[str, jax.Array] | None = None,
    window: int = 5,
) -> models.Cache:
    """Returns an empty cache for `predicting_decoding`.

    Args:
      language_model: the model with its parameters.
      batch: number of sequences.
      size: tokens of each that the cache has room for.
      heads: number of heads that each layer keeps.
      predictors: see `fit_predictors`; None for an oracle.
      window: number of first tokens for which all heads are kept.

    Raises:
      ConfigError: not one number for each layer, or one outside of [1, H].
    """
    decoder = models.decoder_of(language_model.model)
    _check_layers(decoder.depth, heads=heads)
    for layer, count in enumerate(heads):
        if not 1 <= count <= decoder.heads:
            raise ConfigError(
                f"layer {layer}: heads must be in [1, {decoder.heads}]: got {count}"
            )
    cache = models.empty_cache(language_model.model, batch, size)
    table = _heads_table(heads, decoder.heads, size, window)
    run = PredictingMemory(kept=cache.runs[0], heads=table, predictor=predictors)
    return dataclasses.replace(cache, runs=(run,))


def predicting_decoding(
    tokens: Int[Array, "batch time"], cache: models.Cache
) -> models.Decoding:
    """Returns the `Decoding` that reads tokens with predicted heads only, as Deja Vu.

    The predictor of a layer reads the residual stream in front of the previous layer.
    That of the first layer reads zeros, and keeps the same heads for all tokens.

    Args:
      tokens: the tokens to read.
      cache: see `predicting_cache`.

    References:
      Liu et al., Deja Vu, ICML 2023.
    """
    predictor, before = cache.runs[0].predictor, None
    if predictor is not None:
        before = jnp.zeros((*tokens.shape, predictor["in"].shape[-2]), jnp.float32)
    return models.Decoding(
        tokens=tokens, cache=cache, shared=before, attend=attend_predicting
    )


def predicting_losses(
    language_model: LanguageModel,
    tokens: Int[Array, "batch time"],
    *,
    heads: Sequence[int],
    predictors: dict[str, jax.Array] | None = None,
    window: int = 5,
) -> Float[Array, "batch ahead"]:
    """Returns −log p(token | tokens before it) of tokens predicted with some heads.

    Args:
      language_model: the model with its parameters.
      tokens: the texts.
      heads: number of heads that each layer keeps.
      predictors: see `fit_predictors`; None for an oracle.
      window: number of first tokens for which all heads are kept.

    Returns:
      As `cascading_losses`.
    """
    batch, time = tokens.shape
    check_text(time, window)
    cache = predicting_cache(
        language_model, batch, time, heads=heads, predictors=predictors, window=window
    )
    x = predicting_decoding(tokens[:, :-1], cache)
    return _losses_after_window(language_model, x, tokens, window)


class ObservedHeads(NamedTuple):
    """Inputs and labels for the predictors of all layers.

    Attributes:
      states: the residual stream in front of the previous layer; 0 for the first.
      labels: mask of the heads with the largest outputs.
    """

    states: Float[Array, "layers batch time width"]
    labels: Bool[Array, "layers batch time heads"]


def attend_observing(
    memory: PredictingMemory, shared: None, heads: models.Heads
) -> tuple[jax.Array, ObservedHeads, None]:
    """Attends with all heads, and returns states and labels as memory."""
    mixed, _, _ = models.attend_cached(memory.kept, None, heads)
    labels = output_labels(mixed, memory.heads[heads.positions])
    return mixed, ObservedHeads(heads.hidden.astype(jnp.float32), labels), shared


@functools.partial(jax.jit, static_argnames="heads")
def observe_heads(
    language_model: LanguageModel,
    tokens: Int[Array, "batch time"],
    heads: tuple[int, ...],
) -> ObservedHeads:
    """Reads texts with all heads and returns the predictors' training data.

    Args:
      language_model: the model with its parameters.
      tokens: the texts.
      heads: number of heads that are labelled in each layer.
    """
    batch, time = tokens.shape
    cache = predicting_cache(language_model, batch, time, heads=heads, window=0)
    at = jnp.zeros((batch, 1), jnp.int32)
    x = models.Decoding(tokens=tokens, cache=cache, at=at, attend=attend_observing)
    (observed,) = language_model.decode(x)[1].runs
    # Layers learn from the state in front of the layer before: shifted by one.
    previous = jnp.roll(observed.states, 1, axis=0).at[0].set(0)
    return ObservedHeads(previous, observed.labels)


@functools.partial(jax.jit, static_argnames=("hidden", "steps"))
def fit_predictors(
    observed: ObservedHeads, *, key: jax.Array, hidden: int = 128, steps: int = 500
) -> dict[str, jax.Array]:
    """Fits a predictor for each layer, see `fit_predictor`.

    Args:
      observed: see `observe_heads`.
      key: of the first weights and the batches; differs between layers.
      hidden: width of the predictors' hidden layer.
      steps: steps of Adam.

    Returns:
      Parameters as from `init_predictor`, with the layers along axis 0.
    """
    depth, *_, width = observed.states.shape

    def one(layer: tuple) -> dict[str, jax.Array]:
        number, states, labels = layer
        own, count = derive(key, "layer", number), labels.shape[-1]
        return fit_predictor(
            init_predictor(own, width, hidden, count),
            states.reshape(-1, width),
            labels.reshape(-1, count),
            key=own,
            steps=steps,
        ).params

    return jax.lax.map(one, (jnp.arange(depth), *observed))


def _losses_after_window(
    language_model: LanguageModel, x: models.Decoding, tokens: jax.Array, window: int
) -> jax.Array:
    following = tokens[:, window + 1 :]
    at = jnp.broadcast_to(jnp.arange(window, tokens.shape[1] - 1), following.shape)
    return decoded_losses(language_model, dataclasses.replace(x, at=at), following)


def _mask_heads(
    kept: Bool[Array, "batch time heads"],
    mixed: Float[Array, "batch time heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    return jnp.where(kept[..., None], mixed, 0)


def _heads_table(
    counts: Sequence[int], every: int, size: int, window: int
) -> Int[Array, "layers size"]:
    """Returns how many heads each layer keeps at each position; all in the window."""
    rows = np.repeat(np.array(counts)[:, None], size, axis=1)
    rows[:, :window] = every
    return jnp.asarray(rows)


def _check_layers(depth: int, **by_name: Sequence[float] | Sequence[int]) -> None:
    for name, values in by_name.items():
        if len(values) != depth:
            raise ConfigError(
                f"{name} must have a value for each of {depth} layers: got "
                f"{len(values)}"
            )
