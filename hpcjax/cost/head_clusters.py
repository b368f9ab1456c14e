"""Bytes of the key-value cache and operations that clustered attention heads save.

The heads of a cluster share the attention weights, and so the queries and keys, of one
representative. Every head keeps its own values.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import dataclasses
from collections.abc import Sequence

from hpcjax.core.errors import ConfigError, nearest

_MODES = ("within_group", "cross_group", "expand")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredHeads:
    """Numbers of heads and clusters in the layers of a model.

    Attributes:
      clusters: k, the number of clusters, of each layer.
      heads: H, query heads of a layer.
      head_dim: d.
      kv_heads: key and value heads of a layer; None for `heads`.
      mode: how to cluster with grouped-query attention; None if and only if every query
        head has a key head of its own.
        `"within_group"`: clusters are formed among the query heads that share a key
        head; all keys are kept. `"cross_group"`: clusters are formed among all heads,
        and a key head is kept if a representative reads it. `"expand"`: keys and values
        are first repeated for every query head, so that savings are relative to a cache
        `heads / kv_heads` times as large as the model's own.

    Examples:
      >>> layers = ClusteredHeads(clusters=(32, 32, 4), heads=32, head_dim=128)
      >>> round(layers.saving(), 3)
      0.146
    """

    clusters: tuple[int, ...]
    heads: int
    head_dim: int
    kv_heads: int | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        shared = self._kv_heads
        if shared < 1 or self.heads % shared:
            raise ConfigError(
                f"kv_heads must divide heads: got kv_heads={shared}, heads={self.heads}"
            )
        if (self.mode is None) != (shared == self.heads):
            raise ConfigError(
                f"mode must be one of {_MODES} if heads share keys, and None if not: "
                f"got mode={self.mode!r}, kv_heads={shared}, heads={self.heads}"
            )
        if self.mode is not None and self.mode not in _MODES:
            raise ConfigError(f"no mode {self.mode!r}{nearest(self.mode, _MODES)}")
        if not self.clusters:
            raise ConfigError("clusters must be of at least one layer")
        for layer, clusters in enumerate(self.clusters):
            if not 1 <= clusters <= self.heads:
                raise ConfigError(
                    f"layer {layer}: clusters must be in [1, {self.heads}]: got "
                    f"{clusters}"
                )
            if self.mode == "within_group" and clusters % shared:
                raise ConfigError(
                    f"layer {layer}: clusters must be a multiple of {shared} key heads "
                    f"within groups: got {clusters}"
                )

    def kv_cache_bytes(
        self, batch: int, tokens: int, itemsize: int, used: Sequence[int] | None = None
    ) -> int:
        """Returns the bytes of the key-value cache.

        They are batch · tokens · d · itemsize · Σ (key heads + value heads), summed
        over layers.

        Args:
          batch: requests.
          tokens: length of the cache.
          itemsize: bytes of a value.
          used: in mode `"cross_group"`, the key heads of each layer that the
            representatives read; None for the allocated ones, min(k, kv_heads).

        Raises:
          ConfigError: more key heads are used than are allocated, or another mode.
        """
        keys = self.key_heads(used)
        cached_heads = sum(keys) + len(keys) * self._value_heads
        return batch * tokens * self.head_dim * itemsize * cached_heads

    def dense_cache_bytes(self, batch: int, tokens: int, itemsize: int) -> int:
        """Returns the bytes without clusters; in mode `"expand"` of the repeated cache.

        Args:
          batch: requests.
          tokens: length of the cache.
          itemsize: bytes of a value.
        """
        cached_heads = 2 * len(self.clusters) * self._value_heads
        return batch * tokens * self.head_dim * itemsize * cached_heads

    def saving(self, used: Sequence[int] | None = None) -> float:
        """Returns the share of the cache that is saved, ½ (1 − Σ keys / Σ values).

        Args:
          used: as in `kv_cache_bytes`.
        """
        keys = self.key_heads(used)
        # Clustered over dense bytes are (keys + values) / (2 values), since the dense
        # cache has as many keys as values.
        return (1 - sum(keys) / (len(keys) * self._value_heads)) / 2

    def key_heads(self, used: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the number of key heads that each layer keeps.

        Args:
          used: as in `kv_cache_bytes`.
        """
        if self.mode == "within_group":
            allocated = (self._kv_heads,) * len(self.clusters)
        elif self.mode == "cross_group":
            # k representatives read at most k key heads, and fewer if some share one.
            allocated = tuple(min(k, self._kv_heads) for k in self.clusters)
        else:
            allocated = self.clusters
        if used is None:
            return allocated
        if self.mode != "cross_group" or len(used) != len(allocated):
            raise ConfigError(
                "used is for mode 'cross_group', a number for each layer: got "
                f"{len(used)} for {len(allocated)} layers in mode {self.mode!r}"
            )
        for layer, (count, most) in enumerate(zip(used, allocated, strict=True)):
            if not 1 <= count <= most:
                raise ConfigError(
                    f"layer {layer}: used must be in [1, {most}]: got {count}"
                )
        return tuple(used)

    def attention_flops(self, tokens: int) -> int:
        """Returns the operations of one query's attention, 2 · tokens · d · Σ (k + H).

        The formula holds in all modes. Projections and the softmax are not counted.

        Args:
          tokens: number of keys that the query attends to.
        """
        # k clusters compute scores q · K, all H heads the product with their values; a
        # multiplication and an addition are two operations.
        products = sum(self.clusters) + len(self.clusters) * self.heads
        return 2 * tokens * self.head_dim * products

    def dense_attention_flops(self, tokens: int) -> int:
        """Returns the operations without clusters, 4 · tokens · d · H in each layer.

        Args:
          tokens: number of keys that the query attends to.
        """
        return 4 * tokens * self.head_dim * self.heads * len(self.clusters)

    @property
    def _kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def _value_heads(self) -> int:
        return self.heads if self.mode == "expand" else self._kv_heads
