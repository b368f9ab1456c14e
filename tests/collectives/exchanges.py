"""Runs an exchange on simulated devices and on host ranks, and keeps all it does."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hpcjax import optim, sharding
from hpcjax.collectives import CommStats, ExchangeConfig, HostGroup
from hpcjax.core import per_device
from hpcjax.hostcomm import connected
from tests.hostcomm.threads import in_threads


class Step(NamedTuple):
    """One average of P vectors.

    Attributes:
      mean: [n].
      residual: [P, n], or None.
      stats: of each member, [P].
      words: 32-bit words that each rank sent, bookkeeping and all; hosts only.
      state: as the backend keeps it.
    """

    mean: np.ndarray
    residual: np.ndarray | None
    stats: CommStats
    words: np.ndarray | None
    state: Any


@functools.lru_cache(maxsize=8)
def program(config: ExchangeConfig, members: int, n: int) -> Any:
    """Returns mesh, first state and the jitted step of vectors of length n."""
    mesh = sharding.data_mesh(members)
    tx = optim.exchange_gradients(config, "data")
    params = {"w": jnp.zeros(n)}
    state = per_device.expand(tx.init(params), mesh)
    # Placed as the step returns it, or the second one would be compiled once more.
    state = jax.device_put(state, sharding.state_shardings(state, mesh))
    specs = per_device.specs(state)

    def body(given, state):
        mean, new = tx.update({"w": given[0]}, per_device.enter(state))
        return mean["w"], per_device.leave(new)

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
            check_vma=True,
        )
    )
    return state, step


def on_mesh(config: ExchangeConfig, given: np.ndarray) -> list[Step]:
    """Averages `given` [steps, P, n] one step after the other on P devices."""
    state, step = program(config, given.shape[1], given.shape[2])
    made = []
    for vectors in given:
        mean, state = step(jnp.asarray(vectors), state)
        host = jax.device_get(state)
        residual = host.residual.value
        made.append(
            Step(
                np.asarray(mean),
                None if residual is None else residual["w"],
                host.stats.value,
                None,
                host,
            )
        )
    return made


def on_hosts(config: ExchangeConfig, given: np.ndarray) -> list[Step]:
    """The same on P ranks that are threads."""

    def rank(transport):
        exchange, group = config.make(), HostGroup(transport)
        state, made = exchange.init({"w": given[0, 0]}), []
        for vectors in given:
            before = transport.counters()
            mine = {"w": vectors[transport.rank]}
            mean, state = exchange.average(group, mine, state)
            sent = transport.counters().since(before).total_sent().payload
            made.append((mean["w"], state, sent / 4))
        return made

    by_rank = in_threads(rank, connected(given.shape[1]))
    return [_joined([made[step] for made in by_rank]) for step in range(len(given))]


def _joined(ranks: list[Any]) -> Step:
    means, states, words = zip(*ranks, strict=True)
    for mean in means[1:]:
        np.testing.assert_array_equal(mean, means[0])
    residual = None
    if states[0].residual is not None:
        residual = np.stack([state.residual["w"] for state in states])
    stats = jax.tree.map(lambda *each: np.stack(each), *[s.stats for s in states])
    return Step(means[0], residual, stats, np.array(words), states)
