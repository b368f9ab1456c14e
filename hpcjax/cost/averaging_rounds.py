"""Cost and simulated waiting times of methods that average models between workers.

The simulation serves for more processes than a machine has cores, and to make traces
that `hostcomm.GroupTrace` can replay. Only clocks are simulated, as in
`partial_rounds`: those of workers and of their communication agents.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from hpcjax.collectives import dense_words
from hpcjax.core import checks
from hpcjax.hostcomm import (
    GroupTrace,
    MessageCost,
    butterfly_masks,
    exponential_offsets,
    ring_neighbours,
)

Method = Literal["allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp", "wagma"]
METHODS = ("allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp", "wagma")


class AveragingCost(NamedTuple):
    """What a worker sends in a step, on average, and for whom it waits.

    Attributes:
      waits_for: a description for tables.
      words: float32 values that the worker sends.
      messages: number of messages that follow one another.
    """

    waits_for: str
    words: float
    messages: float

    def seconds(self, cost: MessageCost) -> float:
        """Returns alpha · messages + beta · bytes, for words of four bytes."""
        return cost.seconds(4.0 * self.words, self.messages)


def averaging_cost(
    method: Method,
    count: int,
    ranks: int,
    *,
    period: int = 1,
    group_size: int = 1,
    tau: int | None = None,
) -> AveragingCost:
    """Returns what a worker sends per step to average n values over P workers.

    | method    | words per step                                              |
    |-----------|-------------------------------------------------------------|
    | allreduce | 2n (P − 1) / P, by reduce-scatter and all-gather            |
    | local_sgd | the same in every H-th step                                 |
    | dpsgd     | n to each of two ring neighbours                            |
    | sgp       | n to each of two others at exponential distances            |
    | adpsgd    | n to one                                                    |
    | wagma     | n log2 S by recursive doubling; in every tau-th, n log2 P   |

    Args:
      method: name of the method.
      count: n.
      ranks: P.
      period: H of local SGD.
      group_size: S of WAGMA.
      tau: of WAGMA; None: no round averages all workers.

    Raises:
      ConfigError: invalid arguments.

    Examples:
      >>> averaging_cost("wagma", 1000, 8, group_size=4, tau=10).words
      2100.0
      >>> averaging_cost("allreduce", 1000, 8)
      AveragingCost(waits_for='slowest of P', words=1750.0, messages=6.0)
    """
    checks.require_choice("method", method, METHODS)
    checks.require_count(1, count=count, ranks=ranks, period=period)
    checks.require_count(1, tau=1 if tau is None else tau)
    phases = math.ceil(math.log2(ranks))
    ring = dense_words(count, ranks)
    if method == "wagma":
        group_phases = len(butterfly_masks(ranks, group_size, 0))  # log2 S
        share = 0.0 if tau is None else 1.0 / tau
        # Recursive doubling sends the whole vector in each of its phases.
        messages = (1 - share) * group_phases + share * phases
        waits = "first arriver" + (f"; slowest of P every {tau}" if tau else "")
        return AveragingCost(waits, count * messages, messages)
    if method in ("allreduce", "local_sgd"):
        every = period if method == "local_sgd" else 1
        waits = "slowest of P" + (f" every {every}" if every > 1 else "")
        # Reduce-scatter by recursive halving, all-gather by doubling: log2 P each.
        return AveragingCost(waits, ring / every, 2.0 * phases / every)
    if method == "adpsgd":
        return AveragingCost("nobody", float(count), 1.0)
    sides = len(ring_neighbours(0, ranks))
    if method == "dpsgd":
        return AveragingCost("two neighbours", float(sides * count), float(sides))
    pushes = len(exponential_offsets(ranks, 0))
    return AveragingCost("two in-neighbours", float(pushes * count), float(pushes))


class GroupTimes(NamedTuple):
    """Simulated times in seconds of T steps of P workers; leading axes are runs.

    Attributes:
      arrive: when workers post their model of a step, `[..., T, P]`.
      leave: when they have the step's result, `[..., T, P]`.
      begin: when agents take the newest model that their worker has posted,
        `[..., T, P]`.
      end: when the rounds of agents end, `[..., T, P]`.
      group_size: S.
      tau: every tau-th round averages all ranks; 0: none does.
      groups: "butterfly" or "fixed".
    """

    arrive: np.ndarray
    leave: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    group_size: int
    tau: int
    groups: str

    def total(self) -> np.ndarray:
        """Returns when the last worker finishes its last step, `[...]`."""
        return np.asarray(self.leave[..., -1, :].max(-1))

    def trace(self) -> GroupTrace:
        """Returns the trace of a run with these times.

        Raises:
          ConfigError: the times are of several runs.
        """
        one_run = self.arrive.ndim == 2
        checks.require(one_run, "times must be of one run", shape=self.arrive.shape)
        # The last model that a worker posted when its agent began; -1: the initial one.
        written = [
            np.searchsorted(arrive, begin, "right") - 1
            for arrive, begin in zip(self.arrive.T, self.begin.T, strict=True)
        ]
        # At most the round's own: arrivals and begins may coincide.
        steps = np.arange(len(self.arrive))
        written = np.minimum(np.array(written), steps).T.astype(np.int32)
        return GroupTrace(self.arrive, written, self.group_size, self.tau, self.groups)


def simulate_groups(
    compute: np.ndarray,
    *,
    group_size: int,
    tau: int | None = 10,
    seconds: float = 0.0,
    global_seconds: float = 0.0,
    wait_avoiding: bool = True,
    groups: Literal["butterfly", "fixed"] = "butterfly",
) -> GroupTimes:
    """Simulates the clocks of all workers and agents through all rounds.

    With wait avoidance, the arrival of the first worker starts a round for all agents.
    An agent takes part once its previous round has ended, and a group finishes
    `seconds` after its last agent has begun. In every tau-th round, and in every round
    without wait avoidance, an agent begins when its own worker arrives. A worker leaves
    a step at max(arrive, end).

    Args:
      compute: seconds of each worker's steps, delays included, `[..., T, P]`; leading
        axes are runs.
      group_size: S.
      tau: as in `hostcomm.GroupAllreduce`.
      seconds: duration of a round in groups.
      global_seconds: duration of a round of all ranks.
      wait_avoiding: as in `hostcomm.GroupAllreduce`.
      groups: as in `hostcomm.GroupAllreduce`.

    Raises:
      ConfigError: invalid arguments.

    Examples:
      >>> late = np.array([[0.1, 0.3, 0.1, 0.1]])
      >>> simulate_groups(late, group_size=2).leave.tolist()
      [[0.1, 0.3, 0.1, 0.1]]
      >>> simulate_groups(late, group_size=2, wait_avoiding=False).leave.tolist()
      [[0.3, 0.3, 0.1, 0.1]]
    """
    checks.require(compute.ndim >= 2, "compute must be [..., T, P]", got=compute.shape)
    checks.require_choice("groups", groups, ("butterfly", "fixed"))
    checks.require_count(1, tau=1 if tau is None else tau)
    checks.require_finite(0.0, seconds=seconds, global_seconds=global_seconds)
    ranks = compute.shape[-1]
    arrive, leave, begin, end = (np.zeros(compute.shape) for _ in range(4))
    # When workers left the step before, and when the agents' rounds before ended.
    last_leave = np.zeros_like(compute[..., 0, :])
    last_end = np.zeros_like(compute[..., 0, :])
    for step in range(compute.shape[-2]):
        now = arrive[..., step, :] = last_leave + compute[..., step, :]
        of_all = tau is not None and (step + 1) % tau == 0
        alone = group_size == 1
        waits = of_all or alone or not wait_avoiding
        trigger = now if waits else now.min(-1, keepdims=True)
        group_begin = begin[..., step, :] = np.maximum(trigger, last_end)
        number = 0 if groups == "fixed" else step
        masks = butterfly_masks(ranks, ranks if of_all else group_size, number)
        # A maximum over the ranks that differ in a mask's bit, bit by bit: after the
        # last mask, each rank has the maximum of its group.
        for mask in masks:
            partner = group_begin[..., np.arange(ranks) ^ mask]
            group_begin = np.maximum(group_begin, partner)
        duration = global_seconds if of_all else seconds * (not alone)
        last_end = end[..., step, :] = group_begin + duration
        last_leave = leave[..., step, :] = np.maximum(now, last_end)
    return GroupTimes(arrive, leave, begin, end, group_size, tau or 0, groups)


def simulate_neighbours(
    method: Literal["allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp"],
    compute: np.ndarray,
    *,
    seconds: float = 0.0,
    period: int = 1,
) -> np.ndarray:
    """Simulates when workers leave their steps if they wait for others' arrivals.

    Args:
      method: decides for whom a worker waits, see `averaging_cost`.
      compute: seconds of each worker's steps, delays included, `[..., T, P]`.
      seconds: from the last awaited arrival to the result; ignored for "adpsgd", which
        communicates in the background.
      period: H of local SGD.

    Returns:
      Seconds at which each worker leaves each step, `[..., T, P]`.

    Examples:
      >>> late = np.array([[0.1, 0.1, 0.3, 0.1, 0.1]])
      >>> simulate_neighbours("dpsgd", late).tolist()
      [[0.1, 0.3, 0.3, 0.3, 0.1]]
    """
    checks.require_choice("method", method, METHODS[:-1])
    checks.require(compute.ndim >= 2, "compute must be [..., T, P]", got=compute.shape)
    checks.require_count(1, period=period)
    ranks = np.arange(compute.shape[-1])
    leave = np.zeros(compute.shape)
    last_leave = np.zeros_like(compute[..., 0, :])
    for step in range(compute.shape[-2]):
        arrive = last_leave + compute[..., step, :]
        if method == "sgp":
            offsets = exponential_offsets(len(ranks), step)
        else:
            offsets = [-1, 1] if method == "dpsgd" else []
        last_leave = arrive
        for offset in offsets:
            # A rank sends to rank + offset: it waits for what rank - offset sends.
            sender = (ranks - offset) % len(ranks)
            last_leave = np.maximum(last_leave, arrive[..., sender])
        due = method == "local_sgd" and (step + 1) % period == 0
        if due or method == "allreduce":
            last_leave = np.broadcast_to(arrive.max(-1, keepdims=True), arrive.shape)
        if due or method in ("allreduce", "dpsgd", "sgp"):
            last_leave = last_leave + seconds
        leave[..., step, :] = last_leave
    return leave
