"""What clustered heads save: bytes of the cache and operations, from shapes alone.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import dataclasses
from collections.abc import Sequence

from hpcjax.core.errors import ConfigError, nearest

_MODES = ("within_group", "cross_group", "expand")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredHeads:
    """A model's heads, in clusters.

    Attributes:
      clusters: k of each layer.
      heads: query heads H of a layer.
      head_dim: d.
      kv_heads: key and value heads; None for as many as `heads`.
      mode: what is done where heads share keys; needed if and only if some do.
        `"within_group"`: clusters within the heads that share a key head, so that all
        keys stay. `"cross_group"`: a key head stays if a representative reads it.
        `"expand"`: keys and values are repeated for every head first; what is saved is
        saved of the repeated ones, which are heads / kv_heads times the model's own.

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
        """Returns the bytes of keys and values, batch · tokens · d · Σ (keys + values).

        Args:
          batch: requests.
          tokens: the cache's length.
          itemsize: bytes of a number.
          used: of `"cross_group"`, the key heads of each layer that a request's
            representatives read; None for those that are allocated, min(k, kv_heads).

        Raises:
          ConfigError: more key heads are used than are allocated, or another mode.
        """
        keys = self.key_heads(used)
        kept = sum(keys) + len(keys) * self._value_heads
        return batch * tokens * self.head_dim * itemsize * kept

    def dense_cache_bytes(self, batch: int, tokens: int, itemsize: int) -> int:
        """Returns the bytes without clusters; in mode `"expand"` those repeated."""
        kept = 2 * len(self.clusters) * self._value_heads
        return batch * tokens * self.head_dim * itemsize * kept

    def saving(self, used: Sequence[int] | None = None) -> float:
        """Returns the share of the cache that is saved, ½ (1 − Σ keys / Σ values)."""
        keys = self.key_heads(used)
        return (1 - sum(keys) / (len(keys) * self._value_heads)) / 2

    def key_heads(self, used: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns how many key heads each layer keeps; `used` as elsewhere."""
        if self.mode == "within_group":
            kept = (self._kv_heads,) * len(self.clusters)
        elif self.mode == "cross_group":
            kept = tuple(min(k, self._kv_heads) for k in self.clusters)
        else:
            kept = self.clusters
        if used is None:
            return kept
        if self.mode != "cross_group" or len(used) != len(kept):
            raise ConfigError(
                "used is for mode 'cross_group', a number for each layer: got "
                f"{len(used)} for {len(kept)} layers in mode {self.mode!r}"
            )
        for layer, (each, allocated) in enumerate(zip(used, kept, strict=True)):
            if not 1 <= each <= allocated:
                raise ConfigError(
                    f"layer {layer}: used must be in [1, {allocated}]: got {each}"
                )
        return tuple(used)

    def attention_flops(self, tokens: int) -> int:
        """Returns the operations of a query's attention, 2 · tokens · d · Σ (k + H).

        In all modes; projections and the softmax are not counted.

        Args:
          tokens: keys that the query sees.
        """
        products = sum(self.clusters) + len(self.clusters) * self.heads
        return 2 * tokens * self.head_dim * products

    def dense_attention_flops(self, tokens: int) -> int:
        """Returns those without clusters, 4 · tokens · d · H in each layer."""
        return 4 * tokens * self.head_dim * self.heads * len(self.clusters)

    def decode_speedup_bound(self, used: Sequence[int] | None = None) -> float:
        """Returns dense over clustered bytes, 2H / (H + k) without shared keys.

        A token's attention reads the whole cache once, and is no faster than that.
        """
        return 1 / (1 - self.saving(used))

    @property
    def _kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def _value_heads(self) -> int:
        return self.heads if self.mode == "expand" else self._kv_heads
