"""CHAI: decoding with one attention map for each cluster of heads.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpcjax import kernels, models
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.model import Decoder
from hpcjax.core.structs import pytree
from hpcjax.inference.config import Clustering, Continuation
from hpcjax.inference.generation import (
    Generated,
    LanguageModel,
    Prompts,
    checked_prompts,
    follow,
    take_back,
)
from hpcjax.inference.head_clusters import (
    Membership,
    cluster_heads,
    key_slots,
)
from hpcjax.inference.head_elbow import ChaiPlan
from hpcjax.inference.scoring import check_text, decoded_losses
from hpcjax.layers import attention_maps


@pytree
class Probed:
    """Keys and values of a run of layers, and what their heads attended to.

    Attributes:
      kept: keys and values.
      maps: softmax of the scores of the tokens read last, `[layers, batch, heads, time,
        time]`; without `layers` inside one.
    """

    kept: models.KeysValues
    maps: Float[Array, "*layers batch heads time time"]


@pytree
class Clustered:
    """Keys of representatives, values of all heads, of a run of layers.

    What is None changes nothing: all heads in their order.

    Attributes:
      kept: keys `[layers, batch, size, slots, head_dim]` and values.
      rep: the query head that speaks for each cluster, `[layers, batch, clusters]`.
      stored: the model's key head in each slot, `[layers, batch, slots]`.
      slot: the slot that a cluster reads, `[layers, batch, clusters]`.
      values: the model's value head in each place, `[layers, batch, value_heads]`.
      assign: the cluster whose map a head, or with shared values a place, is mixed by.
      spread: the place that a head takes, with shared values.
    """

    kept: models.KeysValues
    rep: Int[Array, "*layers batch clusters"]
    assign: Int[Array, "*layers batch mixed"]
    stored: Int[Array, "*layers batch slots"] | None = None
    slot: Int[Array, "*layers batch clusters"] | None = None
    values: Int[Array, "*layers batch value_heads"] | None = None
    spread: Int[Array, "*layers batch heads"] | None = None


class ClusteredResult(NamedTuple):
    """What follows the prompts, and at what cost.

    Attributes:
      generated: the tokens.
      memberships: of each layer.
      cache_bytes: keys and values together, as they were in memory.
    """

    generated: Generated
    memberships: tuple[Membership, ...]
    cache_bytes: int


def attend_probing(
    memory: models.KeysValues, shared: Any, heads: models.Heads
) -> tuple[jax.Array, Probed, Any]:
    """Attends as `models.attend_cached` and remembers the maps among these tokens."""
    mixed, kept, shared = models.attend_cached(memory, shared, heads)
    places = heads.positions
    seen = places[:, None, :] <= places[:, :, None]
    maps = attention_maps(heads.query, heads.key, seen)
    return mixed, Probed(kept=kept, maps=maps), shared


def attend_clustered(
    memory: Clustered, shared: Any, heads: models.Heads
) -> tuple[jax.Array, Clustered, Any]:
    """Writes what is kept of keys and values, and attends once for each cluster."""
    stored = heads._replace(
        key=_take(heads.key, memory.stored), value=_take(heads.value, memory.values)
    )
    kept = models.write_heads(memory.kept, stored)
    mixed = kernels.clustered_attention(
        _take(heads.query, memory.rep),
        kept.keys,
        kept.values,
        memory.assign,
        heads.positions,
        key_heads=memory.slot,
    )
    memory = dataclasses.replace(memory, kept=kept)
    return _take(mixed, memory.spread), memory, shared


def _take(heads: jax.Array, chosen: jax.Array | None) -> jax.Array:
    """Returns `[batch, time, chosen, head_dim]` of `[batch, time, heads, head_dim]`."""
    if chosen is None:
        return heads
    return jnp.take_along_axis(heads, chosen[:, None, :, None], axis=2)


@functools.partial(jax.jit, static_argnames="maps_only")
def probe(
    language_model: LanguageModel, tokens: Int[Array, "batch time"], *, maps_only: bool
) -> tuple[Float[Array, "layers batch heads time time"], models.Cache | None]:
    """Reads tokens with all heads and returns what each attended to.

    Args:
      language_model: the model with its parameters.
      tokens: `[batch, time]`.
      maps_only: leaves the cache out, as the offline phase wants it.

    Returns:
      Softmaxed scores of every layer, and the cache of these tokens.
    """
    batch, time = tokens.shape
    _, cache = language_model.decode(
        models.Decoding(
            tokens=tokens,
            cache=models.empty_cache(language_model.model, batch, time),
            at=jnp.zeros((batch, 1), jnp.int32),
            attend=attend_probing,
        )
    )
    (found,) = cache.runs
    kept = dataclasses.replace(cache, runs=(found.kept,))
    return found.maps, None if maps_only else kept


def cluster_layers(
    maps: Float[Array, "layers batch heads time time"],
    plan: ChaiPlan,
    clustering: Clustering,
    *,
    kv_heads: int,
    key: jax.Array,
) -> tuple[Membership, ...]:
    """Clusters the heads of every layer for each request; k of the plan for each.

    Args:
      maps: of the first tokens, see `probe`.
      plan: k of each layer.
      clustering: how.
      kv_heads: of the model; heads that share one are clustered apart in mode
        "within_group".
      key: draws first centres, another for each layer.
    """
    groups = kv_heads if clustering.mode == "within_group" else 1
    found: list[Membership] = []
    for clusters, layers in _runs(plan.clusters):
        one = functools.partial(
            _cluster_layer, clusters=clusters, clustering=clustering, groups=groups
        )
        run = jax.vmap(one, in_axes=(0, 0, None))(
            maps[layers.start : layers.stop], jnp.asarray(layers), key
        )
        found += [Membership(*rows) for rows in zip(*run, strict=True)]
    return tuple(found)


def _cluster_layer(
    maps: jax.Array,
    layer: jax.Array,
    key: jax.Array,
    *,
    clusters: int,
    clustering: Clustering,
    groups: int,
) -> Membership:
    return cluster_heads(
        maps,
        clusters,
        method=clustering.method,
        representative=clustering.representative,
        groups=groups,
        key=derive(key, "layer", layer),
    )


def _runs(clusters: Sequence[int]) -> list[tuple[int, range]]:
    """Returns each number that neighbouring layers share, and those layers."""
    found, start = [], 0
    for count, run in itertools.groupby(clusters):
        end = start + len(list(run))
        found.append((count, range(start, end)))
        start = end
    return found


def compact(
    cache: models.Cache,
    memberships: Sequence[Membership],
    decoder: Decoder,
    clustering: Clustering,
    size: int,
) -> models.Cache:
    """Returns a cache of `size` tokens that holds only what clusters need.

    Args:
      cache: keys and values of all heads, in one run.
      memberships: of each layer; a batch of one holds for all requests.
      decoder: the model's sizes.
      clustering: mode, and whether values are shared.
      size: tokens there is room for.

    Returns:
      A cache with a run for neighbouring layers of equally many clusters.
    """
    (whole,) = cache.runs
    batch, held = whole.keys.shape[1:3]
    more = ((0, 0), (0, size - held), (0, 0), (0, 0))

    def one(kept: models.KeysValues, membership: Membership) -> Clustered:
        chosen = _chosen(membership, decoder, clustering)
        kept = models.KeysValues(
            keys=jnp.pad(_take(kept.keys, chosen["stored"]), more),
            values=jnp.pad(_take(kept.values, chosen["values"]), more),
        )
        return Clustered(kept=kept, **chosen)

    runs = []
    for _, layers in _runs([membership.rep.shape[1] for membership in memberships]):
        own = memberships[layers.start : layers.stop]
        stacked = jax.tree.map(
            lambda *rows: jnp.stack(
                [jnp.broadcast_to(row, (batch, row.shape[1])) for row in rows]
            ),
            *own,
        )
        kept = jax.tree.map(
            operator.itemgetter(slice(layers.start, layers.stop)), whole
        )
        runs.append(jax.vmap(one)(kept, stacked))
    return models.Cache(runs=tuple(runs), length=cache.length)


def _chosen(
    membership: Membership, decoder: Decoder, clustering: Clustering
) -> dict[str, Any]:
    """Returns what a layer keeps and who reads it, the fields of `Clustered`."""
    assign, rep = membership
    batch, heads, kv_heads = len(rep), decoder.heads, decoder.kv_heads
    head_of = rep // (heads // kv_heads)
    found: dict[str, Any] = {
        "rep": rep,
        "assign": assign,
        "stored": head_of,
        "slot": None,
        "values": None,
        "spread": None,
    }
    if clustering.mode == "within_group":
        found |= {"stored": None, "slot": head_of}
    elif clustering.mode == "cross_group":
        slots = key_slots(rep, heads, kv_heads)
        found |= {"stored": slots.head, "slot": slots.slot}
    elif clustering.mode == "expand":
        every = jnp.arange(heads) // (heads // kv_heads)
        found |= {"values": jnp.broadcast_to(every, (batch, heads))}
    if clustering.share_values:
        places = jnp.broadcast_to(jnp.arange(rep.shape[1]), rep.shape)
        found |= {"values": head_of, "assign": places, "spread": assign}
    return found


def cache_bytes(cache: models.Cache) -> int:
    """Returns the bytes of keys and values as they lie in memory."""
    return sum(leaf.nbytes for run in cache.runs for leaf in jax.tree.leaves(run.kept))


def generate_clustered(
    language_model: LanguageModel,
    prompts: Prompts,
    plan: ChaiPlan,
    options: Continuation | None = None,
    clustering: Clustering | None = None,
    *,
    key: jax.Array,
    memberships: Sequence[Membership] | None = None,
) -> ClusteredResult:
    """Continues prompts with clusters of heads, chosen for each request.

    The first tokens of a prompt are read with all heads; their maps say which heads go
    together. From then on a cluster has one map, its representative's, and only
    representatives have keys in the cache. The cache of all heads never has room for
    more than the first tokens.

    Args:
      language_model: the model with its parameters.
      prompts: see `pad_prompts`; longer than the window.
      plan: the number of clusters of each layer.
      options: how many tokens, and how they are drawn; None for the defaults.
      clustering: how heads are clustered; None for the defaults.
      key: of the draws.
      memberships: of each layer, instead of those found in the first tokens; a batch of
        one holds for all requests.

    Raises:
      ConfigError: a prompt that is not longer than the window, a plan that does not fit
        the model, a mode that does not, memberships that do not fit the plan, and what
        `generate` refuses.
    """
    options, clustering = options or Continuation(), clustering or Clustering()
    prompts = checked_prompts(language_model, prompts, options)
    _check(language_model, plan, clustering)
    shortest = int(prompts.lengths.min())
    if shortest <= clustering.window:
        raise ConfigError(
            f"a prompt must have at least {clustering.window + 1} tokens, one more "
            f"than the window: got {shortest}"
        )
    size = prompts.tokens.shape[1] + options.max_new_tokens
    cache, found = _begin(
        language_model, prompts.tokens, plan, clustering, size, key, memberships
    )
    generated = _continue(
        language_model,
        cache,
        prompts,
        key,
        window=clustering.window,
        options=options,
    )
    return ClusteredResult(generated, found, cache_bytes(cache))


def clustered_losses(
    language_model: LanguageModel,
    tokens: Int[Array, "batch time"],
    plan: ChaiPlan,
    clustering: Clustering | None = None,
    *,
    key: jax.Array,
    memberships: Sequence[Membership] | None = None,
) -> Float[Array, "batch ahead"]:
    """Returns −log p(token | those before it) of the tokens that clusters foretell.

    Arguments as for `generate_clustered`.

    Returns:
      `[batch, time − window − 1]`, of the tokens behind the first one that is read with
      clusters; float32, in nats.
    """
    clustering = clustering or Clustering()
    _check(language_model, plan, clustering)
    size = tokens.shape[1]
    check_text(size, clustering.window)
    cache, _ = _begin(language_model, tokens, plan, clustering, size, key, memberships)
    rest = tokens[:, clustering.window :]
    x = models.Decoding(tokens=rest[:, :-1], cache=cache, attend=attend_clustered)
    return decoded_losses(language_model, x, rest[:, 1:])


def _check(
    language_model: LanguageModel, plan: ChaiPlan, clustering: Clustering
) -> None:
    decoder = models.decoder_of(language_model.model)
    plan.check(decoder.depth, decoder.heads)
    shared = decoder.kv_heads != decoder.heads
    if shared != (clustering.mode is not None):
        raise ConfigError(
            "mode says what is done where heads share keys, and only there: got "
            f"mode={clustering.mode!r}, heads={decoder.heads}, "
            f"kv_heads={decoder.kv_heads}; take 'within_group', 'cross_group' or "
            "'expand'"
        )


def _begin(
    language_model: LanguageModel,
    tokens: jax.Array,
    plan: ChaiPlan,
    clustering: Clustering,
    size: int,
    key: jax.Array,
    memberships: Sequence[Membership] | None,
) -> tuple[models.Cache, tuple[Membership, ...]]:
    """Reads the window and returns the clusters' cache."""
    decoder = models.decoder_of(language_model.model)
    first = tokens[:, : clustering.window]
    maps, cache = probe(language_model, first, maps_only=False)
    if memberships is None:
        memberships = _cluster_layers(
            maps,
            plan,
            clustering,
            kv_heads=decoder.kv_heads,
            key=derive(key, "clusters"),
        )
    else:
        _check_memberships(memberships, plan, len(tokens), decoder.heads)
    made = _compact(
        cache,
        tuple(memberships),
        decoder=decoder,
        clustering=clustering,
        size=size,
    )
    for leaf in jax.tree.leaves(cache.runs):
        leaf.delete()
    return made, tuple(memberships)


