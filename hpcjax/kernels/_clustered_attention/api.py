"""Clustered attention: checks, and the choice of an implementation."""

import functools
import logging
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.kernels._clustered_attention import reference

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "reference", "pallas")


def clustered_attention(
    query: Float[Array, "batch q_time clusters head_dim"],
    keys: Float[Array, "batch k_time key_heads head_dim"],
    values: Float[Array, "batch k_time kv_heads head_dim"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch q_time"],
    *,
    key_heads: Int[Array, "batch clusters"] | None = None,
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
      implementation: `"reference"` for plain JAX; `"pallas"` for a GPU kernel, which
        takes one query and has no gradient; `"auto"` for the kernel on a GPU with one
        query.
      dtype: of the result; None for that of `query`.

    Raises:
      ConfigError: an unknown implementation, or numbers of heads that do not fit.
      UnsupportedOp: several queries with `"pallas"`.

    References:
      Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML
      2024.

    Examples:
      >>> x = jax.numpy.ones((1, 5, 3, 8))
      >>> assign, at = jax.numpy.array([[0, 1, 0]]), jax.numpy.array([[4]])
      >>> clustered_attention(x[:, :1, :2], x[:, :, :2], x, assign, at).shape
      (1, 1, 3, 8)
    """
    if implementation not in IMPLEMENTATIONS:
        hint = nearest(implementation, IMPLEMENTATIONS)
        raise ConfigError(f"no implementation {implementation!r}{hint}")
    heads, kv_heads = assign.shape[1], values.shape[2]
    if heads % kv_heads:
        raise ConfigError(
            f"kv_heads must divide heads: got kv_heads={kv_heads}, heads={heads}"
        )
    if key_heads is None and keys.shape[2] != query.shape[2]:
        raise ConfigError(
            "keys must have a head for each cluster, or key_heads say which it reads: "
            f"got {keys.shape[2]} heads, {query.shape[2]} clusters"
        )
    if implementation == "auto":
        implementation = _choose(jax.default_backend(), query.shape[1] == 1)
    if implementation == "reference":
        attend = reference.clustered_attention
    else:
        from hpcjax.kernels._clustered_attention import pallas

        attend = pallas.clustered_attention
    return attend(
        query, keys, values, assign, positions, key_heads=key_heads, dtype=dtype
    )


@functools.cache
def _choose(backend: str, one_query: bool) -> str:
    chosen = "pallas" if backend == "gpu" and one_query else "reference"
    log.info("clustered_attention: %s on %s, %s", chosen, backend, one_query)
    return chosen
