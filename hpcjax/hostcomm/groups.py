"""Averages of models in small, changing groups that do not wait for late workers.

"Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding
Group Averaging", Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, TPDS
2021. In every round each rank contributes the newest model that its worker has made.
"""

import threading
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import HpcjaxError
from hpcjax.hostcomm.activation import RoundAgent
from hpcjax.hostcomm.agreement import fingerprint, require_same
from hpcjax.hostcomm.collectives import add_by_halves, add_over_masks, barrier
from hpcjax.hostcomm.link import Clock
from hpcjax.hostcomm.mailbox import Tag
from hpcjax.hostcomm.trace import GroupTrace
from hpcjax.hostcomm.transport import Transport

LateRule = Literal["conditional", "always"]
START = -1  # the step that has written the model at the start
RING = 64


def require_sizes(group_size: int, **ranks: int) -> None:
    """Raises ConfigError unless S and P are powers of two and S is at most P.

    Args:
      group_size: S.
      ranks: P, by the name that its giver knows; none: it is not known yet.
    """
    for name, value in {**ranks, "group_size": group_size}.items():
        power = isinstance(value, int) and value > 0 and not value & (value - 1)
        checks.require(power, f"{name} must be a power of two", **{name: value})
    most = min([group_size, *ranks.values()])
    rule = f"group_size must be at most {most}"
    checks.require(group_size <= most, rule, group_size=group_size)


def butterfly_masks(ranks: int, group_size: int, number: int) -> tuple[int, ...]:
    """Returns with whom a rank exchanges in a round: itself XOR each mask, in turn.

    mask_r = 2^((t l + r) mod L) for r < l = log2 S, L = log2 P: the window of bits
    moves on by l in every round, so that after ceil(L / l) rounds everybody has
    influenced everybody. The averages over single bits commute: if nobody is late and
    nothing else changes, all models then are the mean of all.

    Args:
      ranks: P, a power of two.
      group_size: S, a power of two, at most P.
      number: t.

    Raises:
      ConfigError: P or S is no power of two, or S > P.

    Examples:
      >>> [butterfly_masks(8, 4, t) for t in range(3)]
      [(1, 2), (4, 1), (2, 4)]
    """
    require_sizes(group_size, ranks=ranks)
    bits, width = ranks.bit_length() - 1, group_size.bit_length() - 1
    return tuple(1 << ((number * width + r) % bits) for r in range(width))


