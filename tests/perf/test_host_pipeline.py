"""Devices of a pipeline, each in a thread here, that pass results by messages."""

import collections
import concurrent.futures
import itertools
import json
import time
import types

import numpy as np
import pytest

from hpcjax import cost, sharding
from hpcjax.core.errors import HpcjaxError, ProcessLost
from hpcjax.hostcomm import Tag, connected
from hpcjax.perf import host_pipeline
from hpcjax.perf.host_pipeline import DeviceWork, HostPipeline, WorkSpan

SCHEDULES = [
    sharding.gpipe(2, 2),
    sharding.gpipe(3, 4),
    sharding.one_f_one_b(3, 5),
    sharding.interleaved(4, 4, 2),
    sharding.chimera(4, 4),
    sharding.zero_bubble_h1(3, 4),
]


@pytest.fixture
def transports():
    made = []

    def connect(devices, patience=20.0):
        made.extend(connected(devices, patience=patience))
        return made[-devices:]

    yield connect
    for each in made:
        each.abort()


def code(step, op):
    return np.array([step, *op[2:], "FBW".index(op.kind)], np.float64)


class Device:
    """Does nothing but note what it is given, and in which order."""

    def __init__(self, schedule, transport):
        self.step, self.log, self.given = 0, [], {}
        work = DeviceWork(run_op=self.op, run_task=self.log.append, flush=self.flush)
        self.pipeline = HostPipeline(schedule, transport, work)

    def op(self, op, received):
        self.log.append(op)
        self.given[self.step, op] = None if received is None else received.copy()
        return code(self.step, op)

    def flush(self, step):
        assert step == self.step
        self.log.append("flush")
        self.step += 1


def in_threads(devices, rows, steps):
    def go(device):
        own = rows[devices.index(device)]
        for step in range(steps):
            device.pipeline.step(step, own[step % len(own)])

    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        for done in [pool.submit(go, device) for device in devices]:
            done.result(timeout=60)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.stages}")
def test_every_op_gets_the_result_that_it_needs(schedule, transports):
    devices = [Device(schedule, own) for own in transports(schedule.devices)]
    in_threads(devices, [[order] for order in schedule.orders], 2)
    for device, order in zip(devices, schedule.orders, strict=True):
        assert device.log == [*order, "flush"] * 2
        for step, op in itertools.product(range(2), order):
            far = [n for n in schedule.needs(op) if n.device != op.device]
            assert len(far) <= 1
            given = device.given[step, op]
            assert (given is not None) == bool(far)
            for need in far:
                np.testing.assert_array_equal(given, code(step, need))


def filled_schedule(t_curv=3, t_inv=6):
    schedule = sharding.gpipe(2, 2)
    line = cost.simulate(schedule, cost.StageCosts(t_f=4, t_b=8))
    costs = cost.KfacCosts(t_curv=t_curv, t_inv=t_inv)
    return cost.assign(
        line, cost.kfac_tasks(schedule, [[cost.Layer(8, 8)] * 2] * 2, costs)
    )


def test_a_filled_schedule_is_done_exactly(transports):
    filled = filled_schedule()
    assert filled.period >= 2
    rows = [filled.steps(device) for device in range(2)]
    devices = [Device(filled.timeline.schedule, own) for own in transports(2)]
    steps = 3 * filled.period
    in_threads(devices, rows, steps)
    for device, own in zip(devices, rows, strict=True):
        host_pipeline.check_work(device.pipeline.spans, own, steps)
        done = collections.Counter(device.log)
        for it in itertools.chain(*filled.placed):
            assert done[it.task] == (3 if it.task in itertools.chain(*own) else 0)
        assert len(device.pipeline.steps) == steps
        edges = [edge for pair in device.pipeline.steps for edge in pair]
        assert edges == sorted(edges)


def task(layer):
    return cost.Task(1, "curvA", 0, 1, layer, 0, 1.0)


def send_all(theirs, ours, schedule):
    """Sends what device 1 needs of device 0 in a step, and waits until it is there."""
    theirs.send(1, Tag(str(schedule.orders[0][0]), 0), np.zeros(1))
    theirs.send(1, Tag("flush", 0), np.zeros(0))
    while ours.counters().total_received().messages < 2:
        pass


