"""Sums over ranks that do not wait for all of them: solo, majority and quorum.

"Taming Unbalanced Training Workloads in Deep Learning with Partial Collective
Operations", Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, PPoPP 2020. In every round
each rank contributes what it has posted and not yet contributed: nothing if it is late,
later what is stale by then.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.activation import RoundAgent, initiators
from hpcjax.hostcomm.agreement import require_same
from hpcjax.hostcomm.collectives import allreduce
from hpcjax.hostcomm.link import Clock
from hpcjax.hostcomm.mailbox import Tag
from hpcjax.hostcomm.trace import PartialTrace
from hpcjax.hostcomm.transport import Transport

Mode = Literal["solo", "majority", "sync"] | int
RING = 64
_BLOCK = 1024  # initiators drawn at a time


class RoundResult(NamedTuple):
    """What a round has summed up.

    Attributes:
      round: its number.
      total: the sum over all ranks of what they contributed, float32; to be divided by
        the number of all ranks, whoever contributed.
      fresh: how many contributions held the gradient of the round's own step.
      contributors: how many held any.
    """

    round: int
    total: np.ndarray
    fresh: int
    contributors: int


class PartialStats(NamedTuple):
    """What a rank has seen.

    Attributes:
      fresh: fresh contributions to each round.
      staleness: how many of this rank's gradients were summed so many rounds late.
      waited: seconds in `result` and `finish`.
    """

    fresh: np.ndarray
    staleness: np.ndarray
    waited: float


class PartialAllreduce:
    """Sums of gradients that start before all ranks have theirs.

    In step t a worker posts a gradient and takes the results of round t, for which it
    waits, or if it was late those of all rounds that have ended. An agent takes part
    in every round while the worker still computes.

    "solo": the first worker that arrives starts the round. "majority": a rank that is
    drawn for each round does, so that on average half of the others have arrived;
    nobody has to count. A number q: the q-th that arrives does, which rank 0 counts.
    "sync": the last one does, as in `allreduce`.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     partial = PartialAllreduce(alone, 2, mode="solo")
      ...     partial.post(0, np.array([1.0, 2.0]))
      ...     [(each.round, each.total.tolist()) for each in partial.result(0)]
      ...     last = partial.finish()
      [(0, [1.0, 2.0])]
    """

    def __init__(
        self,
        transport: Transport,
        size: int,
        *,
        mode: Mode = "majority",
        limiter: int = 32,
        seed: int = 0,
        missed: Literal["apply_all", "newest"] = "apply_all",
        ring: int | None = None,
        stale: Literal["accumulate", "drop"] = "accumulate",
        first: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """Starts the agent; all ranks make theirs in the same order.

        Args:
          transport: ours.
          size: numbers in a gradient.
          mode: who starts a round.
          limiter: after so many partial rounds all wait for one; 0: never. No gradient
            is summed more than so many rounds late.
          seed: of the initiators that "majority" draws.
          missed: what a late worker takes: the results of all rounds it has not had, or
            only the newest, as in the paper; then replicas drift apart.
          ring: how many results a late worker may miss; the round that would be one
            more waits for it. None: enough for the limiter, and without one 64.
          stale: whether a gradient is added to those before that were in no round
            yet, or, as in the authors' code for ImageNet, replaces them.
          first: rounds that were before; who starts a round is drawn from there on.
          clock: by which arrivals are noted.

        Raises:
          ConfigError: arguments that cannot be, or differ between the ranks.
        """
        settings = {
            "size": size,
            "mode": mode,
            "limiter": limiter,
            "seed": seed,
            "missed": missed,
            "ring": ring or (limiter + 2 if limiter else RING),
            "stale": stale,
            "first": first,
        }
        _check(settings, ring, transport.size)
        self.transport, self.size, self.missed = transport, size, missed
        self._mode, self._limiter, self._seed = mode, limiter, seed
        self._ring = settings["ring"] if missed == "apply_all" else None
        self._clock = clock or Clock()
        self._arrivals: list[float] = []
        self._waited = 0.0
        self._buffer = _SendBuffer(size, stale)
        self._results = _Results(newest=missed == "newest")
        self._first = first
        self._drawn = initiators(seed, transport.size, _BLOCK)
        kind = transport.new_kind("partial")
        self._partial, self._sync = kind, f"{kind} sync"
        require_same(transport, settings, Tag(f"{kind} settings"))
        phases = range(transport.size.bit_length() + 1)
        self._rounds = RoundAgent(
            transport,
            self._run,
            kind=kind,
            frames=lambda number: [Tag(self._partial, number, p) for p in phases],
            starter=self._starter,
            quorum=mode if isinstance(mode, int) else 1,
            waits=self._waits,
        )

    def post(self, step: int, grad: np.ndarray) -> None:
        """Adds a gradient to what is to be summed; returns at once.

        Args:
          step: 0, 1, 2, ...
          grad: of the given size, of any shape and floating dtype; it is copied.

        Raises:
          ConfigError: another step or size, or the results of the step before were not
            taken.
          ProcessLost: a process has ended.
        """
        size, real = grad.size, np.can_cast(grad.dtype, np.float32, "same_kind")
        checks.require(size == self.size, f"size must be {self.size}", size=size)
        checks.require(real, "gradients must be real", dtype=str(grad.dtype))
        self._rounds.check_next(step)
        before = f"the result of step {step - 1} must be taken first"
        checks.require(len(self._results.taken) == step, before, step=step)
        self._arrivals.append(self._clock.time())
        self._buffer.add(step, grad)
        self._rounds.arrive()

    def result(
        self, step: int, timeout: float | None = None
    ) -> tuple[RoundResult, ...]:
        """Returns the results that are to be applied after a step, maybe none.

        Waits until the step's round has ended; a late worker need not. Every result is
        returned once.

        Args:
          step: the one posted last.
          timeout: seconds; None: as long as it takes.

        Raises:
          ConfigError: another step.
          ProcessLost: a process has ended, or stands still.
          TimeoutError: the timeout is over; it may be asked for again.
        """
        posted = len(self._results.taken) == step == self._rounds.arrived
        checks.require(posted, f"{self._rounds.arrived} was posted last", step=step)
        with self._waiting():
            self._rounds.wait(step, timeout)
        return self._results.take()

    def finish(self, timeout: float | None = None) -> tuple[RoundResult, ...]:
        """Waits for all in a last round, for what was in none yet, and ends the agent.

        Every worker calls it after its last step.

        Returns:
          The results that are still to be applied; that of the last round only if
          somebody had something for it.

        Raises:
          ProcessLost: a process has ended, or stands still.
          TimeoutError: the timeout is over; it may be called again.
        """
        with self._waiting():
            self._rounds.finish(timeout)
        return self._results.take()

    def stats(self) -> PartialStats:
        """Returns what was seen until now."""
        return PartialStats(
            np.array(self._results.fresh[: len(self._arrivals)], int),
            np.bincount(self.trace().staleness()),
            self._waited,
        )

    def trace(self) -> PartialTrace:
        """Returns what this rank's worker has done; complete after `finish`."""
        arrival = np.array(self._arrivals)
        contributed = self._buffer.contributed[: len(arrival)]
        return PartialTrace(
            arrival[:, None],
            np.array(contributed, np.int32)[:, None],
            np.array(self._results.taken, np.int32).reshape(-1, 1, 2),
            self._buffer.stale,
        )

    def _run(self, number: int, last: bool) -> None:
        kind = self._sync if last or self._synchronous(number) else self._partial
        mine = self._buffer.swap(number)
        total = allreduce(
            self.transport, mine, method="doubling", tag=Tag(kind, number)
        )
        counts = map(int, total[-2:])
        result = RoundResult(number, total[:-2], *counts)
        # An empty round at the end must be no update: it would move with a momentum.
        self._results.publish(result, kept=not last or result.contributors > 0)

    def _synchronous(self, number: int) -> bool:
        period = self._limiter + 1
        return self._mode == "sync" or (period > 1 and number % period == self._limiter)

    def _waits(self, number: int) -> bool:
        full = self._ring is not None and number - self._results.last_taken > self._ring
        return full or self._synchronous(number)

    def _starter(self, number: int) -> int | None:
        if self._mode != "majority":
            return None
        place = self._first + number
        if place >= len(self._drawn):
            self._drawn = initiators(self._seed, self.transport.size, 2 * place)
        return int(self._drawn[place])

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = self._clock.time()
        try:
            yield
        finally:
            self._waited += self._clock.time() - begin


