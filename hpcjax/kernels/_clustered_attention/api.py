"""Attention to a cache, of all heads or of clusters, and who computes it."""

from typing import Any

from jaxtyping import Array, Float, Int

from hpcjax.core.errors import ConfigError
from hpcjax.kernels._clustered_attention import blocked, launch, reference
from hpcjax.kernels._dispatch import INTERPRETED, choose


def cached_attention(
    query: Float[Array, "batch q_time heads head_dim"],
    keys: Float[Array, "*layers batch k_time kv_heads head_dim"],
    values: Float[Array, "*layers batch k_time kv_heads head_dim"],
    positions: Int[Array, "batch q_time"],
    *,
    layer: Int[Array, ""] | None = None,
    slopes: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch q_time heads head_dim"]:
    """Computes softmax(q kᵀ / √head_dim) v of each head with the keys of a cache.

    A query attends to the keys up to and including its own position. The cache is read
    in blocks and only as far as queries see: neither time nor memory depends on its
    room. Scores and sums are float32. There is no reverse gradient if the cache has
    more than one block.

    Args:
      query: new tokens' queries.
      keys: head h reads ⌊h · kv_heads / heads⌋; those that no query attends to may be
        any finite numbers.
      values: likewise.
      positions: of each query among the keys.
      layer: which of several layers' caches to read, without a copy of it; None if
        there is one, without the axis `layers`.
      slopes: what each head's scores lose with each place between query and key, see
        `layers.alibi_slopes`; None for nothing.

    Raises:
      ConfigError: kv_heads does not divide heads.

    Examples:
      >>> import jax
      >>> x, at = jax.numpy.ones((1, 5, 2, 8)), jax.numpy.array([[4]])
      >>> cached_attention(x[:, :1], x, x, at).shape
      (1, 1, 2, 8)
    """
    _check_groups(query.shape[2], values.shape[-2])
    return blocked.clustered_attention(
        query, keys, values, None, positions, layer=layer, slopes=slopes
    )


def clustered_attention(
    query: Float[Array, "batch q_time clusters head_dim"],
    keys: Float[Array, "*layers batch k_time key_heads head_dim"],
    values: Float[Array, "*layers batch k_time kv_heads head_dim"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch q_time"],
    *,
    key_heads: Int[Array, "batch clusters"] | None = None,
    layer: Int[Array, ""] | None = None,
    implementation: str = "auto",
    dtype: Any = None,
) -> Float[Array, "batch q_time heads head_dim"]:
    """Computes attention with one map for each cluster of heads.

    A_c = softmax(q_c K_cᵀ / √head_dim) is the map of cluster c, and o_h = A_{c(h)} V_h
    the output of head h, with its own values. Scores, probabilities and sums are
    float32. A query attends to the keys up to and including its own position; one with
    a negative position attends to none, and its output is zero.

    Args:
      query: queries of the clusters' representatives.
      keys: keys of the representatives, in a cache of any length; those that no query
        attends to may be any finite numbers.
      values: of all heads or, shared, of fewer: head h reads ⌊h · kv_heads / heads⌋.
      assign: the cluster of each head, in [0, clusters); no cluster is empty.
      positions: of each query among the keys.
      key_heads: the head of `keys` that each cluster reads; None if cluster c reads
        head c.
      layer: see `cached_attention`.
      implementation: `"reference"` for the definition, with all scores at once;
        `"blocked"` as `cached_attention`; `"triton"` for a GPU kernel, which takes one
        query and has no gradient; `"interpreted"` for the same by numpy, slowly;
        `"auto"` for the kernel on a GPU with one query, else for blocks.
      dtype: of the result; None for that of `query`.

    Raises:
      ConfigError: an unknown implementation, or numbers of heads that do not fit.
      UnsupportedOp: the kernel is named and cannot run here, or there are several
        queries.

    References:
      Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML
      2024.

    Examples:
      >>> import jax
      >>> x = jax.numpy.ones((1, 5, 3, 8))
      >>> assign, at = jax.numpy.array([[0, 1, 0]]), jax.numpy.array([[4]])
      >>> clustered_attention(x[:, :1, :2], x[:, :, :2], x, assign, at).shape
      (1, 1, 3, 8)
    """
    _check_groups(assign.shape[1], values.shape[-2])
    if key_heads is None and keys.shape[-2] != query.shape[2]:
        raise ConfigError(
            "keys must have a head for each cluster, or key_heads say which it reads: "
            f"got {keys.shape[-2]} heads, {query.shape[2]} clusters"
        )
    problem = launch.find_problem(query.shape[1])
    chosen = choose("clustered_attention", implementation, unsupported=problem)
    given = (query, keys, values, assign, positions)
    options = {"key_heads": key_heads, "dtype": dtype}
    if chosen == "blocked":
        return blocked.clustered_attention(*given, layer=layer, **options)
    if layer is not None:
        given = (query, keys[layer], values[layer], assign, positions)
    if chosen == "reference":
        return reference.clustered_attention(*given, **options)
    interpreted = chosen == INTERPRETED
    return launch.clustered_attention(*given, interpreted=interpreted, **options)


def _check_groups(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(
            f"kv_heads must divide heads: got kv_heads={kv_heads}, heads={heads}"
        )