def test_a_task_gives_way_to_what_has_arrived_and_ends_before_the_flush(transports):
    """Device 0 is played by hand: the first result comes early, the last one late."""
    schedule = sharding.gpipe(2, 1)
    theirs, ours = transports(2)
    device = Device(schedule, ours)
    forward, backward = schedule.orders[1]
    row = [task(0), task(1), forward, backward, task(2)]
    send_all(theirs, ours, schedule)
    device.pipeline.step(0, row)
    assert device.log == [forward, backward, task(0), task(1), task(2), "flush"]


@pytest.mark.acceptance("pipefisher", 12)
def test_a_device_fills_its_time_until_a_message_comes(transports):
    schedule = sharding.gpipe(2, 1)
    theirs, ours = transports(2)
    device = Device(schedule, ours)
    forward, backward = schedule.orders[1]

    def then_send(done):
        device.log.append(done)
        if done == task(1):
            send_all(theirs, ours, schedule)

    work = DeviceWork(run_op=device.op, run_task=then_send, flush=device.flush)
    pipeline = HostPipeline(schedule, ours, work)
    pipeline.step(0, [task(0), task(1), task(2), forward, backward])
    assert device.log == [task(0), task(1), forward, backward, task(2), "flush"]


def asleep(transports, filled, *, tasks):
    """Share of the time and median seconds of a step; all that devices do is sleep."""
    unit, lasts = 0.004, {"F": 4, "B": 8}  # as planned
    rows = [filled.steps(device) for device in range(2)]
    if not tasks:
        rows = [[[w for w in row if w.kind in lasts] for row in own] for own in rows]

    def run_op(op, received):
        del received
        time.sleep(unit * lasts[op.kind])
        return np.zeros(1)

    devices = [
        types.SimpleNamespace(
            pipeline=HostPipeline(
                filled.timeline.schedule,
                own,
                DeviceWork(
                    run_op=run_op,
                    run_task=lambda task: time.sleep(unit * float(task.duration)),
                    flush=lambda number: None,
                ),
            )
        )
        for own in transports(2)
    ]
    in_threads(devices, rows, 3 * filled.period)
    pipelines = [device.pipeline for device in devices]
    steps = np.array([each.steps for each in pipelines])
    busy = host_pipeline.busy_share(
        [each.spans for each in pipelines], steps.min(), steps.max()
    )
    return busy, np.median(np.diff(steps, axis=-1))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.acceptance("pipefisher", 12)
def test_filling_uses_the_time_that_devices_wait_and_takes_no_longer(transports):
    """By plan they are busy for 92 % instead of 67 % of steps of the same length."""
    filled = filled_schedule(t_curv=4, t_inv=10)
    without, plain = asleep(transports, filled, tasks=False)
    busy, step = asleep(transports, filled, tasks=True)
    assert busy >= without + 0.15
    assert step <= 1.2 * plain


def test_a_lost_neighbour_ends_the_step(transports):
    schedule = sharding.gpipe(2, 1)
    theirs, ours = transports(2, patience=0.2)
    device = Device(schedule, ours)
    with pytest.raises(
        ProcessLost, match=r"rank 0 has sent nothing.*F of micro-batch 0"
    ):
        device.pipeline.step(0, schedule.orders[1])
    theirs, ours = transports(2)
    device = Device(schedule, ours)
    theirs.abort()
    with pytest.raises(ProcessLost, match=r"rank 0 has ended.*F of micro-batch 0"):
        device.pipeline.step(0, schedule.orders[1])


def test_a_device_computes_while_its_results_are_under_way(transports, monkeypatch):
    """Its results are waited for at the end of the step, not where they are sent."""
    schedule = sharding.gpipe(2, 3)
    theirs, ours = transports(2)
    device = Device(schedule, theirs)
    send = theirs.isend

    def begin(to, tag, array):
        request = send(to, tag, array)
        wait = request.wait
        request.wait = lambda *given: (device.log.append("waited"), wait(*given))[1]
        return request

    monkeypatch.setattr(theirs, "isend", begin)
    for op in schedule.orders[1][3:]:
        ours.send(0, Tag(str(op), 0), np.zeros(1))
    ours.send(0, Tag("flush", 0), np.zeros(0))
    device.pipeline.step(0, schedule.orders[0])
    assert device.log == [*schedule.orders[0], *["waited"] * 4, "flush"]