class _SendBuffer:
    """What a worker has posted and no round has taken yet, with its steps."""

    def __init__(self, size: int, stale: str) -> None:
        self.stale = stale
        self.contributed: list[int] = []
        self._size, self._lock = size, threading.Lock()
        self._clear()

    def add(self, step: int, grad: np.ndarray) -> None:
        with self._lock:
            if self.stale == "drop":
                self._clear()
            self._sum[:-2] += grad.reshape(-1)
            self._steps.append(step)
            self.contributed.append(-1)

    def swap(self, number: int) -> np.ndarray:
        """Returns the sum, and behind it whether the round's step and any are in it."""
        with self._lock:
            made, steps = self._sum, self._steps
            self._clear()
            for step in steps:
                self.contributed[step] = number
        made[-2:] = number in steps, bool(steps)
        return made

    def _clear(self) -> None:
        # Of bfloat16 gradients too: what is added up must not vanish.
        self._sum = np.zeros(self._size + 2, np.float32)
        self._steps: list[int] = []


class _Results:
    """The results that the worker has not taken yet, and which it has after each step.

    Attributes:
      taken: first and end of the rounds taken after each step.
      last_taken: up to which round all were taken or missed.
      fresh: contributions of each round that were.
    """

    def __init__(self, *, newest: bool) -> None:
        self.taken: list[tuple[int, int]] = []
        self.last_taken = -1
        self.fresh: list[int] = []
        self._kept: list[RoundResult] = []
        self._newest, self._lock = newest, threading.Lock()

    def publish(self, result: RoundResult, kept: bool) -> None:
        if not kept:
            return
        with self._lock:
            if self._newest:
                self._kept.clear()
            self._kept.append(result)
            self.fresh.append(result.fresh)

    def take(self) -> tuple[RoundResult, ...]:
        with self._lock:
            todo, self._kept = tuple(self._kept), []
            end = todo[-1].round + 1 if todo else self.last_taken + 1
            self.taken.append((todo[0].round if todo else end, end))
            self.last_taken = end - 1
        return todo


def _check(settings: Mapping[str, Any], ring: int | None, ranks: int) -> None:
    mode = settings["mode"]
    if isinstance(mode, int):
        most = f"a quorum must be in 1..{ranks}"
        checks.require(1 <= mode <= ranks, most, mode=mode)
    else:
        checks.require_choice("mode", mode, ("solo", "majority", "sync"))
    checks.require_choice("missed", settings["missed"], ("apply_all", "newest"))
    checks.require_choice("stale", settings["stale"], ("accumulate", "drop"))
    checks.require_count(1, size=settings["size"], ring=RING if ring is None else ring)
    counts = {name: settings[name] for name in ("limiter", "seed", "first")}
    checks.require_count(0, **counts)