def _check_memberships(
    memberships: Sequence[Membership], plan: ChaiPlan, batch: int, heads: int
) -> None:
    clusters = [membership.rep.shape[1] for membership in memberships]
    rule = f"memberships must have the plan's {plan.clusters} clusters"
    checks.require(clusters == list(plan.clusters), rule, clusters=clusters)
    for layer, (assign, rep) in enumerate(memberships):
        of = f"layer {layer}: a membership must be of 1 or {batch} requests,"
        good = assign.shape == (len(rep), heads) and len(rep) in (1, batch)
        rule = f"{of} {heads} heads"
        checks.require(good, rule, assign=assign.shape, rep=rep.shape)
        for name, values, end in (
            ("assign", np.asarray(assign), rep.shape[1]),
            ("rep", np.asarray(rep), heads),
        ):
            good = bool(values.min() >= 0 and values.max() < end)
            rule = f"layer {layer}: {name} must be in 0 … {end - 1}"
            checks.require(good, rule, values=values.tolist())


_cluster_layers = jax.jit(
    cluster_layers, static_argnames=("plan", "clustering", "kv_heads")
)
_compact = jax.jit(compact, static_argnames=("decoder", "clustering", "size"))


@functools.partial(jax.jit, static_argnames=("window", "options"))
def _continue(
    language_model: LanguageModel,
    cache: models.Cache,
    prompts: Prompts,
    key: jax.Array,
    *,
    window: int,
    options: Continuation,
) -> Generated:
    x = models.Decoding(
        tokens=prompts.tokens[:, window:],
        cache=cache,
        at=prompts.lengths[:, None] - 1 - window,
        attend=attend_clustered,
    )
    logits, cache = language_model.decode(x)
    cache = take_back(cache, prompts.lengths)
    return follow(
        language_model, cache, logits[:, 0], options, key, attend=attend_clustered
    )
