"""Pipeline schedules: where each stage processes each micro-batch, and in what order.

A `Schedule` is built and checked here, timed by `cost.simulate`, and turned into static
tables for the executor by `tick_table`. D is the number of stages and N that of
micro-batches in a step. Imports no JAX.

References:
  GPipe: Huang et al., NeurIPS 2019. 1F1B: Narayanan et al., SOSP 2019; interleaved:
  SC21. Chimera: Li and Hoefler, SC21. ZB-H1: Qi et al., ICLR 2024, section 2.
"""

import collections
import dataclasses
from collections.abc import Container, Iterable
from typing import Literal, NamedTuple

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
_Steps = list[tuple[Kind, int]]  # (kind of op, micro-batch), or in Chimera pipeline


class Op(NamedTuple):
    """One pass of a micro-batch through a stage, forwards or backwards.

    Attributes:
      device: the device that runs it.
      kind: `F` for forward, `B` for backward. Where a schedule splits the backward
        pass, `B` computes the gradient of the stage's input and `W` that of its
        weights.
      stage: number of the stage, from 0.
      micro_batch: number of the micro-batch, from 0.
      replica: number of the stage's copy; only Chimera has two.
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
    """A copy of a stage, as a device holds it."""

    replica: int
    stage: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step of a pipeline: the order of ops on every device.

    A device runs its ops in this order, each as soon as its inputs have arrived. A
    schedule is hashable, so that it can be a static argument of `jit`.

    Attributes:
      name: of the method.
      micro_batches: N, the number of micro-batches of all replicas together.
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
        """Number of copies of every stage."""
        return len(self.holders)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are separate ops, `W`."""
        return any(op.kind == "W" for order in self.orders for op in order)

    def parts(self, device: int) -> tuple[Part, ...]:
        """Returns the parts that a device holds, in the order of its chunks."""
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
        """Returns for each op the ops whose results it uses."""
        all_needs: list[tuple[Op, ...]] = []
        for device, kind, stage, m, replica in ops:
            row = self.holders[replica]
            if kind == "W":
                all_needs.append((Op(device, "B", stage, m, replica),))
                continue
            # F needs the F of the stage before; B the F of its own stage, which saved
            # the input, and the B of the stage after.
            own = (Op(device, "F", stage, m, replica),) if kind == "B" else ()
            other = stage - 1 if kind == "F" else stage + 1
            if 0 <= other < len(row):
                all_needs.append((*own, Op(row[other], kind, other, m, replica)))
            else:
                all_needs.append(own)
        return all_needs


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


def one_f_one_b(
    stages: int, micro_batches: int, in_flight: int | None = None
) -> Schedule:
    """Returns 1F1B with a flush: forwards and backwards alternate after a warm-up.

    Stage s begins with min(K − s − 1, N) forwards, K = D as published. The bubbles are
    as long as GPipe's, but a stage stores the inputs of at most K − s micro-batches
    instead of N.

    Args:
      stages: D, a device each.
      micro_batches: N.
      in_flight: K, micro-batches that the first stage keeps at most; None for D.

    Raises:
      ConfigError: fewer than one stage or micro-batch, or in flight than stages.

    Examples:
      >>> [op.kind + str(op.micro_batch) for op in one_f_one_b(2, 3).orders[0]]
      ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    _check_sizes(stages, micro_batches)
    first = stages if in_flight is None else in_flight
    rule = f"in_flight must be at least the {stages} stages"
    checks.require(first >= stages, rule, in_flight=first)
    every = range(micro_batches)
    rows = [
        _alternate([("F", m) for m in every], [("B", m) for m in every], first - s - 1)
        for s in range(stages)
    ]
    return _one_stage_each("one_f_one_b", micro_batches, rows)


def zero_bubble_h1(stages: int, micro_batches: int) -> Schedule:
    """Returns ZB-H1: 1F1B with the gradients of weights postponed into the bubbles.

    Stage s computes those of micro-batch m after the `B` of micro-batch m + s, so that
    every stage stores as many micro-batches as the first stage of 1F1B.

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

    With P = D/v devices, device r holds the stages r, r + P, …. Micro-batches pass
    through the chunks in groups of P, and device r begins with 2(P − r − 1) + (v − 1)P
    forwards: P for each chunk but its last, and two for each device behind it.

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
    # (chunk, micro-batch) in the order of forwards, the same on every device. Backwards
    # visit the chunks in the opposite order.
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
    of the micro-batches, and stage D − 1 − d of the up pipeline (replica 1), which
    takes the second half. Each pipeline fills bubbles of the other.

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
        # The schedule is symmetric: device D − 1 − d does what device d does, with the
        # two pipelines exchanged. `own` is the pipeline that begins at the nearer end.
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
    """Returns (kind, pipeline) of a device's ops, in order.

    Pipeline 0 begins at the nearer end, `distance` devices away; pipeline 1 ends there,
    and so is the first to go backwards. A unit is D/2 micro-batches of each. The
    backwards at its end alternate with the forwards that begin the next unit.
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
    """Checks that a schedule is complete and can be run to its end.

    Every micro-batch must pass every stage of one replica once forwards and once
    backwards (and once for the weights, if these are separate), every op must be on the
    device that holds its stage, and the orders must not deadlock.

    Returns:
      The needs of each op, with the ops of all devices in an order in which they can
      run.

    Raises:
      ConfigError: a rule is broken; the message names it and the op.
    """
    _check_holders(schedule)
    _check_places(schedule)
    _check_counts(schedule)
    return _sort_topologically(schedule)


def _sort_topologically(schedule: Schedule) -> dict[Op, tuple[Op, ...]]:
    """Returns the ops of all devices with their needs, in an order that can be run."""
    rows = [
        collections.deque(zip(order, schedule.all_needs(order), strict=True))
        for order in schedule.orders
    ]
    done: dict[Op, tuple[Op, ...]] = {}
    # Each pass over the devices runs what can be run; a pass without progress ends it.
    left = -1
    while left != (left := sum(map(len, rows))):
        for row in rows:
            while row and all(need in done for need in row[0][1]):
                op, needs = row.popleft()
                done[op] = needs
    if left:
        waiting = [row[0][0] for row in rows if row]
        raise ConfigError(_explain_deadlock(schedule, waiting, done))
    return done


def _explain_deadlock(
    schedule: Schedule, waiting: list[Op], done: Container[Op]
) -> str:
    """Returns why the first op that is left on each device cannot run."""
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
        # All ops are different and of their micro-batch's replica, so as many as there
        # must be are all.
        return
    for m in range(schedule.micro_batches):
        replica = replica_of.get(m, 0)
        for stage, device in enumerate(schedule.holders[replica]):
            for kind in kinds:
                op = Op(device, kind, stage, m, replica)
                if op not in counts:
                    raise ConfigError(f"{op} is missing")


def _alternate(forwards: Iterable, backwards: Iterable, warm_up: int) -> list:
    """Returns `warm_up` forwards, then forward and backward in turn, then the rest."""
    forwards, backwards = list(forwards), list(backwards)
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [op for pair in pairs for op in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _one_stage_each(name: str, micro_batches: int, rows: list[_Steps]) -> Schedule:
    """Returns the schedule in which device s holds stage s and runs `rows[s]`."""
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
