"""The static part of a pipeline's program: its branches, and what every tick reads.

`sharding.pipeline` runs a scan over ticks, in each of which a device takes one branch
of a `lax.switch`. Which one, for which micro-batch, and where inputs are read and
results stored are tables that follow from the schedule alone.
"""

from typing import Any, NamedTuple

import numpy as np

from hpcjax.sharding import ticks
from hpcjax.sharding.schedules import Schedule

IDLE_BRANCH = 0


class Branch(NamedTuple):
    """A kind of op that is compiled separately.

    Attributes:
      kind: `"F"`, `"B"` or `"W"`, see `Op`.
      first: whether it is of the first stage, and so includes `StageFunctions.first`.
      last: whether it is of the last stage, and so includes `StageFunctions.last`.
      decodes: whether it is sent a code.
      encodes: whether it sends one.
    """

    kind: str
    first: bool
    last: bool
    decodes: bool = False
    encodes: bool = False


class ProgramPlan(NamedTuple):
    """The static tables of a pipeline's program.

    Buffers have one place more than they need: results that nobody uses are written to
    that last place, so that every tick writes, as an SPMD program must.

    Attributes:
      branches: those of the switch, except the idle one, which precedes them.
      rows: int32 `[device, tick]` each: `branch`, `stage`, `micro_batch` and `chunk` of
        the op; `read`, the place of the inbox with its input; `from_below` and
        `from_above`, the places for what arrives from either neighbour; `saved`, the
        place of the stage's input (for `W` also of the output's gradient) that a
        backward op reads; `save_input` and `save_slope`, where `received` is saved as
        either.
      pairs: for both directions the (source, target) devices that communicate at all.
      saved_buffers: places for inputs of stages, without the last.
      inbox_buffers: places of the inbox, without the last.
    """

    branches: list[Branch]
    rows: dict[str, np.ndarray]
    pairs: dict[str, list[tuple[int, int]]]
    saved_buffers: int
    inbox_buffers: int


def plan_program(schedule: Schedule, coded: int | None = None) -> ProgramPlan:
    """Returns the static tables of the program that runs a schedule.

    Args:
      schedule: which op runs where, and in what order.
      coded: the first stage that is sent a code; None if none is.
    """
    table = ticks.tick_table(schedule)
    if coded is not None and schedule.devices == 2:
        table = _tell_ways_apart(table)
    stages = [
        [part.stage for part in schedule.parts(device)]
        for device in range(schedule.devices)
    ]
    stage = np.take_along_axis(np.array(stages), table.chunk, axis=1)
    coded = schedule.stages if coded is None else coded
    branches, branch = _choose_branches(table, stage, schedule.stages - 1, coded)

    def places(buffer: np.ndarray, buffers: int, where: Any = True) -> np.ndarray:
        # -1, none, becomes the last place, which is never read for a purpose.
        return np.where((buffer >= 0) & where, buffer, buffers).astype(np.int32)

    saved, inbox = table.saved_buffers, table.inbox_buffers
    rows = {
        "branch": branch,
        "stage": stage.astype(np.int32),
        "micro_batch": table.micro_batch,
        "chunk": table.chunk,
        "read": places(table.inbox, inbox),
        "from_below": places(table.from_below, inbox),
        "from_above": places(table.from_above, inbox),
        "saved": places(table.saved, saved),
        # A forward op receives its stage's input, a backward op its output's gradient.
        "save_input": places(table.saved, saved, table.op == ticks.FORWARD),
        "save_slope": places(table.saved, saved, table.op == ticks.BACKWARD),
    }
    return ProgramPlan(branches, rows, _find_pairs(schedule, table), saved, inbox)


def _tell_ways_apart(table: ticks.TickTable) -> ticks.TickTable:
    """Returns a table of two devices, which are each other's neighbour both ways.

    What device 1 gets is from below, and what device 0 gets from above.
    """
    both, upper = np.maximum(table.from_below, table.from_above), [[False], [True]]
    below, above = np.where(upper, both, -1), np.where(upper, -1, both)
    return table._replace(from_below=below, from_above=above)


def _choose_branches(
    table: ticks.TickTable, stage: np.ndarray, end: int, coded: int
) -> tuple[list[Branch], np.ndarray]:
    """Returns the branches that occur, and the number of that at each tick.

    The forward op of the last stage is idle: nobody receives its result, and the
    backward op computes it again.
    """
    numbers = np.full_like(table.op, IDLE_BRANCH)
    branches: list[Branch] = []
    for place in np.ndindex(numbers.shape):
        kind, at = " FBW"[table.op[place]], int(stage[place])
        codes = at >= coded, coded <= at + 1 <= end
        branch = Branch(kind, at == 0, at == end, *codes)
        if kind == " " or (kind == "F" and branch.last):
            continue
        if branch not in branches:
            branches.append(branch)
        numbers[place] = 1 + branches.index(branch)
    return branches, numbers


def _find_pairs(
    schedule: Schedule, table: ticks.TickTable
) -> dict[str, list[tuple[int, int]]]:
    """Returns for both directions who sends to whom at some tick."""
    devices = schedule.devices
    steps = {"from_below": -1, "from_above": 1}
    pairs = {
        name: [
            ((device + step) % devices, device)
            for device, row in enumerate(getattr(table, name))
            if (row >= 0).any()
        ]
        for name, step in steps.items()
    }
    return {name: each for name, each in pairs.items() if each}
