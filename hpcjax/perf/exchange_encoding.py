"""Computation of a gradient exchange without its communication, to be timed.

Groups whose collectives send nothing take the place of real ones. They return arrays of
the shapes that a group of so many members would return.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import hostcomm
from hpcjax.collectives import HostGroup, MeshGroup
from hpcjax.collectives.exchange import Exchange
from hpcjax.collectives.group import Vector
from hpcjax.core import checks


class HostEcho(HostGroup):
    """A process's view of a group in which all members hold the same arrays.

    An all-gather returns `size` copies of the own array, so that each is decoded. What
    is sent to other members comes back. A sum returns the own array, since adding up
    belongs to the communication.
    """

    def __init__(self, size: int) -> None:
        self._members = size

    @property
    def size(self) -> int:
        """Number of members."""
        return self._members

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    def _call(self, collective: Callable[..., Any], array: Any) -> Any:
        # Arrays of one size are gathered into one array, others into a list.
        if collective is hostcomm.allgather:
            return np.stack([array] * self.size)
        return [array] * self.size if collective is hostcomm.allgatherv else array


class MeshEcho(MeshGroup):
    """As `HostEcho` for a group of devices, and runs on one device."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self._size = size

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Returns `x`, which every member is taken to hold."""
        del pairs
        return x

    def all_gather(self, x: Vector) -> Vector:
        """Returns `size` copies of `x`, `[size, …]`."""
        x = jnp.asarray(x)
        # If the compiler saw that the rows are equal, it could decode one row for all.
        return jax.lax.optimization_barrier(jnp.stack([x] * self.size))


def encode_decode(
    exchange: Exchange, tree: Any, processes: int, *, on_host: bool = False
) -> Callable[[], Any]:
    """Returns a thunk that encodes a gradient and decodes those of all workers.

    Nothing is sent: all workers are taken to hold the same gradient, and where an
    exchange sums, this worker's summand takes the place of the sum.

    Args:
      exchange: the exchange to run; each call continues from the previous state.
      tree: gradients.
      processes: number of workers whose gradients are decoded.
      on_host: compute with numpy as `collectives.HostGroup` does; otherwise as a
        compiled program on JAX's default device.

    Raises:
      ConfigError: fewer than one worker.

    Examples:
      >>> from hpcjax import collectives
      >>> exchange = collectives.SignConfig().make()
      >>> thunk = encode_decode(exchange, {"kernel": jnp.array([3.0, -2.0])}, 4)
      >>> thunk()["kernel"].tolist()
      [1.0, -1.0]
    """
    checks.require_count(1, processes=processes)
    state = exchange.init(tree)
    if on_host:
        tree, group = jax.tree.map(np.asarray, tree), HostEcho(processes)

        def step(tree: Any, state: Any) -> Any:
            return exchange.average(group, tree, state)

    else:
        tree = jax.tree.map(jnp.asarray, tree)
        step = jax.jit(lambda t, s: exchange.average(MeshEcho(processes), t, s))

    def thunk() -> Any:
        nonlocal state
        mean, state = jax.block_until_ready(step(tree, state))
        return mean

    return thunk
