"""When rounds of partial sums start and end, by a model of discrete events.

For more processes than a machine has cores, and for the traces of replays. Only the
clocks of workers are followed: a round starts once who may start it has arrived, lasts
a given time, and holds up only those who have arrived before its end.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm import MessageCost, PartialTrace, initiators


def round_seconds(cost: MessageCost, count: int, ranks: int) -> float:
    """Returns the time of a round: activation, then recursive doubling.

    alpha log2 P + (alpha + 4 n beta) log2 P for n numbers of float32. More processes
    than cores take several times as long: measure a round of all in place of a message.

    Args:
      cost: alpha and beta of a message.
      count: n.
      ranks: P.

    Examples:
      >>> round_seconds(MessageCost(alpha=1e-3, beta=0.0), 250_000, 8)
      0.006
    """
    return math.ceil(math.log2(ranks)) * (cost.alpha + cost.seconds(4.0 * count))


class RoundTimes(NamedTuple):
    """Seconds of everything, of one run or of many at once.

    Attributes:
      arrive: at which workers arrive at a step, `[..., T, P]`.
      leave: at which they have its result, `[..., T, P]`.
      start: of rounds, `[..., T]`.
      end: of rounds, `[..., T]`.
      sync_models_every: steps between averages of the models; 0: never.
    """

    arrive: np.ndarray
    leave: np.ndarray
    start: np.ndarray
    end: np.ndarray
    sync_models_every: int = 0

    def total(self) -> np.ndarray:
        """Returns when the last worker has ended its steps, `[...]`."""
        return np.asarray(self.leave[..., -1, :].max(-1))

    def fresh(self) -> np.ndarray:
        """Counts who has arrived at a round's step when it starts, `[..., T]`."""
        return np.sum(self.arrive <= self.start[..., None], axis=-1)

    def trace(
        self, missed: Literal["apply_all", "newest"] = "apply_all"
    ) -> PartialTrace:
        """Returns what a run with these times does.

        Raises:
          ConfigError: they are of many runs.
        """
        steps, ranks = self.arrive.shape[-2:]
        one = self.arrive.ndim == 2
        checks.require(one, "times must be of one run", shape=self.arrive.shape)
        # The last round waits for all; nobody is late there.
        start = np.append(self.start, self.leave[-1].max())
        contributed = np.searchsorted(start, self.arrive, "left")
        ended = np.searchsorted(self.end, self.leave, "right")
        rounds = steps + np.any(contributed == steps)  # the last one may be empty
        ended = np.vstack([ended, np.full(ranks, rounds)])
        before = np.vstack([np.zeros(ranks, int), ended[:-1]])
        first = before if missed == "apply_all" else np.maximum(before, ended - 1)
        return PartialTrace(
            self.arrive,
            np.maximum(contributed, before[:-1]).astype(np.int32),
            np.stack([first, ended], axis=-1).astype(np.int32),
            sync_models_every=self.sync_models_every,
        )


def simulate_rounds(
    compute: np.ndarray,
    *,
    mode: Literal["solo", "majority", "sync"] | int = "majority",
    seconds: float = 0.0,
    limiter: int = 0,
    seed: int = 0,
    sync_models_every: int = 0,
) -> RoundTimes:
    """Follows the clocks of all workers through all rounds.

    With c the compute times, round t starts at the first (solo), the q-th, the last
    (sync) of arrive[t], or that of its initiator, and not before the end of the round
    before; leave = max(arrive, end), arrive[t + 1] = leave + c[t + 1]. That a worker
    may be too far behind for the ring of `hostcomm.PartialAllreduce` is left out.

    Args:
      compute: seconds of each worker's step, delays included, `[..., T, P]`; what
        stands before are runs.
      mode: as of `hostcomm.PartialAllreduce`.
      seconds: of a round from its start to its end.
      limiter: after so many partial rounds all are waited for; 0: never.
      seed: of the initiators; the first run has those of a real one.
      sync_models_every: after so many steps all wait for the slowest, and then for as
        long as a round takes; 0: never.

    Raises:
      ConfigError: arguments that cannot be.

    Examples:
      >>> times = simulate_rounds(np.array([[0.1, 0.3], [0.1, 0.1]]), mode="solo")
      >>> times.end.tolist(), times.leave.tolist()
      ([0.1, 0.2], [[0.1, 0.3], [0.2, 0.4]])
    """
    checks.require(compute.ndim >= 2, "compute must be [..., T, P]", got=compute.shape)
    *runs, steps, ranks = compute.shape
    quorum = _quorum(mode, ranks)
    every = sync_models_every
    checks.require_count(0, limiter=limiter, seed=seed, sync_models_every=every)
    checks.require_finite(0.0, seconds=seconds)
    drawn = initiators(seed, ranks, math.prod(runs) * steps).reshape(*runs, steps)
    arrive, leave = np.zeros(compute.shape), np.zeros(compute.shape)
    start, end = np.zeros((*runs, steps)), np.zeros((*runs, steps))
    left, ended = np.zeros((*runs, ranks)), np.zeros(runs)
    for step in range(steps):
        here = arrive[..., step, :] = left + compute[..., step, :]
        if limiter and step % (limiter + 1) == limiter:
            begun = here.max(-1)
        elif quorum is None:
            who = drawn[..., step, None]
            begun = np.take_along_axis(here, who, axis=-1)[..., 0]
        else:
            begun = np.partition(here, quorum - 1)[..., quorum - 1]
        begun = start[..., step] = np.maximum(begun, ended)
        ended = end[..., step] = begun + seconds
        left = leave[..., step, :] = np.maximum(here, ended[..., None])
        if every and (step + 1) % every == 0:
            left = np.broadcast_to(left.max(-1, keepdims=True) + seconds, left.shape)
    return RoundTimes(arrive, leave, start, end, every)


def _quorum(mode: str | int, ranks: int) -> int | None:
    """Returns how many must have arrived; None: one that is drawn."""
    if isinstance(mode, int):
        checks.require(1 <= mode <= ranks, f"mode must be in 1..{ranks}", mode=mode)
        return mode
    checks.require_choice("mode", mode, ("solo", "majority", "sync"))
    return {"solo": 1, "majority": None, "sync": ranks}[mode]