def test_an_op_may_write_its_next_result_where_the_last_one_was(
    transports, monkeypatch
):
    """It is under way still: this one's transport sends nothing before the flush."""
    schedule = sharding.gpipe(2, 3)
    theirs, ours = transports(2)
    buffer, held, send = np.zeros(1), [], theirs.isend

    def run_op(op, received):
        buffer[:] = 1 + op.micro_batch
        return buffer

    def post(to, tag, array):
        held.append((to, tag, array))
        if tag.kind == "flush":
            return [send(*each) for each in held][-1]
        return types.SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(theirs, "isend", post)
    work = DeviceWork(run_op=run_op, run_task=print, flush=lambda step: None)
    for op in schedule.orders[1][3:]:
        ours.send(0, Tag(str(op), 0), np.zeros(1))
    ours.send(0, Tag("flush", 0), np.zeros(0))
    HostPipeline(schedule, theirs, work).step(0, schedule.orders[0])
    sent = [ours.receive(0, Tag(str(op), 0))[0] for op in schedule.orders[0][:3]]
    assert sent == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("follows", [False, True])
def test_a_result_that_cannot_be_sent_is_told_at_once(transports, follows):
    """Whoever waits for it would otherwise be told, after the patience."""
    schedule = None if follows else sharding.gpipe(2, 2)
    row = sharding.MessageDriven(2, 0, 2) if schedule is None else schedule.orders[0]
    work = DeviceWork(
        run_op=lambda op, x: np.asarray(None), run_task=print, flush=print
    )
    with pytest.raises(ValueError, match=r"of objects or records.*of object"):
        HostPipeline(schedule, transports(2)[0], work).step(0, row)


def test_a_result_that_is_missing_is_named(transports):
    schedule = sharding.gpipe(2, 1)
    work = DeviceWork(run_op=lambda op, x: None, run_task=print, flush=print)
    pipeline = HostPipeline(schedule, transports(2)[0], work)
    with pytest.raises(HpcjaxError, match="has no result, device 1 needs it"):
        pipeline.step(0, schedule.orders[0])


def test_work_left_out_or_doubled_is_found():
    filled = filled_schedule()
    rows = filled.steps(0)
    ran = [
        WorkSpan(step, 0.0, 1.0, work)
        for step in range(2 * filled.period)
        for work in rows[step % filled.period]
    ]
    host_pipeline.check_work(ran, rows, 2 * filled.period)
    with pytest.raises(HpcjaxError, match="ran 0 times instead of 1"):
        host_pipeline.check_work(ran[:-1], rows, 2 * filled.period)
    with pytest.raises(HpcjaxError, match="ran 2 times instead of 1"):
        host_pipeline.check_work([*ran, ran[0]], rows, 2 * filled.period)
    moved = [each._replace(step=0) if each is ran[-1] else each for each in ran]
    with pytest.raises(HpcjaxError, match="instead of"):
        host_pipeline.check_work(moved, rows, 2 * filled.period)


def test_busy_share_counts_what_it_is_to_count():
    ops = sharding.gpipe(2, 1).orders
    ran = [
        [WorkSpan(0, 1.0, 2.0, ops[0][0]), WorkSpan(0, 4.0, 5.0, ops[0][1])],
        [WorkSpan(0, 2.0, 3.0, ops[1][0]), WorkSpan(0, 3.0, 3.5, task(0))],
    ]
    assert host_pipeline.busy_share(ran, 1.0, 6.0) == pytest.approx(0.35)
    share = host_pipeline.busy_share(ran, 1.0, 6.0, without=[task(0)])
    assert share == pytest.approx(0.3)
    bars = host_pipeline.work_bars(ran[1], 1.0)
    assert bars == (
        cost.Bar(1, 1000.0, 2000.0, "F"),
        cost.Bar(1, 2000.0, 2500.0, "curvA"),
    )


def test_work_goes_through_json():
    for work in itertools.chain(*filled_schedule().steps(1)):
        text = json.dumps(host_pipeline.work_to_json(work))
        back = host_pipeline.work_from_json(json.loads(text))
        assert type(back) is type(work)
        assert back == work
