"""The order of a pipeline's stage that follows the messages as they arrive.

No clock and no transport: processes and simulators run the same machine. Imports no
JAX.

References:
  Singh and Bhatele, AxoNN, IPDPS 2022, section 3, and its `inter_layer.py`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hpcjax.core import checks
from hpcjax.core.errors import HpcjaxError

Pass = Literal["F", "B"]
Ties = Literal["arrival", "backward", "forward"]
TIES: tuple[Ties, ...] = ("arrival", "backward", "forward")


class Action(NamedTuple):
    """What a stage does next with a micro-batch.

    Attributes:
      kind: `F` or `B`, a pass of this stage.
      number: of the micro-batch.
      to: the stage that gets the result, None if none does.
    """

    kind: Pass
    number: int
    to: int | None


class MessageDriven:
    """A stage's side of one batch, told of messages one at a time.

    The first stage keeps at most `in_flight` micro-batches in the pipeline: it begins
    with as many, and injects the next one right after a backward pass, before messages
    that wait. The last stage runs a backward pass at once after its forward pass.

    Attributes:
      expected: messages still to come, `{"F": activations, "B": cotangents}`.
      stages: of the pipeline.
      stage: ours.

    Args:
      stages: of the pipeline, G.
      stage: ours, from 0.
      micro_batches: of the batch.
      in_flight: at most in the pipeline; None for `stages`, as published.
      ties: which of several waiting messages comes first: the one that arrived first,
        or one of a kind.

    Raises:
      ConfigError: a number below 1, a stage that is not there, other ties.

    Examples:
      >>> first = MessageDriven(2, 0, 3)
      >>> first.start()
      [Action(kind='F', number=0, to=1), Action(kind='F', number=1, to=1)]
      >>> first.arrived("B", 0)
      [Action(kind='B', number=0, to=None), Action(kind='F', number=2, to=1)]
      >>> first.expected
      {'F': 0, 'B': 2}
    """

    def __init__(
        self,
        stages: int,
        stage: int,
        micro_batches: int,
        in_flight: int | None = None,
        ties: Ties = "arrival",
    ) -> None:
        in_flight = stages if in_flight is None else in_flight
        checks.require_count(
            1, stages=stages, micro_batches=micro_batches, in_flight=in_flight
        )
        rule = f"stage must be in [0, {stages})"
        checks.require(0 <= stage < stages, rule, stage=stage)
        checks.require(ties in TIES, f"ties must be one of {TIES}", ties=ties)
        self.stages, self.stage, self._last = stages, stage, stage == stages - 1
        self._count, self._in_flight, self._ties = micro_batches, in_flight, ties
        self._injected, self._started = 0, False
        self._coming: dict[Pass, set[int]] = {
            "F": set(range(micro_batches)) if stage else set(),
            "B": set() if self._last else set(range(micro_batches)),
        }

    @property
    def expected(self) -> dict[Pass, int]:
        """How many messages are still to come, by kind."""
        return {kind: len(numbers) for kind, numbers in self._coming.items()}

    def start(self) -> list[Action]:
        """Returns what is done before any message.

        Raises:
          HpcjaxError: it has begun: each batch has a machine of its own.
        """
        if self._started:
            raise HpcjaxError(
                f"stage {self.stage} has begun: each batch needs a new one"
            )
        self._started = True
        if self.stage:
            return []
        first = self._count if self._last else min(self._in_flight, self._count)
        return [action for _ in range(first) for action in self._inject()]

    def arrived(self, kind: Pass, number: int) -> list[Action]:
        """Returns what a message makes the stage do, in order.

        Args:
          kind: `F` for activations from the stage below, `B` for a cotangent.
          number: of the micro-batch.

        Raises:
          HpcjaxError: no such message is to come.
        """
        if number not in self._coming[kind]:
            raise HpcjaxError(
                f"stage {self.stage} waits for no {kind} of micro-batch {number}"
            )
        self._coming[kind].remove(number)
        if kind == "F":
            return self._forward(number)
        below = self.stage - 1 if self.stage else None
        done = [Action("B", number, below)]
        return done if self.stage else [*done, *self._inject()]

    def choose(self, waiting: Sequence[Pass]) -> int:
        """Returns which of the messages that wait is next, by their kinds in order."""
        wanted = {"backward": "B", "forward": "F"}.get(self._ties)
        return waiting.index(wanted) if wanted in waiting else 0  # type: ignore

    def _inject(self) -> list[Action]:
        """Returns the forward pass of the next micro-batch, if there is one."""
        if self._injected == self._count:
            return []
        self._injected += 1
        return self._forward(self._injected - 1)

    def _forward(self, number: int) -> list[Action]:
        if not self._last:
            return [Action("F", number, self.stage + 1)]
        below = self.stage - 1 if self.stage else None
        return [Action("F", number, None), Action("B", number, below)]
