"""The cache of clustered heads: how it is filled, compacted and attended to.

A request goes through three phases. `probe` reads its first tokens with all heads;
`cluster_layers` clusters the heads by their attention maps; `compact` keeps the keys of
representatives only, with which `attend_clustered` reads all later tokens.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax import kernels, models
from hpcjax.core.keys import derive
from hpcjax.core.model import Decoder
from hpcjax.core.structs import pytree
from hpcjax.inference.config import Clustering
from hpcjax.inference.generation import LanguageModel
from hpcjax.inference.head_cluster_counts import ChaiPlan
from hpcjax.inference.head_clusters import (
    Membership,
    cluster_heads,
    key_slots,
)
from hpcjax.layers import attention_maps


@pytree
class ProbingMemory:
    """Keys and values of a run of layers, with the attention maps of all heads.

    Attributes:
      kept: keys and values.
      maps: softmaxed attention of the tokens read last, `[layers, batch, heads, time,
        time]`; without `layers` inside a layer.
    """

    kept: models.KeysValues
    maps: Float[Array, "*layers batch heads time time"]


@pytree
class ClusteredMemory:
    """Keys of representatives and values of all heads, of a run of layers.

    The index arrays that are None leave the heads as the model orders them.

    Attributes:
      kept: keys `[layers, batch, size, slots, head_dim]` and values `[layers, batch,
        size, value_heads, head_dim]`.
      rep: the representative query head of each cluster, `[layers, batch, clusters]`.
      assign: the cluster of each output head, `[layers, batch, mixed]`. Output heads
        are the query heads, or, with shared values, the clusters.
      stored: the model's key head in each slot, `[layers, batch, slots]`.
      slot: the slot that each cluster reads, `[layers, batch, clusters]`.
      values: the model's value head in each place, `[layers, batch, value_heads]`.
      spread: with shared values, the output head that each query head takes, `[layers,
        batch, heads]`.
    """

    kept: models.KeysValues
    rep: Int[Array, "*layers batch clusters"]
    assign: Int[Array, "*layers batch mixed"]
    stored: Int[Array, "*layers batch slots"] | None = None
    slot: Int[Array, "*layers batch clusters"] | None = None
    values: Int[Array, "*layers batch value_heads"] | None = None
    spread: Int[Array, "*layers batch heads"] | None = None


def attend_probing(
    memory: models.KeysValues, shared: Any, heads: models.Heads
) -> tuple[jax.Array, ProbingMemory, Any]:
    """Attends as `models.attend_cached`, and returns the attention maps as memory."""
    heads.require_no_slopes("clustered heads")
    mixed, kept, shared = models.attend_cached(memory, shared, heads)
    places = heads.positions
    seen = places[:, None, :] <= places[:, :, None]
    maps = attention_maps(heads.query, heads.key, seen)
    return mixed, ProbingMemory(kept=kept, maps=maps), shared


def attend_clustered(
    memory: ClusteredMemory, shared: Any, heads: models.Heads
) -> tuple[jax.Array, ClusteredMemory, Any]:
    """Writes the kept keys and values, and computes one attention map per cluster."""
    heads.require_no_slopes("clustered heads")
    stored = heads._replace(
        key=_take_heads(heads.key, memory.stored),
        value=_take_heads(heads.value, memory.values),
    )
    kept = models.write_heads(memory.kept, stored)
    mixed = kernels.clustered_attention(
        _take_heads(heads.query, memory.rep),
        kept.keys,
        kept.values,
        memory.assign,
        heads.positions,
        key_heads=memory.slot,
        layer=kept.layer,
    )
    memory = dataclasses.replace(memory, kept=kept)
    return _take_heads(mixed, memory.spread), memory, shared


def _take_heads(heads: jax.Array, chosen: jax.Array | None) -> jax.Array:
    """Gathers heads of each request.

    Args:
      heads: `[batch, time, heads, head_dim]`.
      chosen: indices of heads, `[batch, chosen]`; None takes all.

    Returns:
      `[batch, time, chosen, head_dim]`.
    """
    if chosen is None:
        return heads
    return jnp.take_along_axis(heads, chosen[:, None, :, None], axis=2)


@functools.partial(jax.jit, static_argnames="maps_only")
def probe(
    language_model: LanguageModel, tokens: Int[Array, "batch time"], *, maps_only: bool
) -> tuple[Float[Array, "layers batch heads time time"], models.Cache | None]:
    """Reads tokens with all heads and returns the attention map of each.

    Args:
      language_model: the model with its parameters.
      tokens: `[batch, time]`.
      maps_only: do not return the cache, so that none is kept in memory; the offline
        phase needs only maps.

    Returns:
      Softmaxed attention of every layer, and the cache of these tokens.
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
    (probing,) = cache.runs
    kept = dataclasses.replace(cache, runs=(probing.kept,))
    return probing.maps, None if maps_only else kept


