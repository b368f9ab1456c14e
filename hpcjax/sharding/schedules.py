"""Pipeline schedules: which stage runs on which micro-batch where, in what order.

One `Schedule` is checked here, timed by `perf.simulate` and turned into static tables
for an executor by `tick_table`. D stages, N micro-batches a step; imports no JAX.

References:
  GPipe: Huang et al., NeurIPS 2019. 1F1B: Narayanan et al., SOSP 2019; interleaved:
  SC21. Chimera: Li and Hoefler, SC21. ZB-H1: Qi et al., ICLR 2024, section 2.
"""

import collections
import dataclasses
from collections.abc import Container, Iterable
from typing import Literal, NamedTuple

from hpcjax.core.errors import ConfigError

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
_Steps = list[tuple[Kind, int]]  # what is done, and on which micro-batch


class Op(NamedTuple):
    """One micro-batch passing one stage.

    Attributes:
      device: where.
      kind: `F` forward, `B` backward, `W` the weights' part of the backward pass where
        a schedule does it apart; `B` is then the inputs' part.
      stage: which part of the model, from 0.
      micro_batch: which part of the batch, from 0.
      replica: which copy of the stage; only Chimera has two.
    """

    device: int
    kind: Kind
    stage: int
    micro_batch: int
    replica: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kind} of micro-batch {self.micro_batch} in stage {self.stage} "
            f"(replica {self.replica}) on device {self.device}"
        )


class Part(NamedTuple):
    """A stage's copy that a device holds."""

    replica: int
    stage: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step of a pipeline: the order of work on every device.

    Devices run their orders one op after the other, each as soon as what it needs has
    arrived. Hashable, so that it can be a static argument.

    Attributes:
      name: of the method.
      micro_batches: N, in a step, of all replicas together.
      holders: `holders[replica][stage]` is the device that holds that copy.
      orders: the ops of each device in order.
    """

    name: str
    micro_batches: int
    holders: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Op, ...], ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """D, the number of stages."""
        return len(self.holders[0])

    @property
    def replicas(self) -> int:
        """Copies of every stage."""
        return len(self.holders)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are ops of their own."""
        return any(op.kind == "W" for order in self.orders for op in order)

    def parts(self, device: int) -> tuple[Part, ...]:
        """Returns what a device holds; the place in it is the chunk of `tick_table`."""
        return tuple(
            Part(replica, stage)
            for replica, row in enumerate(self.holders)
            for stage, holder in enumerate(row)
            if holder == device
        )

    def needs(self, op: Op) -> tuple[Op, ...]:
        """Returns the ops whose results `op` uses."""
        return self.all_needs((op,))[0]

    def all_needs(self, ops: Iterable[Op]) -> list[tuple[Op, ...]]:
        """Returns for each of `ops` those whose results it uses."""
        found: list[tuple[Op, ...]] = []
        for device, kind, stage, m, replica in ops:
            row = self.holders[replica]
            if kind == "W":
                found.append((Op(device, "B", stage, m, replica),))
                continue
            own = (Op(device, "F", stage, m, replica),) if kind == "B" else ()
            other = stage - 1 if kind == "F" else stage + 1
            if 0 <= other < len(row):
                found.append((*own, Op(row[other], kind, other, m, replica)))
            else:
                found.append(own)
        return found


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Returns GPipe: all forwards, then all backwards in the same order.

    Raises:
      ConfigError: fewer than one stage or micro-batch.

    Examples:
      >>> [op.kind + str(op.micro_batch) for op in gpipe(2, 2).orders[0]]
      ['F0', 'F1', 'B0', 'B1']
    """
    _check_sizes(stages, micro_batches)
    every = range(micro_batches)
    steps: _Steps = [*(("F", m) for m in every), *(("B", m) for m in every)]
    return _one_stage_each("gpipe", micro_batches, [steps] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Returns 1F1B with a flush: forwards and backwards alternate after a warm-up.

    Stage s begins with min(D − s − 1, N) forwards: the bubbles are GPipe's, and at most
    D − s micro-batches are kept instead of N.

    Raises:
      ConfigError: fewer than one stage or micro-batch.

    Examples:
      >>> [op.kind + str(op.micro_batch) for op in one_f_one_b(2, 3).orders[0]]
      ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    _check_sizes(stages, micro_batches)
    every = range(micro_batches)
    rows = [
        _alternate([("F", m) for m in every], [("B", m) for m in every], stages - s - 1)
        for s in range(stages)
    ]
    return _one_stage_each("one_f_one_b", micro_batches, rows)


def zero_bubble_h1(stages: int, micro_batches: int) -> Schedule:
    """Returns ZB-H1: 1F1B whose gradients of weights are taken later, in its bubbles.

    Stage s takes those of micro-batch m after the backward of micro-batch m + s, so
    that every stage keeps as many micro-batches as the first one of 1F1B.

    Raises:
      ConfigError: fewer than one stage or micro-batch.

    Examples:
      >>> [op.kind + str(op.micro_batch) for op in zero_bubble_h1(2, 2).orders[1]]
      ['F0', 'B0', 'F1', 'B1', 'W0', 'W1']
    """
    plain = one_f_one_b(stages, micro_batches)
    rows = []
    for s, order in enumerate(plain.orders):
        steps: _Steps = []
        for op in order:
            steps.append((op.kind, op.micro_batch))
            if op.kind == "B" and op.micro_batch >= s:
                steps.append(("W", op.micro_batch - s))
        left = range(max(0, micro_batches - s), micro_batches)
        steps.extend(("W", m) for m in left)
        rows.append(steps)
    return _one_stage_each("zero_bubble_h1", micro_batches, rows)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Returns interleaved 1F1B: each of D/v devices holds v chunks of the model.

    Device r holds stages r, r + D/v, …; its warm-up is 2(D/v − r − 1) + (v − 1)D/v
    forwards, and micro-batches go through a chunk in groups of D/v.

    Raises:
      ConfigError: `chunks` does not divide `stages`, or the number of devices does not
        divide `micro_batches`.

    Examples:
      >>> schedule = interleaved(4, 2, 2)
      >>> schedule.devices, schedule.holders
      (2, ((0, 1, 0, 1),))
    """
    _check_sizes(stages, micro_batches)
    if chunks < 1 or stages % chunks:
        raise ConfigError(
            f"chunks must divide stages: got chunks={chunks}, stages={stages}"
        )
    devices = stages // chunks
    if micro_batches % devices:
        raise ConfigError(
            "micro_batches must be a multiple of the devices, stages / chunks: got "
            f"micro_batches={micro_batches}, devices={devices}"
        )
    # (chunk, micro-batch) in the order in which a device's chunks are visited forwards.
    visits = [
        (chunk, first + m)
        for first in range(0, micro_batches, devices)
        for chunk in range(chunks)
        for m in range(devices)
    ]
    orders = []
    for r in range(devices):
        forwards = [Op(r, "F", c * devices + r, m) for c, m in visits]
        backwards = [Op(r, "B", (chunks - 1 - c) * devices + r, m) for c, m in visits]
        warm_up = 2 * (devices - r - 1) + (chunks - 1) * devices
        orders.append(tuple(_alternate(forwards, backwards, warm_up)))
    holders = (tuple(stage % devices for stage in range(stages)),)
    return Schedule(
        name="interleaved",
        micro_batches=micro_batches,
        holders=holders,
        orders=tuple(orders),
    )


