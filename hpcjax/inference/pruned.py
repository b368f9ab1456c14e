"""SpAtten and DejaVu: decoding that leaves out heads, and tokens, that matter little.

Both leave the cache as it is: a later token may ask for what this one does without.
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
    prune,
    start_cascade,
    top_heads,
)
from hpcjax.inference.scoring import check_text, decoded_losses


@pytree
class Cascading:
    """What a run of layers of a cascade remembers.

    Tokens cannot be taken back: their importance stays.

    Attributes:
      kept: keys and values.
      heads: how many a query keeps at each position, `[layers, size]`.
      tokens: the same of tokens.
      earlier: importance by the queries so far, over the layers before.
    """

    kept: models.KeysValues
    heads: Int[Array, "*layers size"]
    tokens: Int[Array, "*layers size"]
    earlier: Importance


def attend_cascading(
    memory: Cascading, shared: Cascade, heads: models.Heads
) -> tuple[jax.Array, Cascading, Cascade]:
    """Attends with the heads and to the tokens that the layers before left."""
    positions = heads.positions
    kept = models.write_heads(memory.kept, heads)
    known = gather_importance(memory.earlier, shared.shown)
    left = prune(
        shared,
        known,
        positions,
        keep_heads=memory.heads[positions],
        keep_tokens=memory.tokens[positions],
    )
    mixed = _of(left.heads, models.attend_where(left.tokens, kept, heads.query))
    keys = kept.keys.astype(heads.query.dtype)
    maps = layers.attention_maps(heads.query, keys, left.tokens)
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
    """Returns the cache of no tokens for `cascading`.

    Args:
      language_model: the model with its parameters.
      batch: sequences.
      size: tokens there is room for, of each.
      heads: share of the heads that each layer keeps, see `kept_counts`.
      tokens: share of the tokens up to a query that each layer keeps.
      window: the first tokens, for which nothing is left out.

    Raises:
      ConfigError: other than one share a layer, shares that do not fall, and what
        `models.empty_cache` refuses.
    """
    decoder = models.decoder_of(language_model.model)
    _check_layers(decoder.depth, heads=heads, tokens=tokens)
    cache = models.empty_cache(language_model.model, batch, size)
    shares = [kept_counts(place + 1, tokens) for place in range(size)]
    every = np.arange(1, size + 1)
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    run = Cascading(
        kept=cache.runs[0],
        heads=_table(kept_counts(decoder.heads, heads), decoder.heads, size, window),
        tokens=jnp.asarray(np.where(every <= window, every, np.transpose(shares))),
        earlier=Importance(
            heads=zeros((decoder.depth, batch, decoder.heads)),
            tokens=zeros((decoder.depth, batch, size)),
        ),
    )
    return dataclasses.replace(cache, runs=(run,))


def cascading(
    language_model: LanguageModel, tokens: Int[Array, "batch time"], cache: models.Cache
) -> models.Decoding:
    """Returns what reads tokens with a cascade, SpAtten's.

    For each query, the least important heads and tokens are left out at each layer and
    stay so in deeper ones. Importance is what layers before have shown, for this query
    and those before it; so all tokens at once are read as one after another.

    Args:
      language_model: the model with its parameters.
      tokens: those that follow.
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
    """Returns −log p(token | those before it) of the tokens that a cascade foretells.

    Args:
      language_model: the model with its parameters.
      tokens: the texts.
      heads: see `cascading_cache`.
      tokens_kept: the same of tokens.
      window: the first tokens, for which nothing is left out.

    Returns:
      `[batch, time − window − 1]`, of the tokens behind the first one that is read with
      something left out; float32, in nats.
    """
    batch, time = tokens.shape
    check_text(time, window)
    cache = cascading_cache(
        language_model, batch, time, heads=heads, tokens=tokens_kept, window=window
    )
    x = cascading(language_model, tokens[:, :-1], cache)
    return _losses_behind(language_model, x, tokens, window)


@pytree
class Predicting:
    """What a run of layers remembers whose heads are predicted.

    Attributes:
      kept: keys and values.
      heads: how many a query keeps at each position, `[layers, size]`.
      predictor: parameters, see `init_predictor`; None keeps the heads of the largest
        outputs, which only an oracle knows beforehand.
    """

    kept: models.KeysValues
    heads: Int[Array, "*layers size"]
    predictor: dict[str, Float[Array, "..."]] | None = None


def attend_predicting(
    memory: Predicting, shared: jax.Array | None, heads: models.Heads
) -> tuple[jax.Array, Predicting, jax.Array | None]:
    """Attends with the heads that a predictor or, without one, an oracle chooses.

    `shared` is the residual stream in front of the layer before, float32; None for an
    oracle.
    """
    mixed, kept, _ = models.attend_cached(memory.kept, None, heads)
    keep = memory.heads[heads.positions]
    if memory.predictor is None or shared is None:
        chosen = output_labels(mixed, keep)
    else:
        chosen = top_heads(predict_heads(memory.predictor, shared), keep)
        shared = heads.hidden.astype(jnp.float32)
    return _of(chosen, mixed), dataclasses.replace(memory, kept=kept), shared


