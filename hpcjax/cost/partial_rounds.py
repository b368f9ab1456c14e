"""Simulation of partial all-reduces: when their rounds start and end.

It serves for more processes than a machine has cores, and to make traces that
`hostcomm.PartialTrace` can replay. Only the clocks of workers are simulated: a round
starts when a worker that may start it has arrived, takes a given time, and delays only
the workers that arrive before its end.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm import MessageCost, PartialTrace, initiators


def round_seconds(cost: MessageCost, count: int, ranks: int) -> float:
    """Returns the seconds of a round: activation, then an all-reduce.

    alpha log2 P + (alpha + 4 n beta) log2 P for n float32 values: the activation
    spreads along a binary tree, the sum by recursive doubling with the whole vector in
    each step. More processes than cores take several times as long; then measure whole
    rounds instead.

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
    """Simulated times in seconds of T steps of P workers; leading axes are runs.

    Attributes:
      arrive: when workers have a step's gradient, `[..., T, P]`.
      leave: when workers have the result of a step's round, `[..., T, P]`.
      start: when rounds start, `[..., T]`.
      end: when rounds end, `[..., T]`.
      sync_models_every: steps between averages of the models; 0: never.
    """

    arrive: np.ndarray
    leave: np.ndarray
    start: np.ndarray
    end: np.ndarray
    sync_models_every: int = 0

    def total(self) -> np.ndarray:
        """Returns when the last worker finishes its last step, `[...]`."""
        return np.asarray(self.leave[..., -1, :].max(-1))

    def fresh(self) -> np.ndarray:
        """Counts the workers that have arrived when their step's round starts.

        Returns:
          Workers whose gradient is in the round of its own step, `[..., T]`.
        """
        return np.sum(self.arrive <= self.start[..., None], axis=-1)

    def trace(
        self, missed: Literal["apply_all", "newest"] = "apply_all"
    ) -> PartialTrace:
        """Returns the trace of a run with these times.

        Args:
          missed: whether a worker applies the results of all rounds that ended since
            its last step ("apply_all"), or only the newest.

        Raises:
          ConfigError: the times are of several runs.
        """
        steps, ranks = self.arrive.shape[-2:]
        one_run = self.arrive.ndim == 2
        checks.require(one_run, "times must be of one run", shape=self.arrive.shape)
        # After the steps comes a round T for which everyone waits: it sums what came
        # too late for all others, if anything did.
        start = np.append(self.start, self.leave[-1].max())
        # A gradient is in the first round that starts when or after it has arrived.
        contributed = np.searchsorted(start, self.arrive, "left")
        # A worker that leaves a step has the results of all rounds that ended by then.
        ended = np.searchsorted(self.end, self.leave, "right")
        rounds = steps + np.any(contributed == steps)
        ended = np.vstack([ended, np.full(ranks, rounds)])
        previous = np.vstack([np.zeros(ranks, int), ended[:-1]])
        first = previous if missed == "apply_all" else np.maximum(previous, ended - 1)
        # Where computing takes no time, a worker arrives at the moment at which a round
        # of no duration started and ended. It has that round's result already, so that
        # its gradient must be in a later one.
        contributed = np.maximum(contributed, previous[:-1])
        return PartialTrace(
            self.arrive,
            contributed.astype(np.int32),
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
    """Simulates the clocks of all workers through all rounds.

    With compute times c, arrive[t] = leave[t − 1] + c[t] and leave[t] = max(arrive[t],
    end[t]). Round t starts when the first worker arrives ("solo"), the q-th (a number),
    the last ("sync"), or a randomly drawn initiator ("majority"), but not before round
    t − 1 has ended. Not modelled: workers so late that the ring buffer of
    `hostcomm.PartialAllreduce` no longer holds a round that they missed.

    Args:
      compute: seconds of each worker's steps, delays included, `[..., T, P]`; leading
        axes are runs.
      mode: as in `hostcomm.PartialAllreduce`.
      seconds: duration of a round.
      limiter: after this many partial rounds, one round waits for all; 0: never.
      seed: of the initiators; the first run has the same as a real run with this seed.
      sync_models_every: after this many steps all workers average their models, which
        takes as long as a round from the arrival of the last; 0: never.

    Raises:
      ConfigError: invalid arguments.

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
    # When workers left the step before, and when the round before ended.
    last_leave, last_end = np.zeros((*runs, ranks)), np.zeros(runs)
    for step in range(steps):
        now = arrive[..., step, :] = last_leave + compute[..., step, :]
        if limiter and step % (limiter + 1) == limiter:
            begin = now.max(-1)
        elif quorum is None:
            initiator = drawn[..., step, None]
            begin = np.take_along_axis(now, initiator, axis=-1)[..., 0]
        else:
            begin = np.partition(now, quorum - 1)[..., quorum - 1]
        begin = start[..., step] = np.maximum(begin, last_end)
        last_end = end[..., step] = begin + seconds
        last_leave = leave[..., step, :] = np.maximum(now, last_end[..., None])
        if every and (step + 1) % every == 0:
            # Only the next step starts later: `leave` is when a round's result is had.
            last_leave = np.broadcast_to(
                last_leave.max(-1, keepdims=True) + seconds, last_leave.shape
            )
    return RoundTimes(arrive, leave, start, end, every)


def _quorum(mode: str | int, ranks: int) -> int | None:
    """Returns how many workers must have arrived; None: a drawn one must have."""
    if isinstance(mode, int):
        checks.require(1 <= mode <= ranks, f"mode must be in 1..{ranks}", mode=mode)
        return mode
    checks.require_choice("mode", mode, ("solo", "majority", "sync"))
    return {"solo": 1, "majority": None, "sync": ranks}[mode]