def cluster_layers(
    maps: Float[Array, "layers batch heads time time"],
    plan: ChaiPlan,
    clustering: Clustering,
    *,
    kv_heads: int,
    key: jax.Array,
) -> tuple[Membership, ...]:
    """Clusters the heads of every layer, for each request by itself.

    Args:
      maps: attention maps of the first tokens, see `probe`.
      plan: the number of clusters of each layer.
      clustering: the method.
      kv_heads: key heads of the model; in mode "within_group", the query heads of each
        are clustered separately.
      key: draws the first centres, differently for each layer.

    Returns:
      A membership for each layer.
    """
    groups = kv_heads if clustering.mode == "within_group" else 1
    memberships: list[Membership] = []
    # The number of clusters is a shape: one vmap takes only layers with equal numbers.
    for clusters, layers in _group_runs(plan.clusters):
        cluster_run = functools.partial(
            _cluster_layer, clusters=clusters, clustering=clustering, groups=groups
        )
        run = jax.vmap(cluster_run, in_axes=(0, 0, None))(
            maps[layers.start : layers.stop], jnp.asarray(layers), key
        )
        memberships += [Membership(*rows) for rows in zip(*run, strict=True)]
    return tuple(memberships)


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


def _group_runs(clusters: Sequence[int]) -> list[tuple[int, range]]:
    """Groups neighbouring layers with equal numbers; returns number and layers."""
    runs, start = [], 0
    for count, run in itertools.groupby(clusters):
        end = start + len(list(run))
        runs.append((count, range(start, end)))
        start = end
    return runs


def compact(
    cache: models.Cache,
    memberships: Sequence[Membership],
    decoder: Decoder,
    clustering: Clustering,
    size: int,
) -> models.Cache:
    """Copies a cache, with only the keys and values that clusters need.

    Args:
      cache: keys and values of all heads, in one run.
      memberships: of each layer; a batch of one holds for all requests.
      decoder: sizes of the model.
      clustering: the mode, and whether values are shared.
      size: tokens that the new cache has room for.

    Returns:
      A cache with one run for each group of neighbouring layers with equally many
      clusters.
    """
    (whole,) = cache.runs
    batch, held = whole.keys.shape[1:3]
    padding = ((0, 0), (0, size - held), (0, 0), (0, 0))

    def compact_layer(
        kept: models.KeysValues, membership: Membership
    ) -> ClusteredMemory:
        indices = _index_heads(membership, decoder, clustering)
        kept = models.KeysValues(
            keys=jnp.pad(_take_heads(kept.keys, indices["stored"]), padding),
            values=jnp.pad(_take_heads(kept.values, indices["values"]), padding),
        )
        return ClusteredMemory(kept=kept, **indices)

    runs = []
    counts = [membership.rep.shape[1] for membership in memberships]
    for _, layers in _group_runs(counts):
        own = memberships[layers.start : layers.stop]
        # [layers, batch, …]; the jax.vmap below is over layers.
        stacked = jax.tree.map(
            lambda *rows: jnp.stack(
                [jnp.broadcast_to(row, (batch, row.shape[1])) for row in rows]
            ),
            *own,
        )
        kept = jax.tree.map(
            operator.itemgetter(slice(layers.start, layers.stop)), whole
        )
        runs.append(jax.vmap(compact_layer)(kept, stacked))
    return models.Cache(runs=tuple(runs), length=cache.length)


def _index_heads(
    membership: Membership, decoder: Decoder, clustering: Clustering
) -> dict[str, Any]:
    """Returns the index arrays of a layer's `ClusteredMemory`, by field."""
    assign, rep = membership
    batch, heads, kv_heads = len(rep), decoder.heads, decoder.kv_heads
    # Query head h reads key and value head h // (heads / kv_heads).
    rep_kv = rep // (heads // kv_heads)
    # One slot for each cluster, with the key head of its representative: the case of as
    # many key heads as query heads, and of mode "expand".
    indices: dict[str, Any] = {
        "rep": rep,
        "assign": assign,
        "stored": rep_kv,
        "slot": None,
        "values": None,
        "spread": None,
    }
    if clustering.mode == "within_group":
        # Every group has a representative, so that all key heads stay in their order.
        indices |= {"stored": None, "slot": rep_kv}
    elif clustering.mode == "cross_group":
        slots = key_slots(rep, heads, kv_heads)
        indices |= {"stored": slots.head, "slot": slots.slot}
    elif clustering.mode == "expand":
        repeated = jnp.arange(heads) // (heads // kv_heads)
        indices |= {"values": jnp.broadcast_to(repeated, (batch, heads))}
    if clustering.share_values:
        # One output per cluster, with the representative's values; `spread` then copies
        # it to all heads of the cluster.
        clusters = jnp.broadcast_to(jnp.arange(rep.shape[1]), rep.shape)
        indices |= {"values": rep_kv, "assign": clusters, "spread": assign}
    return indices


def cache_bytes(cache: models.Cache) -> int:
    """Returns the bytes of a cache's keys and values in memory."""
    return sum(leaf.nbytes for run in cache.runs for leaf in jax.tree.leaves(run.kept))
