"""CHAI: decoding with one attention map for each cluster of heads.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from hpcjax import models
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.inference.clustered_cache import (
    attend_clustered,
    cache_bytes,
    cluster_layers,
    compact,
    probe,
)
from hpcjax.inference.config import Clustering, Continuation
from hpcjax.inference.generation import (
    Generated,
    LanguageModel,
    Prompts,
    continue_tokens,
    prepare_prompts,
    truncate_cache,
)
from hpcjax.inference.head_cluster_counts import ChaiPlan
from hpcjax.inference.head_clusters import Membership
from hpcjax.inference.scoring import check_text, decoded_losses


class ClusteredResult(NamedTuple):
    """Continuations of prompts, with the clusters and the size of the cache.

    Attributes:
      generated: the new tokens.
      memberships: the clusters of each layer.
      cache_bytes: bytes of all keys and values in memory.
    """

    generated: Generated
    memberships: tuple[Membership, ...]
    cache_bytes: int


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
    """Continues prompts with clustered heads; the clusters depend on the prompt.

    The first tokens of a prompt are read with all heads, whose attention maps decide
    the clusters. From then on, all heads of a cluster use the attention map of its
    representative, and only the keys of representatives are in the cache. The cache of
    all heads has room for the first tokens only.

    Args:
      language_model: the model with its parameters.
      prompts: see `pad_prompts`; longer than the window.
      plan: the number of clusters of each layer.
      options: how many tokens, and how they are drawn; None for the defaults.
      clustering: how heads are clustered; None for the defaults.
      key: of the draws.
      memberships: clusters of each layer to use instead; a batch of one holds for all
        requests.

    Raises:
      ConfigError: a prompt that is not longer than the window; a plan or a mode that
        does not fit the model; memberships that do not fit the plan; and whatever
        `generate` raises.
    """
    options, clustering = options or Continuation(), clustering or Clustering()
    prompts = prepare_prompts(language_model, prompts, options)
    _check(language_model, plan, clustering)
    shortest = int(prompts.lengths.min())
    if shortest <= clustering.window:
        raise ConfigError(
            f"a prompt must have at least {clustering.window + 1} tokens, one more "
            f"than the window: got {shortest}"
        )
    size = prompts.tokens.shape[1] + options.max_new_tokens
    cache, used = _begin(
        language_model, prompts.tokens, plan, clustering, size, key, memberships
    )
    size_in_bytes = cache_bytes(cache)
    generated, _ = _continue(
        language_model,
        cache,
        prompts,
        key,
        window=clustering.window,
        options=options,
    )
    return ClusteredResult(generated, used, size_in_bytes)


def clustered_losses(
    language_model: LanguageModel,
    tokens: Int[Array, "batch time"],
    plan: ChaiPlan,
    clustering: Clustering | None = None,
    *,
    key: jax.Array,
    memberships: Sequence[Membership] | None = None,
) -> Float[Array, "batch ahead"]:
    """Returns −log p(token | tokens before it) of tokens predicted with clusters.

    The arguments are those of `generate_clustered`.

    Returns:
      `[batch, time − window − 1]`, float32, in nats: the first token read with clusters
      is number `window`, and the first that is predicted with them the one behind it.
    """
    clustering = clustering or Clustering()
    _check(language_model, plan, clustering)
    size = tokens.shape[1]
    check_text(size, clustering.window)
    cache, _ = _begin(language_model, tokens, plan, clustering, size, key, memberships)
    # Behind the window, all tokens but the last are read, which predict the next ones.
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
    """Reads the window with all heads; returns the compacted cache and the clusters."""
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
    compacted = _compact(
        cache,
        tuple(memberships),
        decoder=decoder,
        clustering=clustering,
        size=size,
    )
    # Freed now: their shapes differ from the new ones, so that donation could not reuse
    # the memory.
    for leaf in jax.tree.leaves(cache.runs):
        leaf.delete()
    return compacted, tuple(memberships)


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


# The cache is donated and returned, so that its memory is written where it is.
@functools.partial(
    jax.jit, static_argnames=("window", "options"), donate_argnames="cache"
)
def _continue(
    language_model: LanguageModel,
    cache: models.Cache,
    prompts: Prompts,
    key: jax.Array,
    *,
    window: int,
    options: Continuation,
) -> tuple[Generated, models.Cache]:
    # The window has been read with all heads: position p of a prompt is p - window.
    x = models.Decoding(
        tokens=prompts.tokens[:, window:],
        cache=cache,
        at=prompts.lengths[:, None] - 1 - window,
        attend=attend_clustered,
    )
    logits, cache = language_model.decode(x)
    cache = truncate_cache(cache, prompts.lengths)
    return continue_tokens(
        language_model, cache, logits[:, 0], options, key, attend=attend_clustered
    )
