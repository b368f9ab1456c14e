"""Which implementation selects above a threshold, and what it takes."""

import functools
import logging
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from hpcjax.core import checks
from hpcjax.kernels._top_k import reference

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "reference", "pallas")


class Selected(NamedTuple):
    """Entries of an array, by ascending index.

    Attributes:
      indices: `[capacity]`; the array's size where there is no entry.
      values: the array's numbers there; 0 where there is no entry.
      count: how many there would be with room for all.
    """

    indices: Int[Array, " capacity"]
    values: Float[Array, " capacity"]
    count: Int[Array, ""]


def select_above(
    x: Float[Array, " n"],
    threshold: Int[Array, ""],
    capacity: int,
    *,
    implementation: str = "auto",
) -> Selected:
    """Selects the numbers whose magnitude reaches a threshold; zeros never do.

    Args:
      x: numbers, fewer than 2³¹.
      threshold: among `magnitudes`, such as `kth_magnitude` of them.
      capacity: entries there is room for; the first by index are kept.
      implementation: `"reference"`, in plain JAX; `"pallas"`, a kernel for GPUs that
        reads the numbers once; `"auto"`, the kernel where it can be used.

    Raises:
      ConfigError: an unknown implementation, or no capacity.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
      2022, for what it serves.

    Examples:
      >>> from hpcjax import kernels
      >>> x = jax.numpy.array([0.5, -3.0, 0.0, 2.0])
      >>> k = kernels.kth_magnitude(kernels.magnitudes(x), 2)
      >>> select_above(x, k, 3).indices.tolist()
      [1, 3, 4]
    """
    checks.require_choice("implementation", implementation, IMPLEMENTATIONS)
    checks.require_count(1, capacity=capacity)
    if implementation == "auto":
        implementation = _chosen(jax.default_backend())
    if implementation == "reference":
        return Selected(*reference.select_above(x, threshold, capacity))
    from hpcjax.kernels._top_k import pallas

    return Selected(*pallas.select_above(x, threshold, capacity))


@functools.cache
def _chosen(backend: str) -> str:
    chosen = "pallas" if backend == "gpu" else "reference"
    log.info("select_above: %s on %s", chosen, backend)
    return chosen
