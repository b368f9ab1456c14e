"""How long one token's attention takes with clusters of heads against all heads."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax import inference, kernels, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import jax

CLUSTERED = "clusters"
OWN = "kernel, k = H"
_FLOATS = ("query", "keys", "kept", "values")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A cache, and how attention over it is measured.

    Attributes:
      batch: requests.
      tokens: keys of each; all are seen.
      heads: H.
      clusters: k.
      head_dim: features of a head.
      compute: dtype of queries, keys and values.
      implementation: of clustered attention.
      dense: implementations of `jax.nn.dot_product_attention`.
      inner: attentions in one program, each waiting for the one before.
      repetitions: rounds of the measurement.
      seed: of all numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "batch": "2",
        "tokens": "16",
        "heads": "4",
        "clusters": "2",
        "head_dim": "8",
        "implementation": "reference",
        "dense": "[xla]",
        "inner": "2",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of one attention",
        "bytes": "candidate: of keys and values that it has to read",
        "error": ": largest difference from float32 in plain operations",
        "mixed": ": the same with the scores of other clusters",
    }

    batch: config.Size = 16
    tokens: config.Size = 8192
    heads: int = 32
    clusters: int = 4
    head_dim: int = 128
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    implementation: Literal["triton", "reference"] = "triton"
    dense: tuple[Literal["xla", "cudnn"], ...] = ("xla", "cudnn")
    inner: config.Size = 20
    repetitions: config.Several = 30
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.clusters <= self.heads:
            raise ConfigError(
                f"clusters must be in [1, heads]: got clusters={self.clusters}, "
                f"heads={self.heads}"
            )

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": (CLUSTERED, OWN, *self.dense),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times attention in turns in one process."""
    given = problem(cfg)
    measured = perf.compare(
        candidates(cfg, given), CLUSTERED, repetitions=cfg.repetitions, warmup=2
    )
    names = measured["candidate"].values
    dense = given["keys"].nbytes + given["values"].nbytes
    own = given["kept"].nbytes + given["values"].nbytes
    size = [own if name == CLUSTERED else dense for name in names]
    return runs.measured(
        {
            "seconds": measured["seconds"] / cfg.inner,
            "bytes": ("candidate", size),
            "error": error_of(cfg, given),
            "mixed": error_of(cfg, given, (given["assign"] + 1) % cfg.clusters),
        }
    )


def problem(cfg: Config) -> "dict[str, jax.Array]":
    """Returns queries, keys and values of unit variance, and random clusters."""
    import jax
    import jax.numpy as jnp

    first, second, third, fourth = jax.random.split(jax.random.key(cfg.seed), 4)
    cache = (cfg.batch, cfg.tokens, cfg.heads, cfg.head_dim)
    keys = jax.random.normal(second, cache, cfg.compute)
    assign, rep = inference.random_membership(
        fourth, cfg.batch, cfg.heads, cfg.clusters
    )
    every = jnp.arange(cfg.heads, dtype=jnp.int32)
    return {
        "query": jax.random.normal(first, (cfg.batch, 1, *cache[2:]), cfg.compute),
        "keys": keys,
        "kept": jnp.take_along_axis(keys, rep[:, None, :, None], axis=2),
        "values": jax.random.normal(third, cache, cfg.compute),
        "assign": assign,
        "rep": rep,
        "every": jnp.broadcast_to(every, (cfg.batch, cfg.heads)),
        "positions": jnp.full((cfg.batch, 1), cfg.tokens - 1, jnp.int32),
    }


def clustered(
    cfg: Config,
    given: "Mapping[str, jax.Array]",
    implementation: str,
    dtype: Any = None,
) -> "jax.Array":
    """Returns attention by clusters, `[batch, 1, heads, head_dim]`."""
    import jax.numpy as jnp

    return kernels.clustered_attention(
        jnp.take_along_axis(given["query"], given["rep"][:, None, :, None], axis=2),
        given["kept"],
        given["values"],
        given["assign"],
        given["positions"],
        implementation=implementation,
        dtype=dtype,
    )


def candidates(
    cfg: Config, given: "Mapping[str, jax.Array]"
) -> dict[str, Callable[[], Any]]:
    """Returns thunks of `cfg.inner` attentions each."""

    def asking(attend: Callable[..., Any]) -> Callable[..., Any]:
        return lambda query, given, _: attend({**given, "query": query})

    return {
        name: perf.chain_calls(asking(attend), given["query"], given, cfg.inner)
        for name, attend in attentions(cfg).items()
    }


def attentions(cfg: Config) -> dict[str, Callable[..., Any]]:
    """Returns what is timed, functions of a `problem`."""
    import functools

    import jax

    def by_clusters(given: Mapping[str, Any]) -> Any:
        return clustered(cfg, given, cfg.implementation)

    def by_heads(given: Mapping[str, Any]) -> Any:
        return kernels.clustered_attention(
            given["query"],
            given["keys"],
            given["values"],
            given["every"],
            given["positions"],
            implementation=cfg.implementation,
        )

    def by_jax(given: Mapping[str, Any], implementation: Any) -> Any:
        return jax.nn.dot_product_attention(
            given["query"],
            given["keys"],
            given["values"],
            implementation=implementation,
        )

    found = {CLUSTERED: by_clusters, OWN: by_heads}
    for name in cfg.dense:
        found[name] = functools.partial(by_jax, implementation=name)
    return found


def error_of(
    cfg: Config,
    given: "Mapping[str, jax.Array]",
    assign: "jax.Array | None" = None,
) -> float:
    """Returns how far the clusters' result is off for the first request.

    Args:
      cfg: the dtypes and the implementation.
      given: the problem.
      assign: the clusters of heads that are used instead of the problem's.
    """
    import jax
    import jax.numpy as jnp

    from hpcjax.core.extremes import largest

    one = {name: array[:1] for name, array in given.items()}
    wide = {
        name: array.astype("float32") if name in _FLOATS else array
        for name, array in one.items()
    }
    with jax.default_matmul_precision("highest"):
        expected = clustered(cfg, wide, "reference")
    used = one if assign is None else {**one, "assign": assign[:1]}
    found = clustered(cfg, used, cfg.implementation, "float32")
    return float(largest(jnp.abs(found - expected)))
