"""Schedules, against a check of their rules written a second time here."""

import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from hpcjax.core.errors import ConfigError
from hpcjax.sharding import schedules, ticks

PLAIN = ("gpipe", "one_f_one_b", "zero_bubble_h1")


def every(stages, micro_batches):
    """Yields each schedule there is of this size."""
    for name in PLAIN:
        yield getattr(schedules, name)(stages, micro_batches)
    if stages % 2 == 0 and micro_batches % stages == 0:
        yield schedules.chimera(stages, micro_batches)
    for chunks in range(1, stages + 1):
        if stages % chunks == 0 and micro_batches % (stages // chunks) == 0:
            yield schedules.interleaved(stages, micro_batches, chunks)


def run_by_hand(schedule):
    """Runs the orders with nothing but sets; returns the ops, or None if it blocks."""
    done, order = set(), []
    rows = [list(row) for row in schedule.orders]
    while any(rows):
        ready = []
        for row in rows:
            if not row:
                continue
            _, kind, stage, m, replica = row[0]
            wanted = {
                "F": [("F", stage - 1)],
                "B": [("F", stage), ("B", stage + 1)],
                "W": [("B", stage)],
            }[kind]
            wanted = [(k, s) for k, s in wanted if 0 <= s < schedule.stages]
            if all((k, s, m, replica) in done for k, s in wanted):
                ready.append(row)
        if not ready:
            return None
        for row in ready:
            op = row.pop(0)
            done.add((op.kind, op.stage, op.micro_batch, op.replica))
            order.append(op)
    return order


def drawn(data):
    """Draws a schedule; made outside strategies, where type checks may use `random`."""
    stages = data.draw(st.sampled_from((2, 4, 6, 8)))
    micro_batches = data.draw(st.integers(1, 4 * stages) | st.just(2 * stages))
    number = data.draw(st.integers(0, 20))
    sized = list(every(stages, micro_batches))
    return sized[number % len(sized)]


@pytest.mark.acceptance("pipefisher", 2)
@pytest.mark.parametrize("stages", [2, 4, 6, 8])
def test_every_micro_batch_passes_every_stage_once_in_an_order_that_runs(stages):
    for micro_batches in range(1, 4 * stages + 1):
        for schedule in every(stages, micro_batches):
            found = schedules.validate(schedule)
            by_hand = run_by_hand(schedule)
            assert by_hand is not None
            assert sorted(found) == sorted(by_hand)
            kinds = "FBW" if schedule.name == "zero_bubble_h1" else "FB"
            wanted = itertools.product(kinds, range(stages), range(micro_batches))
            assert sorted((op.kind, op.stage, op.micro_batch) for op in found) == (
                sorted(wanted)
            )
            for op in found:
                assert schedule.holders[op.replica][op.stage] == op.device


@pytest.mark.acceptance("pipefisher", 2)
@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data())
def test_a_swap_against_a_dependency_is_refused(data):
    schedule = drawn(data)
    device = data.draw(st.integers(0, schedule.devices - 1))
    order = list(schedule.orders[device])
    later = data.draw(
        st.sampled_from([place for place, op in enumerate(order) if op.kind != "F"])
    )
    earlier = next(
        place
        for place, op in enumerate(order)
        if op in schedule.needs(order[later]) and op.stage == order[later].stage
    )
    order[earlier], order[later] = order[later], order[earlier]
    with pytest.raises(ConfigError, match=r"which it needs|block") as caught:
        schedules.validate(changed(schedule, device, order))
    for part in ("micro-batch", "device", "stage"):
        assert part in str(caught.value)
    assert run_by_hand(changed(schedule, device, order)) is None


@pytest.mark.acceptance("pipefisher", 2)
@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data(), st.sampled_from(["dropped", "doubled", "elsewhere"]))
def test_an_op_dropped_doubled_or_moved_is_refused_by_name(data, how):
    schedule = drawn(data)
    device = data.draw(st.integers(0, schedule.devices - 1))
    order = list(schedule.orders[device])
    place = data.draw(st.integers(0, len(order) - 1))
    op = order[place]
    if how == "dropped":
        del order[place]
        words = f"{op} is missing"
    elif how == "doubled":
        order.insert(data.draw(st.integers(0, len(order))), op)
        words = f"{op} is there 2 times"
    else:
        order[place] = op = op._replace(device=schedule.devices)
        words = f"{op} is in the order of device {device}"
    with pytest.raises(ConfigError) as caught:
        schedules.validate(changed(schedule, device, order))
    assert words in str(caught.value)


def changed(schedule, device, order):
    orders = list(schedule.orders)
    orders[device] = tuple(order)
    return dataclasses.replace(schedule, orders=tuple(orders))


