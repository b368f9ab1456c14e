"""The static table of a PipeFisher refresh: when and where each inverse is computed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.optim.kfac._blocks import Plan

# For each step of a refresh, the factors in the names of schedules: (stage, layer
# within the stage, "A" or "B"); the paper's B is G here.
Visible = Mapping[int, Iterable[tuple[int, int, str]]]
_SIDES = {"A": "a", "B": "g"}


class Table(NamedTuple):
    """When each inverse of a stack is computed, and by which replica.

    Attributes:
      period: steps of a refresh.
      steps: `{path: {"a": int32 [depth], "g": ...}}`, the step of a refresh at which
        the inverse is computed.
      mine: `{path: bool [depth]}`, whether this row's replica computes it when replicas
        share the work.
      layers_per_row: layers of a stack that belong to one of the rows.
    """

    period: int
    steps: dict[str, dict[str, np.ndarray]]
    mine: dict[str, np.ndarray]
    layers_per_row: int


def make_table(
    chosen: Plan, visible: Visible, rows: Sequence[tuple[int, int]] | None
) -> Table:
    """Returns the static table of a schedule that covers the plan, or raises."""
    steps = {factor: step for step, each in visible.items() for factor in each}
    period = len(visible)
    count = sum(len(tuple(each)) for each in visible.values())
    if not steps or set(visible) != set(range(period)) or count != len(steps):
        raise ConfigError(
            "visible must have every step of a refresh from 0 on and each factor once: "
            f"got steps {sorted(visible)}, {count} factors, {len(steps)} different"
        )
    if rows is None:
        rows = [(0, stage) for stage in range(1 + max(stage for stage, *_ in steps))]
    blocks, depths = chosen.blocks, {block.depth for block in chosen.blocks}
    depth = max(depths)
    if len(depths) != 1 or depth % len(rows):
        raise ConfigError(
            f"all layers must be in stacks of one depth that {len(rows)} rows divide: "
            f"got depths {[(block.path, block.depth) for block in blocks]}"
        )
    per = depth // len(rows)
    # Entry r · per + j of every stack is block j of row r; in the numbering of
    # schedules the layers of a stage run through its blocks first, then within a block.
    layers = {
        block.path: [
            (replica, stage, number * len(blocks) + place)
            for replica, stage in rows
            for number in range(per)
        ]
        for place, block in enumerate(blocks)
    }
    wanted = {
        (stage, layer, side)
        for each in layers.values()
        for _, stage, layer in each
        for side in _SIDES
    }
    if wanted != set(map(tuple, steps)):
        raise ConfigError(
            "visible must name the factors (stage, layer, side) of the plan: missing "
            f"{sorted(wanted - set(steps))}, unknown {sorted(set(steps) - wanted)}"
        )
    replicas = 1 + max(replica for replica, _ in rows)
    return Table(
        period,
        {
            path: {
                name: np.array([steps[s, layer, side] for _, s, layer in each], "int32")
                for side, name in _SIDES.items()
            }
            for path, each in layers.items()
        },
        # Replicas of a stage take its layers in turn.
        {
            path: np.array([layer % replicas == replica for replica, _, layer in each])
            for path, each in layers.items()
        },
        per,
    )
