"""When workers that average models wait for whom, by a model of discrete events.

For more processes than a machine has cores, and for the traces of replays. Only the
clocks of workers and their agents are followed, as in `partial_rounds`.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from hpcjax.collectives.config import dense_words
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
      waits_for: in words.
      words: numbers sent.
      messages: one after the other.
    """

    waits_for: str
    words: float
    messages: float

    def seconds(self, cost: MessageCost) -> float:
        """Returns alpha messages + beta bytes, for words of float32."""
        return self.messages * cost.alpha + 4.0 * self.words * cost.beta


def averaging_cost(
    method: Method,
    count: int,
    ranks: int,
    *,
    period: int = 1,
    group_size: int = 1,
    tau: int | None = None,
) -> AveragingCost:
    """Returns the volume of each way to average n numbers over P workers.

    allreduce by reduce-scatter and all-gather, 2n (P - 1) / P; local SGD every H-th
    step of it; D-PSGD and SGP send n to each of two; AD-PSGD n once; WAGMA n log2 S in
    a group by recursive doubling, n log2 P in every tau-th step.

    Args:
      method: which one.
      count: n.
      ranks: P.
      period: H, of local SGD.
      group_size: S, of WAGMA.
      tau: of WAGMA; None: no round is of all.

    Raises:
      ConfigError: arguments that cannot be.

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
        width = len(butterfly_masks(ranks, group_size, 0))
        share = 0.0 if tau is None else 1.0 / tau
        messages = (1 - share) * width + share * phases
        waits = "first arriver" + (f"; slowest of P every {tau}" if tau else "")
        return AveragingCost(waits, count * messages, messages)
    if method in ("allreduce", "local_sgd"):
        every = period if method == "local_sgd" else 1
        waits = "slowest of P" + (f" every {every}" if every > 1 else "")
        return AveragingCost(waits, ring / every, 2.0 * phases / every)
    if method == "adpsgd":
        return AveragingCost("nobody", float(count), 1.0)
    sides = len(ring_neighbours(0, ranks))
    if method == "dpsgd":
        return AveragingCost("two neighbours", float(sides * count), float(sides))
    pushes = len(exponential_offsets(ranks, 0))
    return AveragingCost("two in-neighbours", float(pushes * count), float(pushes))


class GroupTimes(NamedTuple):
    """Seconds of everything, of one run or of many at once.

    Attributes:
      arrive: at which workers arrive at a step, `[..., T, P]`.
      leave: at which they have its result, `[..., T, P]`.
      begin: at which agents take what their workers have posted, `[..., T, P]`.
      end: of rounds, `[..., T, P]`.
      group_size: S.
      tau: rounds from one of all ranks to the next; 0: there is none.
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
        """Returns when the last worker has ended its steps, `[...]`."""
        return np.asarray(self.leave[..., -1, :].max(-1))

    def trace(self) -> GroupTrace:
        """Returns what a run with these times does.

        Raises:
          ConfigError: they are of many runs.
        """
        one = self.arrive.ndim == 2
        checks.require(one, "times must be of one run", shape=self.arrive.shape)
        written = [
            np.searchsorted(arrive, begin, "right") - 1
            for arrive, begin in zip(self.arrive.T, self.begin.T, strict=True)
        ]
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
    """Follows the clocks of all workers and agents through all rounds.

    A partial round starts, for all agents, when the first worker arrives; an agent
    takes part once its round before has ended, and a group ends `seconds` after its
    last agent has begun. Every tau-th round, and without wait avoidance every one,
    agents wait for their own worker. leave = max(arrive, end).

    Args:
      compute: seconds of each worker's step, delays included, `[..., T, P]`; what
        stands before are runs.
      group_size: S.
      tau: as of `hostcomm.GroupAllreduce`.
      seconds: of a partial round.
      global_seconds: of a round of all.
      wait_avoiding: as of `hostcomm.GroupAllreduce`.
      groups: likewise.

    Raises:
      ConfigError: arguments that cannot be.

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
    left, ended = np.zeros_like(compute[..., 0, :]), np.zeros_like(compute[..., 0, :])
    for step in range(compute.shape[-2]):
        here = arrive[..., step, :] = left + compute[..., step, :]
        of_all = tau is not None and (step + 1) % tau == 0
        alone = group_size == 1
        waits = of_all or alone or not wait_avoiding
        started = here if waits else here.min(-1, keepdims=True)
        begun = begin[..., step, :] = np.maximum(started, ended)
        number = 0 if groups == "fixed" else step
        masks = butterfly_masks(ranks, ranks if of_all else group_size, number)
        for mask in masks:
            begun = np.maximum(begun, begun[..., np.arange(ranks) ^ mask])
        lasts = global_seconds if of_all else seconds * (not alone)
        ended = end[..., step, :] = begun + lasts
        left = leave[..., step, :] = np.maximum(here, ended)
    return GroupTimes(arrive, leave, begin, end, group_size, tau or 0, groups)


def simulate_neighbours(
    method: Literal["allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp"],
    compute: np.ndarray,
    *,
    seconds: float = 0.0,
    period: int = 1,
) -> np.ndarray:
    """Returns when workers that wait for others' steps leave their own.

    Args:
      method: for whom a worker waits, see `averaging_cost`.
      compute: seconds of each worker's step, delays included, `[..., T, P]`.
      seconds: from the last arrival that is waited for to the result; of "adpsgd"
        nobody notices.
      period: of local SGD.

    Returns:
      Seconds, `[..., T, P]`.

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
    left = np.zeros_like(compute[..., 0, :])
    for step in range(compute.shape[-2]):
        here = left + compute[..., step, :]
        if method == "sgp":
            offsets = exponential_offsets(len(ranks), step)
        else:
            offsets = [-1, 1] if method == "dpsgd" else []
        left = here
        for offset in offsets:
            left = np.maximum(left, here[..., (ranks - offset) % len(ranks)])
        due = method == "local_sgd" and (step + 1) % period == 0
        if due or method == "allreduce":
            left = np.broadcast_to(here.max(-1, keepdims=True), here.shape)
        if due or method in ("allreduce", "dpsgd", "sgp"):
            left = left + seconds
        leave[..., step, :] = left
    return leave