@pytest.mark.acceptance("pipefisher", 2)
def test_a_backward_before_its_forward_is_named():
    schedule = schedules.gpipe(2, 1)
    order = schedule.orders[1][::-1]
    with pytest.raises(ConfigError) as caught:
        schedules.validate(changed(schedule, 1, order))
    assert str(caught.value) == (
        "B of micro-batch 0 in stage 1 (replica 0) on device 1 comes before "
        "F of micro-batch 0 in stage 1 (replica 0) on device 1, which it needs"
    )


@pytest.mark.acceptance("pipefisher", 2)
def test_devices_that_wait_for_each_other_are_named():
    # Device 0 ends micro-batch 0 before it begins 1, device 1 begins with 1.
    schedule = schedules.gpipe(2, 2)
    f0, f1, b0, b1 = schedule.orders[0]
    schedule = changed(schedule, 0, (f0, b0, f1, b1))
    f0, f1, b0, b1 = schedule.orders[1]
    schedule = changed(schedule, 1, (f1, f0, b0, b1))
    with pytest.raises(ConfigError, match="block each other: B of micro-batch 0 in"):
        schedules.validate(schedule)


@pytest.mark.parametrize(
    ("field", "value"),
    [("micro_batch", 2), ("micro_batch", -1), ("stage", 2), ("replica", 1)],
)
def test_an_op_of_another_schedule_is_refused(field, value):
    schedule = schedules.gpipe(2, 2)
    first, *rest = schedule.orders[0]
    order = (first._replace(**{field: value}), *rest)
    with pytest.raises(ConfigError, match="not of this schedule of 2 micro-batches"):
        schedules.validate(changed(schedule, 0, order))


def test_a_micro_batch_stays_in_one_replica():
    schedule = schedules.chimera(2, 2)
    # The second half of micro-batch 0's way in the other direction.
    orders = [
        tuple(
            op._replace(stage=1 - op.stage, replica=1) if op.micro_batch == 0 else op
            for op in row
        )
        if device == 0
        else row
        for device, row in enumerate(schedule.orders)
    ]
    with pytest.raises(ConfigError, match="another op of its micro-batch"):
        schedules.validate(dataclasses.replace(schedule, orders=tuple(orders)))


def test_an_op_of_no_kind_is_refused():
    schedule = schedules.gpipe(2, 2)
    order = (*schedule.orders[0], schedules.Op(0, "X", 0, 0))
    with pytest.raises(ConfigError, match=r"kind is one of .*got X of micro-batch 0"):
        schedules.validate(changed(schedule, 0, order))


@pytest.mark.parametrize(
    ("micro_batches", "holders", "orders"),
    [(0, ((0,),), ((),)), (1, ((),), ((),)), (1, ((),), ())],
)
def test_a_schedule_without_work_is_refused(micro_batches, holders, orders):
    schedule = schedules.Schedule(
        name="empty", micro_batches=micro_batches, holders=holders, orders=orders
    )
    with pytest.raises(ConfigError, match="at least one stage and one micro-batch"):
        schedules.validate(schedule)


@pytest.mark.parametrize("holders", [((0, 2),), ((0, 1), (1,)), ()])
def test_stages_must_lie_on_devices(holders):
    schedule = dataclasses.replace(schedules.gpipe(2, 2), holders=holders)
    with pytest.raises(ConfigError, match="holders"):
        schedules.validate(schedule)


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        ("gpipe", (0, 4), "stages=0, micro_batches=4"),
        ("one_f_one_b", (4, 0), "stages=4, micro_batches=0"),
        ("zero_bubble_h1", (4, -1), "micro_batches=-1"),
        ("chimera", (3, 6), "stages=3, micro_batches=6"),
        ("chimera", (4, 6), "stages=4, micro_batches=6"),
        ("interleaved", (4, 4, 3), "chunks=3, stages=4"),
        ("interleaved", (4, 4, 0), "chunks=0, stages=4"),
        ("interleaved", (8, 6, 2), "micro_batches=6, devices=4"),
    ],
)
def test_impossible_sizes_are_refused_with_their_numbers(make, arguments, words):
    with pytest.raises(ConfigError, match=words):
        getattr(schedules, make)(*arguments)


def short(order):
    return " ".join(f"{op.kind}{op.micro_batch}" for op in order)


def test_one_f_one_b_warms_up_alternates_and_drains():
    orders = schedules.one_f_one_b(3, 4).orders
    assert [short(order) for order in orders] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_zero_bubble_keeps_as_many_micro_batches_at_every_stage():
    orders = schedules.zero_bubble_h1(3, 4).orders
    assert [short(order) for order in orders] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_interleaved_visits_its_chunks_in_groups_of_micro_batches():
    schedule = schedules.interleaved(4, 4, 2)
    first = " ".join(
        f"{op.kind}{op.stage}{op.micro_batch}" for op in schedule.orders[0]
    )
    assert first == ("F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 B01 B22 B23 B02 B03")
    assert schedule.parts(1) == ((0, 1), (0, 3))


