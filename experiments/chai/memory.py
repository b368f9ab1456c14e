"""Bytes of the caches that published plans leave, as they lie in memory."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax import core, cost, inference, models, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model's heads, in clusters.

    Attributes:
      heads: H of each layer.
      kv_heads: those of keys and values.
      head_dim: features of a head.
      layers: how many neighbouring layers have the same k.
      clusters: that k, of each run of layers.
      mode: what is done where heads share keys, see `cost.ClusteredHeads`.
      tokens: of the cache that is measured.
      window: tokens that all heads' keys are kept of before.
      seed: of random memberships; they change no byte that is allocated.
    """

    smoke: ClassVar[Mapping[str, str]] = {"tokens": "6", "window": "2"}
    figures: ClassVar[Mapping[str, str]] = {
        "bytes formula": ": of the cache, in memory and by formula",
        "dense": ": bytes of all heads, in mode expand repeated",
        "native": ": bytes that the model has without clusters",
        "share": ": of clusters in heads",
        "used": ": share of the bytes that is read",
    }

    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    layers: tuple[int, ...] = (18, 14)
    clusters: tuple[int, ...] = (32, 4)
    mode: Literal["within_group", "cross_group", "expand"] | None = None
    tokens: int = 64
    window: int = 5
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= self.tokens:
            raise ConfigError(
                f"window must be in [1, tokens]: got window={self.window}, "
                f"tokens={self.tokens}"
            )

    @property
    def plan(self) -> tuple[int, ...]:
        """Returns k of every layer; a ConfigError where the two lists do not fit."""
        if len(self.layers) != len(self.clusters) or min(self.layers, default=0) < 1:
            raise ConfigError(
                "layers must be counts, one for each of clusters: got "
                f"layers={self.layers}, clusters={self.clusters}"
            )
        runs = zip(self.layers, self.clusters, strict=True)
        return tuple(k for layers, k in runs for _ in range(layers))

    def accounting(self) -> "cost.ClusteredHeads":
        """Returns the formulas of these clusters."""
        return cost.ClusteredHeads(
            clusters=self.plan,
            heads=self.heads,
            head_dim=self.head_dim,
            kv_heads=self.kv_heads,
            mode=self.mode,
        )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compacts a cache of zeros, as the inference does, and counts its bytes."""
    import jax
    import jax.numpy as jnp

    formulas, depth = cfg.accounting(), len(cfg.plan)
    decoder = core.Decoder(
        depth, cfg.heads, cfg.kv_heads, cfg.head_dim, 1, cfg.tokens, "float16"
    )
    key = jax.random.key(cfg.seed)
    groups = cfg.kv_heads if cfg.mode == "within_group" else 1
    memberships = [
        inference.random_membership(
            core.derive(key, "layer", layer), 1, cfg.heads, clusters, groups=groups
        )
        for layer, clusters in enumerate(cfg.plan)
    ]
    shape = (depth, 1, cfg.window, cfg.kv_heads, cfg.head_dim)
    whole = models.KeysValues(
        keys=jnp.zeros(shape, "float16"), values=jnp.zeros(shape, "float16")
    )
    cache = models.Cache(runs=(whole,), length=jnp.full(1, cfg.window))
    options = inference.Clustering(window=cfg.window, mode=cfg.mode)
    made = inference.compact(cache, memberships, decoder, options, cfg.tokens)
    sizes = (1, cfg.tokens, 2)
    formula = read = formulas.kv_cache_bytes(*sizes)
    if cfg.mode == "cross_group":
        slots = [
            inference.key_slots(each.rep, cfg.heads, cfg.kv_heads)
            for each in memberships
        ]
        read = formulas.kv_cache_bytes(*sizes, [each.used.item() for each in slots])
    return runs.measured(
        {
            "bytes": inference.cache_bytes(made),
            "formula": formula,
            "dense": formulas.dense_cache_bytes(*sizes),
            "native": 2 * 2 * cfg.tokens * depth * cfg.kv_heads * cfg.head_dim,
            "share": sum(cfg.plan) / (depth * cfg.heads),
            "used": read / formula,
        }
    )