def butterfly_groups(ranks: int, group_size: int, number: int) -> list[list[int]]:
    """Returns the groups of a round: ranks that differ only in bits of its masks.

    Args:
      ranks: P.
      group_size: S.
      number: of the round.

    Raises:
      ConfigError: P or S is no power of two, or S > P.

    Examples:
      >>> butterfly_groups(8, 4, 1)
      [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    window = sum(butterfly_masks(ranks, group_size, number))
    groups: dict[int, list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(rank & ~window, []).append(rank)
    return list(groups.values())


class GroupResult(NamedTuple):
    """What a round has summed up.

    Attributes:
      round: its number.
      total: the sum of the models of the rank's group, in a synchronous round of all,
        float32.
      written: the step whose model this rank's agent has contributed, at first -1.
      members: how many models were summed.
      synchronous: whether all ranks have waited for each other.
    """

    round: int
    total: np.ndarray
    written: int
    members: int
    synchronous: bool

    def mean(self, own: np.ndarray, late_rule: LateRule = "conditional") -> np.ndarray:
        """Returns the model to go on with.

        total / S; if our own new model came too late, (total + own) / (S + 1), or else
        its update would be lost.

        Args:
          own: the model posted for this round, flat.
          late_rule: "always" adds `own` in every round that is not synchronous, as in
            the authors' code.
        """
        in_time = self.written == self.round and late_rule == "conditional"
        if self.synchronous or in_time:
            return self.total / np.float32(self.members)
        return (self.total + own) / np.float32(self.members + 1)


class GroupAllreduce:
    """Sums of models in the groups of each round, started by whoever comes first.

    In step t a worker posts its model and takes the result of round t. An agent takes
    part in every round while the worker still computes, with the newest model that was
    posted. Every tau-th round is of all ranks and waits for them: no model that is
    averaged is older than tau - 1 rounds.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     groups = GroupAllreduce(alone, 2, 1, 10)
      ...     groups.start(np.zeros(2))
      ...     groups.post(0, np.array([1.0, 2.0]))
      ...     result = groups.result(0)
      ...     groups.finish()
      >>> result.total.tolist(), result.written
      ([1.0, 2.0], 0)
    """

    def __init__(
        self,
        transport: Transport,
        size: int,
        group_size: int,
        tau: int | None = 10,
        *,
        wait_avoiding: bool = True,
        groups: Literal["butterfly", "fixed"] = "butterfly",
        method: Literal["doubling", "halving"] = "doubling",
        ring: int | None = None,
        first: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """All ranks make theirs in the same order; `start` begins.

        Args:
          transport: ours.
          size: numbers in a model.
          group_size: S, a power of two; 1: no exchange but every tau-th round.
          tau: rounds from one of all ranks to the next; None: there is none.
          wait_avoiding: False makes every round wait for its whole group.
          groups: "fixed" are those of the first round, in all.
          method: "doubling" sends n log2 S numbers in log2 S messages, "halving"
            2 n (S - 1) / S in twice as many: for large models.
          ring: how many results a late worker may miss, more are an error; None: as
            many as there can be, and without tau 64.
          first: rounds that were before; groups and rounds of all go on from there.
          clock: by which arrivals are noted.

        Raises:
          ConfigError: arguments that cannot be; P is no power of two.
        """
        butterfly_masks(transport.size, group_size, 0)
        checks.require_choice("groups", groups, ("butterfly", "fixed"))
        checks.require_choice("method", method, ("doubling", "halving"))
        checks.require_count(1, size=size, tau=1 if tau is None else tau)
        checks.require_count(1, ring=1 if ring is None else ring)
        self.transport, self.size, self.group_size = transport, size, group_size
        self.tau, self.groups, self.wait_avoiding = tau, groups, wait_avoiding
        self.method, self._first = method, first
        self._ring = ring or tau or RING
        self._clock = clock or Clock()
        self._arrivals: list[float] = []
        self._written: list[int] = []
        self._kept: dict[int, GroupResult] = {}
        self._taken = -1
        self._lock = threading.Lock()
        self._model, self._step = np.zeros(0, np.float32), START
        self._kind = transport.new_kind("groups")
        self._rounds: RoundAgent | None = None

    def start(
        self, model: np.ndarray, *, structure: str = "", check: bool = True
    ) -> None:
        """Starts the agent with the model that all ranks begin with.

        Args:
          model: of the given size, of any shape and floating dtype; it is copied.
          structure: what the numbers are, such as paths and shapes.
          check: whether all ranks must have the same model and structure.

        Raises:
          ConfigError: another size, or models, structures or settings differ between
            the ranks.
        """
        checks.require(self._rounds is None, "it has started already", rounds=0)
        self._model = self._flat(model)
        settings: dict[str, Any] = {
            "size": self.size,
            "group_size": self.group_size,
            "tau": self.tau,
            "wait_avoiding": self.wait_avoiding,
            "groups": self.groups,
            "method": self.method,
        }
        if check:
            settings |= fingerprint(self._model, structure)
        require_same(self.transport, settings, Tag(f"{self._kind} settings"))
        self._rounds = RoundAgent(
            self.transport, self._run, kind=self._kind, frames=self._frames,
            waits=self._waits,
        )  # fmt: skip

    def is_global(self, number: int) -> bool:
        """Says whether a round is of all ranks and waits for them."""
        return self.tau is not None and (self._first + number + 1) % self.tau == 0

    def post(self, step: int, model: np.ndarray) -> None:
        """Makes a model the one to be averaged from now on; returns at once.

        Args:
          step: 0, 1, 2, ...
          model: of the given size, of any shape and floating dtype; it is copied.

        Raises:
          ConfigError: another step or size, the result of the step before was not
            taken, or nothing was started.
          ProcessLost: a process has ended.
        """
        rounds = self._started()
        rounds.check_next(step)
        before = f"the result of step {step - 1} must be taken first"
        checks.require(self._taken == step - 1, before, step=step)
        fresh = self._flat(model)  # copied before the lock: the agent never waits
        self._arrivals.append(self._clock.time())
        with self._lock:
            self._model, self._step = fresh, step
        rounds.arrive()

    def result(self, step: int, timeout: float | None = None) -> GroupResult:
        """Returns the result of a step's round; a late worker need not wait.

        Args:
          step: the one posted last.
          timeout: seconds; None: as long as it takes.

        Raises:
          ConfigError: another step.
          HpcjaxError: this worker has missed more results than the ring holds.
          ProcessLost: a process has ended, or stands still.
          TimeoutError: the timeout is over; it may be asked for again.
        """
        rounds = self._started()
        posted = self._taken == step - 1 == rounds.arrived - 1
        checks.require(posted, f"{rounds.arrived} was posted last", step=step)
        rounds.wait(step, timeout)
        self._taken = step
        with self._lock:
            return self._kept.pop(step)

    def finish(self, timeout: float | None = None) -> None:
        """Waits for all ranks and ends the agent; every worker calls it at the end.

        Raises:
          ProcessLost: a process has ended, or stands still.
          TimeoutError: the timeout is over; it may be called again.
        """
        self._started().finish(timeout)

    def trace(self) -> GroupTrace:
        """Returns what this rank has done; complete after `finish`."""
        steps = len(self._arrivals)
        return GroupTrace(
            np.array(self._arrivals)[:, None],
            np.array(self._written[:steps], np.int32)[:, None],
            self.group_size,
            self.tau or 0,
            self.groups,
            self._first,
        )

    def _started(self) -> RoundAgent:
        if self._rounds is None:
            raise HpcjaxError("`start` comes first")
        return self._rounds

    def _flat(self, model: np.ndarray) -> np.ndarray:
        rule = f"size must be {self.size}"
        checks.require(model.size == self.size, rule, size=model.size)
        return np.array(model, np.float32).reshape(-1)

    def _masks(self, number: int) -> tuple[int, ...]:
        ranks = self.transport.size
        if self.is_global(number):
            return butterfly_masks(ranks, ranks, 0)
        number = 0 if self.groups == "fixed" else self._first + number
        return butterfly_masks(ranks, self.group_size, number)

    def _frames(self, number: int) -> list[Tag]:
        phases = range(len(self._masks(number)) * (1 + (self.method == "halving")))
        return [Tag(self._kind, number, phase) for phase in phases]

    def _waits(self, number: int) -> bool:
        alone = self.group_size == 1  # its result is its worker's own model
        return alone or not self.wait_avoiding or self.is_global(number)

    def _run(self, number: int, last: bool) -> None:
        if last:  # nobody may leave while others still send activations
            barrier(self.transport, tag=Tag(f"{self._kind} end"))
            return
        with self._lock:  # nobody changes what was posted: it is copied outside
            model, written = self._model, self._step
        total = model.copy()
        masks, tag = self._masks(number), Tag(self._kind, number)
        if self.method == "halving":
            add_by_halves(self.transport, total, masks, tag)
        else:
            add_over_masks(self.transport, total, masks, np.add, tag)
        self._written.append(written)
        result = GroupResult(
            number, total, written, 1 << len(masks), self.is_global(number)
        )
        with self._lock:
            if len(self._kept) == self._ring:
                raise HpcjaxError(
                    f"round {number}: this worker has missed {self._ring} rounds, more "
                    "than its ring of results holds"
                )
            self._kept[number] = result