def chimera(stages: int, micro_batches: int) -> Schedule:
    """Returns Chimera: two pipelines in opposite directions over the same devices.

    Device d holds stage d of the down pipeline (replica 0), which takes the first half
    of the micro-batches, and stage D − 1 − d of the up pipeline (replica 1).

    Raises:
      ConfigError: `stages` is odd or does not divide `micro_batches`.

    Examples:
      >>> chimera(2, 2).holders
      ((0, 1), (1, 0))
      >>> [(op.kind, op.replica) for op in chimera(2, 2).orders[0]]
      [('F', 0), ('F', 1), ('B', 1), ('B', 0)]
    """
    _check_sizes(stages, micro_batches)
    if stages % 2 or micro_batches % stages:
        raise ConfigError(
            "chimera needs an even number of stages that divides micro_batches: got "
            f"stages={stages}, micro_batches={micro_batches}"
        )
    down = tuple(range(stages))
    holders = (down, down[::-1])
    units = micro_batches // stages
    orders = []
    for device in range(stages):
        # Each half mirrors the other: what is down here is up there.
        own = 0 if device < stages // 2 else 1
        distance = min(device, stages - 1 - device)
        counts: collections.Counter[tuple[Kind, int]] = collections.Counter()
        ops = []
        for kind, far in _chimera_kinds(stages, distance, units):
            replica = own ^ far
            place = counts[kind, replica] + replica * (micro_batches // 2)
            counts[kind, replica] += 1
            stage = device if replica == 0 else stages - 1 - device
            ops.append(Op(device, kind, stage, place, replica))
        orders.append(tuple(ops))
    return Schedule(
        name="chimera",
        micro_batches=micro_batches,
        holders=holders,
        orders=tuple(orders),
    )


def _chimera_kinds(stages: int, distance: int, units: int) -> _Steps:
    """Returns kinds and pipelines in order at a device, `distance` from its end.

    Pipeline 0 is the one that begins at that end. A unit is `stages` micro-batches; the
    drain of one overlaps the warm-up of the next.
    """
    a, b = stages // 2 - distance, distance
    begin: _Steps = [("F", 0)] * a
    middle: _Steps = [
        *[("F", 1), ("F", 0)] * b,
        *[("F", 1), ("B", 1)] * a,
        *[("B", 0), ("B", 1)] * b,
    ]
    again: _Steps = [("B", 0), ("F", 0)] * a
    end: _Steps = [("B", 0)] * a
    return begin + middle + (again + middle) * (units - 1) + end


def validate(schedule: Schedule) -> dict[Op, tuple[Op, ...]]:
    """Checks that a schedule does a step's work, and can be run to its end.

    Every micro-batch passes every stage of one replica once forwards and once backwards
    (and once for the weights, where these are apart), every op is on the device that
    holds its stage, and the orders neither contradict what ops need nor block.

    Returns:
      What each op needs; ops of all devices in an order in which they can run.

    Raises:
      ConfigError: names the rule, the op, its device and its micro-batch.
    """
    _check_holders(schedule)
    _check_places(schedule)
    _check_counts(schedule)
    return _in_order(schedule)


def _in_order(schedule: Schedule) -> dict[Op, tuple[Op, ...]]:
    rows = [
        collections.deque(zip(order, schedule.all_needs(order), strict=True))
        for order in schedule.orders
    ]
    done: dict[Op, tuple[Op, ...]] = {}
    left = -1
    while left != (left := sum(map(len, rows))):
        for row in rows:
            while row and all(need in done for need in row[0][1]):
                op, needs = row.popleft()
                done[op] = needs
    if left:
        waiting = [row[0][0] for row in rows if row]
        raise ConfigError(_why_blocked(schedule, waiting, done))
    return done


def _why_blocked(schedule: Schedule, waiting: list[Op], done: Container[Op]) -> str:
    blocked = {}
    for op in waiting:
        missing = next(need for need in schedule.needs(op) if need not in done)
        if missing.device == op.device:
            return f"{op} comes before {missing}, which it needs"
        blocked[op] = missing
    pairs = "; ".join(f"{op} waits for {missing}" for op, missing in blocked.items())
    return f"the orders block each other: {pairs}"


def _check_holders(schedule: Schedule) -> None:
    devices = {device for row in schedule.holders for device in row}
    if not devices <= set(range(schedule.devices)):
        raise ConfigError(
            f"holders must be devices below {schedule.devices}: got {schedule.holders}"
        )
    if len({len(row) for row in schedule.holders}) != 1:
        raise ConfigError(
            f"every replica has all stages: got holders {schedule.holders}"
        )
    _check_sizes(schedule.stages, schedule.micro_batches)


def _check_places(schedule: Schedule) -> None:
    stages, replicas = schedule.stages, schedule.replicas
    for device, order in enumerate(schedule.orders):
        for op in order:
            if op.kind not in KINDS:
                raise ConfigError(f"an op's kind is one of {KINDS}: got {op}")
            if not (
                0 <= op.micro_batch < schedule.micro_batches
                and 0 <= op.stage < stages
                and 0 <= op.replica < replicas
            ):
                raise ConfigError(
                    f"{op} is not of this schedule of {schedule.micro_batches} "
                    f"micro-batches, {stages} stages, {replicas} replicas"
                )
            holder = schedule.holders[op.replica][op.stage]
            if not op.device == device == holder:
                raise ConfigError(
                    f"{op} is in the order of device {device}, its stage is on device "
                    f"{holder}"
                )


def _check_counts(schedule: Schedule) -> None:
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    counts = collections.Counter(op for order in schedule.orders for op in order)
    for op, times in counts.items():
        if times > 1:
            raise ConfigError(f"{op} is there {times} times")
    replica_of: dict[int, int] = {}
    for op in counts:
        if replica_of.setdefault(op.micro_batch, op.replica) != op.replica:
            raise ConfigError(f"{op}: another op of its micro-batch is of a replica")
    if len(counts) == schedule.micro_batches * schedule.stages * len(kinds):
        return  # as they are all different, and of their micro-batch's replica
    for m in range(schedule.micro_batches):
        replica = replica_of.get(m, 0)
        for stage, device in enumerate(schedule.holders[replica]):
            for kind in kinds:
                op = Op(device, kind, stage, m, replica)
                if op not in counts:
                    raise ConfigError(f"{op} is missing")


def _alternate(forwards: Iterable, backwards: Iterable, warm_up: int) -> list:
    """Returns `warm_up` forwards, then forward and backward in turns, then the rest."""
    forwards, backwards = list(forwards), list(backwards)
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [op for pair in pairs for op in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _one_stage_each(name: str, micro_batches: int, rows: list[_Steps]) -> Schedule:
    """Returns a schedule whose device s holds stage s and runs `rows[s]`."""
    return Schedule(
        name=name,
        micro_batches=micro_batches,
        holders=(tuple(range(len(rows))),),
        orders=tuple(
            tuple(Op(s, kind, s, m) for kind, m in row) for s, row in enumerate(rows)
        ),
    )


def _check_sizes(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ConfigError(
            "a pipeline needs at least one stage and one micro-batch: got "
            f"stages={stages}, micro_batches={micro_batches}"
        )