def test_chimera_mirrors_its_halves():
    down, *_, last = schedules.chimera(4, 8).orders
    assert [(op.kind, op.stage) for op in down] == [(op.kind, op.stage) for op in last]
    assert [op.replica for op in down] == [1 - op.replica for op in last]
    # Two units: the drain of the first overlaps the warm-up of the second.
    assert short(op for op in down if op.replica == 0) == ("F0 F1 B0 F2 B1 F3 B2 B3")
    assert short(op for op in down if op.replica) == "F4 B4 F5 B5 F6 B6 F7 B7"


def test_a_schedule_can_be_a_static_argument():
    assert hash(schedules.chimera(4, 4)) == hash(schedules.chimera(4, 4))
    assert schedules.gpipe(2, 2) != schedules.one_f_one_b(2, 3)


class Machine:
    """Devices in a ring that follow a tick table and nothing else, with tokens."""

    def __init__(self, schedule, table):
        self.schedule, self.table = schedule, table
        self.ran = []
        devices = schedule.devices
        self.saved = [[None] * table.saved_buffers for _ in range(devices)]
        self.inbox = [[None] * table.inbox_buffers for _ in range(devices)]

    def run(self):
        devices, ticks_ = self.table.op.shape
        for tick in range(ticks_):
            results = [self.compute(device, tick) for device in range(devices)]
            for device in range(devices):
                for table, shift in (
                    (self.table.from_below, -1),
                    (self.table.from_above, 1),
                ):
                    if table[device, tick] >= 0:
                        result = results[(device + shift) % devices]
                        assert result is not None
                        self.inbox[device][table[device, tick]] = result
        return self.ran

    def compute(self, device, tick):
        table = self.table
        code = table.op[device, tick]
        if code == ticks.IDLE:
            return None
        m = table.micro_batch[device, tick]
        replica, stage = self.schedule.parts(device)[table.chunk[device, tick]]
        buffer = table.inbox[device, tick]
        got = None if buffer < 0 else self.inbox[device][buffer]
        last = stage == self.schedule.stages - 1
        if code == ticks.FORWARD:
            assert got == (None if stage == 0 else ("F", stage - 1, m, replica))
            self.saved[device][table.saved[device, tick]] = (stage, m, replica)
        else:
            assert self.saved[device][table.saved[device, tick]] == (stage, m, replica)
        if code == ticks.BACKWARD:
            assert got == (None if last else ("B", stage + 1, m, replica))
        kind = "_FBW"[code]
        self.ran.append((device, kind, stage, m, replica))
        return kind, stage, m, replica


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_a_machine_that_follows_the_tick_table_does_the_whole_step(stages):
    for micro_batches in range(1, 2 * stages + 3):
        for schedule in every(stages, micro_batches):
            table = ticks.tick_table(schedule)
            ran = Machine(schedule, table).run()
            assert sorted(ran) == sorted(op for row in schedule.orders for op in row)
            for array in table[:7]:
                assert array.shape == table.op.shape
                assert array.dtype == np.int32


def test_the_tick_table_is_as_short_as_unit_times_allow():
    assert ticks.tick_table(schedules.gpipe(4, 6)).op.shape == (4, 2 * (6 + 3))
    assert ticks.tick_table(schedules.one_f_one_b(4, 6)).op.shape == (4, 2 * (6 + 3))
    assert ticks.tick_table(schedules.chimera(6, 6)).op.shape == (6, 6 + 10)


@pytest.mark.parametrize(
    ("schedule", "saved", "inbox"),
    [
        # A result is read at the next tick; else one of each neighbour may wait.
        (schedules.gpipe(4, 8), 8, 1),
        (schedules.one_f_one_b(4, 8), 4, 2),
        (schedules.zero_bubble_h1(4, 8), 4, 2),
        (schedules.chimera(4, 4), 4, 2),
    ],
)
def test_the_tick_table_keeps_no_more_than_it_must(schedule, saved, inbox):
    table = ticks.tick_table(schedule)
    assert (table.saved_buffers, table.inbox_buffers) == (saved, inbox)


def test_a_stage_that_is_not_beside_the_next_has_no_tick_table():
    schedule = schedules.gpipe(4, 1)
    orders = [(), (), (), ()]
    for device, stage in enumerate((0, 2, 1, 3)):
        orders[device] = tuple(
            schedules.Op(device, op.kind, stage, op.micro_batch)
            for op in schedule.orders[stage]
        )
    moved = dataclasses.replace(schedule, holders=((0, 2, 1, 3),), orders=tuple(orders))
    schedules.validate(moved)
    with pytest.raises(ConfigError, match="not beside"):
        ticks.tick_table(moved)
