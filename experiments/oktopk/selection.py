"""How long finding the largest entries takes: a threshold, or an exact top-k."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hpcjax import collectives, kernels, perf, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A vector of normal numbers, and how its selection is measured.

    Attributes:
      numbers: n.
      density: of what is selected.
      repetitions: rounds of the measurement.
      seed: of the numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {"numbers": "5000", "repetitions": "2"}
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a selection, or of a copy",
        "numbers": ": there are",
    }

    numbers: config.Size = 14_728_266
    density: config.Fraction = 0.02
    repetitions: config.Size = 20
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": ("lax.top_k", "exact", "threshold", "copy"),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times selections in turns in one process."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(cfg.seed), (cfg.numbers,))
    k = collectives.entries_wanted(cfg.density, cfg.numbers)
    edge = jax.jit(lambda x: kernels.kth_magnitude(kernels.magnitudes(x), k))(x)

    @jax.jit
    def top_k(x: Any) -> Any:
        _, indices = jax.lax.top_k(jnp.abs(x), k)
        return indices, x[indices]

    @jax.jit
    def threshold(x: Any, edge: Any) -> Any:
        return kernels.select_above(x, edge, k)

    @jax.jit
    def exact(x: Any) -> Any:
        edge = kernels.kth_magnitude(kernels.magnitudes(x), k)
        return kernels.select_above(x, edge, k)

    copy = jax.jit(lambda x: x + 1)
    measured = perf.compare(
        {
            "lax.top_k": lambda: top_k(x),
            "exact": lambda: exact(x),
            "threshold": lambda: threshold(x, edge),
            "copy": lambda: copy(x),
        },
        "lax.top_k",
        repetitions=cfg.repetitions,
        warmup=2,
    )
    return measured.assign(numbers=cfg.numbers)
