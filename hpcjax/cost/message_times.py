"""Times of pipelines whose ops take other times each, by messages or by a fixed order.

References:
  Singh and Bhatele, AxoNN, IPDPS 2022: the order follows messages. Narayanan et al.,
  SOSP 2019: 1F1B.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable

import numpy as np

from hpcjax.core import checks
from hpcjax.cost.pipeline import Span, most_at_once, op_bar, run_ops
from hpcjax.cost.timelines import Bar
from hpcjax.sharding.message_driven import Action, MessageDriven, Pass, Ties
from hpcjax.sharding.schedules import Op, one_f_one_b

_MEANS = {"F": 1.0, "B": 2.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """One batch in a pipeline, a device for each stage.

    Attributes:
      spans: the ops of each stage with their times, in order.
    """

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last op ends."""
        return max(row[-1].end for row in self.spans)

    def held(self, stage: int) -> int:
        """Returns the most inputs that a stage keeps at a time, for backward passes.

        Of the first stage these are the micro-batches in flight.
        """
        ends = {(s.op.kind, s.op.micro_batch): s for s in self.spans[stage]}
        numbers = {s.op.micro_batch for s in self.spans[stage]}
        return most_at_once((ends["F", n].start, ends["B", n].end) for n in numbers)

    def bars(self) -> tuple[Bar, ...]:
        """Returns the ops of all stages as bars to draw."""
        return tuple(op_bar(span) for row in self.spans for span in row)


def draw_durations(
    stages: int, micro_batches: int, sigma: float, seed: int = 0
) -> np.ndarray:
    """Returns times of ops, [stages, micro-batches, 2]: of forward and backward passes.

    exp(σz − σ²/2) times 1 and 2, z standard normal, so that these are the means.

    Raises:
      ConfigError: a count below 1, or σ below 0.
    """
    checks.require_count(1, stages=stages, micro_batches=micro_batches)
    checks.require_finite(0.0, sigma=sigma)
    rng = np.random.Generator(np.random.Philox(seed))
    drawn = rng.standard_normal((stages, micro_batches, 2))
    return np.exp(sigma * drawn - sigma**2 / 2) * [_MEANS["F"], _MEANS["B"]]


def simulate_messages(
    durations: np.ndarray,
    latency: float = 0.0,
    in_flight: int | None = None,
    ties: Ties = "arrival",
) -> MessageTimes:
    """Simulates `sharding.MessageDriven` in all stages.

    Args:
      durations: of `draw_durations`, or others of its shape.
      latency: of a message, which keeps no device busy.
      in_flight: see `MessageDriven`. Of messages that arrive at the same time one for a
        backward pass is the first.
      ties: see `MessageDriven`.

    Raises:
      ConfigError: durations of another shape or not above 0, a latency below 0; see
        `MessageDriven`.

    Examples:
      >>> times = simulate_messages(draw_durations(4, 4, 0.0))
      >>> times.makespan, times.held(0), times.held(3)
      (21.0, 4, 1)
    """
    durations = _check(durations, latency)
    stages, count, _ = durations.shape
    machines = [MessageDriven(stages, s, count, in_flight, ties) for s in range(stages)]
    run = _Run(durations.tolist(), latency)
    run.act(0, 0.0, machines[0].start())
    for time, stage in run.turns():
        waiting = run.waiting[stage]
        place = machines[stage].choose([kind for kind, _ in waiting])
        run.act(stage, time, machines[stage].arrived(*waiting.pop(place)))
    return MessageTimes(spans=tuple(map(tuple, run.spans)))


class _Run:
    """The event queue: messages that are under way, and stages that become free."""

    def __init__(self, durations: list, latency: float) -> None:
        self._durations, self._latency = durations, latency
        self._events: list[tuple[float, int, int, int, tuple[Pass, int] | None]] = []
        self._order = itertools.count()
        self._free = [0.0] * len(durations)
        self.waiting: list[list[tuple[Pass, int]]] = [[] for _ in durations]
        self.spans: list[list[Span]] = [[] for _ in durations]

    def act(self, stage: int, time: float, actions: Iterable[Action]) -> None:
        """Runs ops one after the other, and sends what they give."""
        for kind, number, to in actions:
            end = time + self._durations[stage][number][kind == "B"]
            self.spans[stage].append(Span(time, end, Op(stage, kind, stage, number)))
            if to is not None:
                self._add(end + self._latency, to, (kind, number))
            time = end
        self._free[stage] = time
        self._add(time, stage, None)

    def _add(self, time: float, stage: int, message: tuple[Pass, int] | None) -> None:
        # At one time cotangents are before activations, and a stage is free after both.
        rank = 2 if message is None else "BF".index(message[0])
        event = (time, rank, next(self._order), stage, message)
        heapq.heappush(self._events, event)

    def turns(self) -> Iterable[tuple[float, int]]:
        """Yields times at which a free stage has a message."""
        while self._events:
            time, *_, stage, message = heapq.heappop(self._events)
            if message is not None:
                self.waiting[stage].append(message)
            if self.waiting[stage] and self._free[stage] <= time:
                yield time, stage


def simulate_one_f_one_b(
    durations: np.ndarray, latency: float = 0.0, in_flight: int | None = None
) -> MessageTimes:
    """Simulates 1F1B, whose order is fixed: each op waits for its own message.

    Stage i begins with `in_flight` − i forward passes, then takes turns.

    Args:
      durations: of `draw_durations`, or others of its shape.
      latency: of a message, which keeps no device busy.
      in_flight: forward passes that the first stage begins with; None for as many as
        there are stages, the usual number.

    Raises:
      ConfigError: durations of another shape or not above 0, a latency below 0, fewer
        in flight than stages.
    """
    durations = _check(durations, latency)
    stages, count, _ = durations.shape
    took = durations.tolist()
    spans = run_ops(
        one_f_one_b(stages, count, in_flight),
        lambda op: took[op.stage][op.micro_batch][op.kind == "B"],
        latency,
    )
    return MessageTimes(spans=spans)


def _check(durations: np.ndarray, latency: float) -> np.ndarray:
    durations = np.asarray(durations, float)
    rule = "durations must be [stages, micro-batches, 2]"
    good = durations.ndim == 3 and durations.shape[2] == 2 and durations.size > 0
    checks.require(good, rule, shape=durations.shape)
    positive = bool((durations > 0).all() and np.isfinite(durations).all())
    checks.require(positive, "durations must be finite and above 0")
    checks.require_finite(0.0, latency=latency)
    return durations