def predicting_cache(
    language_model: LanguageModel,
    batch: int,
    size: int,
    *,
    heads: Sequence[int],
    predictors: dict[str, jax.Array] | None = None,
    window: int = 5,
) -> models.Cache:
    """Returns the cache of no tokens for `predicting`.

    Args:
      language_model: the model with its parameters.
      batch: sequences.
      size: tokens there is room for, of each.
      heads: how many each layer keeps.
      predictors: see `fit_predictors`; None for an oracle.
      window: the first tokens, for which all heads run.

    Raises:
      ConfigError: other than one number a layer, or one not in [1, H].
    """
    decoder = models.decoder_of(language_model.model)
    _check_layers(decoder.depth, heads=heads)
    for layer, count in enumerate(heads):
        if not 1 <= count <= decoder.heads:
            raise ConfigError(
                f"layer {layer}: heads must be in [1, {decoder.heads}]: got {count}"
            )
    cache = models.empty_cache(language_model.model, batch, size)
    table = _table(heads, decoder.heads, size, window)
    run = Predicting(kept=cache.runs[0], heads=table, predictor=predictors)
    return dataclasses.replace(cache, runs=(run,))


def predicting(
    tokens: Int[Array, "batch time"], cache: models.Cache
) -> models.Decoding:
    """Returns what reads tokens with predicted heads only, as DejaVu does.

    The predictor of a layer reads the residual stream in front of the layer before;
    that of the first layer has nothing to read, and keeps the same heads for all.

    Args:
      tokens: those that follow.
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
    """Returns −log p(token | those before it) of the tokens that some heads foretell.

    Args:
      language_model: the model with its parameters.
      tokens: the texts.
      heads: see `predicting_cache`.
      predictors: see `fit_predictors`; None for an oracle.
      window: the first tokens, for which all heads run.

    Returns:
      As `cascading_losses`.
    """
    batch, time = tokens.shape
    check_text(time, window)
    cache = predicting_cache(
        language_model, batch, time, heads=heads, predictors=predictors, window=window
    )
    x = predicting(tokens[:, :-1], cache)
    return _losses_behind(language_model, x, tokens, window)


class Observed(NamedTuple):
    """What predictors learn from.

    Attributes:
      states: the residual stream in front of the layer before; 0 for the first.
      labels: the heads of the largest outputs.
    """

    states: Float[Array, "layers batch time width"]
    labels: Bool[Array, "layers batch time heads"]


def attend_observing(
    memory: Predicting, shared: None, heads: models.Heads
) -> tuple[jax.Array, Observed, None]:
    """Attends with all heads and remembers what is in front and which are large."""
    mixed, _, _ = models.attend_cached(memory.kept, None, heads)
    labels = output_labels(mixed, memory.heads[heads.positions])
    return mixed, Observed(heads.hidden.astype(jnp.float32), labels), shared


@functools.partial(jax.jit, static_argnames="heads")
def observe_heads(
    language_model: LanguageModel,
    tokens: Int[Array, "batch time"],
    heads: tuple[int, ...],
) -> Observed:
    """Reads texts with all heads and returns what predictors learn from.

    Args:
      language_model: the model with its parameters.
      tokens: the texts.
      heads: how many matter in each layer.
    """
    batch, time = tokens.shape
    cache = predicting_cache(language_model, batch, time, heads=heads, window=0)
    at = jnp.zeros((batch, 1), jnp.int32)
    x = models.Decoding(tokens=tokens, cache=cache, at=at, attend=attend_observing)
    (found,) = language_model.decode(x)[1].runs
    before = jnp.roll(found.states, 1, axis=0).at[0].set(0)
    return Observed(before, found.labels)


@functools.partial(jax.jit, static_argnames=("hidden", "steps"))
def fit_predictors(
    observed: Observed, *, key: jax.Array, hidden: int = 128, steps: int = 500
) -> dict[str, jax.Array]:
    """Fits a predictor for each layer, see `fit_predictor`.

    Args:
      observed: see `observe_heads`.
      key: of the first weights and the batches, another for each layer.
      hidden: width of the predictors.
      steps: of Adam.

    Returns:
      Parameters of all layers, along axis 0.
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


def _losses_behind(
    language_model: LanguageModel, x: models.Decoding, tokens: jax.Array, window: int
) -> jax.Array:
    following = tokens[:, window + 1 :]
    at = jnp.broadcast_to(jnp.arange(window, tokens.shape[1] - 1), following.shape)
    return decoded_losses(language_model, dataclasses.replace(x, at=at), following)


def _of(
    kept: Bool[Array, "batch time heads"],
    mixed: Float[Array, "batch time heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    return jnp.where(kept[..., None], mixed, 0)


def _table(
    counts: Sequence[int], every: int, size: int, window: int
) -> Int[Array, "layers size"]:
    """Returns how many heads each layer keeps at each position."""
    rows = np.repeat(np.array(counts)[:, None], size, axis=1)
    rows[:, :window] = every
    return jnp.asarray(rows)


def _check_layers(depth: int, **given: Sequence[float] | Sequence[int]) -> None:
    for name, values in given.items():
        if len(values) != depth:
            raise ConfigError(
                f"{name} must have a value for each of {depth} layers: got "
                f"{len(values)}"
            )
