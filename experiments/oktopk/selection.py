"""How long finding the largest entries takes: a threshold, or an exact top-k."""

import dataclasses
from typing import TYPE_CHECKING, Any

from hpcjax.core import checks
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A vector of normal numbers, and how its selection is measured.

    Attributes:
      numbers: n.
      density: of what is selected.
      repetitions: rounds of the measurement.
      seed: of the numbers.
    """

    numbers: int = 14_728_266
    density: float = 0.02
    repetitions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(1, numbers=self.numbers, repetitions=self.repetitions)
        good = 0 < self.density <= 1
        checks.require(good, "density must be in (0, 1]", density=self.density)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Times selections in turns in one process.

    Returns:
      `seconds` [candidate, repetition]: of `lax.top_k`; of the k-th magnitude by counts
      and what reaches it; of what reaches a known one; and of a copy. `numbers`, n.
    """
    import jax
    import jax.numpy as jnp

    from hpcjax import kernels, perf
    from hpcjax.collectives.config import entries_wanted

    del ctx
    x = jax.random.normal(jax.random.key(cfg.seed), (cfg.numbers,))
    k = entries_wanted(cfg.density, cfg.numbers)
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
