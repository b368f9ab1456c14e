"""Selection above a threshold: checks, and the choice of an implementation."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from hpcjax.core import checks
from hpcjax.kernels._dispatch import INTERPRETED, choose
from hpcjax.kernels._top_k import launch, reference


class Selected(NamedTuple):
    """Entries of an array, by ascending index.

    Attributes:
      indices: `[capacity]`, padded with the array's size.
      values: the array's values at the indices, `[capacity]`, padded with 0.
      count: number of selected entries, which may exceed the capacity.
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
    """Selects the entries whose magnitude is at least a threshold; zeros never are.

    Args:
      x: fewer than 2³¹ values.
      threshold: as an integer of `magnitudes`, such as their `kth_magnitude`.
      capacity: size of the result; if more entries are selected, the first by index are
        returned.
      implementation: `"reference"` for plain JAX; `"triton"` for a GPU kernel that
        reads the values once; `"interpreted"` for the same by numpy, slowly; `"auto"`
        for the kernel on a GPU.

    Raises:
      ConfigError: an unknown implementation, or no capacity.
      UnsupportedOp: the kernel is named and cannot run here.

    References:
      Used in Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep
      Learning, PPoPP 2022.

    Examples:
      >>> import jax
      >>> from hpcjax import kernels
      >>> x = jax.numpy.array([0.5, -3.0, 0.0, 2.0])
      >>> k = kernels.kth_magnitude(kernels.magnitudes(x), 2)
      >>> select_above(x, k, 3).indices.tolist()
      [1, 3, 4]
    """
    checks.require_count(1, capacity=capacity)
    chosen = choose("select_above", implementation)
    if chosen == "reference":
        return Selected(*reference.select_above(x, threshold, capacity))
    interpreted = chosen == INTERPRETED
    return Selected(
        *launch.select_above(x, threshold, capacity, interpreted=interpreted)
    )
