"""How long a way of averaging gradients computes, without sending anything."""

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
    """Processes that all have what we have: nothing is sent.

    What is gathered are so many copies of ours, decoded one by one; what goes to others
    comes back; a sum is our part, as adding up is the collective's work.
    """

    def __init__(self, size: int) -> None:
        self._members = size

    @property
    def size(self) -> int:
        """The number of members."""
        return self._members

    @property
    def rank(self) -> int:
        """The first."""
        return 0

    def _call(self, collective: Callable[..., Any], array: Any) -> Any:
        if collective is hostcomm.allgather:
            return np.stack([array] * self.size)
        return [array] * self.size if collective is hostcomm.allgatherv else array


class MeshEcho(MeshGroup):
    """The same for devices, on one of them."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self._size = size

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Returns what we have, whoever has sent it."""
        del pairs
        return x

    def all_gather(self, x: Vector) -> Vector:
        """Returns so many copies, of which the compiler knows nothing.

        It would decode one of them instead of all.
        """
        x = jnp.asarray(x)
        return jax.lax.optimization_barrier(jnp.stack([x] * self.size))


def encode_decode(
    exchange: Exchange, tree: Any, processes: int, *, on_host: bool = False
) -> Callable[[], Any]:
    """Returns a thunk that encodes a gradient and decodes those of so many workers.

    Of what is summed one worker's part is taken for the sum.

    Args:
      exchange: what is measured; the state goes on from call to call.
      tree: gradients.
      processes: whose gradients are decoded.
      on_host: as `collectives.HostGroup` computes it, else as compiled for the device.

    Raises:
      ConfigError: no such number of workers.

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
