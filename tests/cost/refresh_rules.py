"""The rules of a refresh in a pipeline's bubbles, checked from its times alone."""

import collections
import itertools
import math

import pytest

# What floating-point sums may be off, relative to a step.
EPS = 1e-9


def check(filled, tasks, *, margin, gate):
    """Checks every rule of a refresh, from the times alone.

    Args:
      filled: what was made.
      tasks: what had to be placed, panels split.
      margin: share that a task needs besides.
      gate: rule of syncs and inversions.
    """
    pipe = filled.timeline.makespan
    everything = [(it, True) for row in filled.placed for it in row]
    everything += [(it, False) for it in filled.unplaced]
    counted = collections.Counter(it.task for it, _ in everything)
    assert counted == collections.Counter(tasks)
    for it, inside in everything:
        assert it.end == it.start + it.task.duration
        if inside:
            assert it.end <= pipe
        else:
            assert it.start >= pipe
    check_overlaps(filled, [it for it, _ in everything], margin)
    check_order(filled, [it for it, _ in everything], gate)
    if not filled.unplaced:
        assert filled.added == (0,) * filled.period
        devices = filled.timeline.schedule.devices
        work = sum(it.task.duration for it, _ in everything)
        work += filled.period * sum(map(filled.timeline.busy, range(devices)))
        share = work / (devices * filled.period * pipe)
        assert filled.utilization == pytest.approx(share)
        for device in range(devices):
            own = [
                it for row in filled.placed for it in row if it.task.device == device
            ]
            steps = 1 + max((it.step for it in own), default=0)
            busy = steps * filled.timeline.busy(device)
            busy += sum(it.task.duration for it in own)
            share = busy / (steps * pipe)
            assert filled.period_per_device[device] == steps
            assert filled.utilization_per_device[device] == pytest.approx(share)
    everywhere = range(filled.timeline.schedule.devices)
    idle = len(everywhere) * pipe - sum(map(filled.timeline.busy, everywhere))
    if idle > EPS * pipe:
        work = sum(it.task.duration for it, _ in everything)
        assert filled.ratio == pytest.approx(work / idle)
    assert 0 <= filled.utilization <= 1 + EPS
    assert max(filled.utilization_per_device) <= 1 + EPS


def check_overlaps(filled, every, margin):
    pipe = filled.timeline.makespan
    by_device = collections.defaultdict(list)
    for it in every:
        by_device[it.task.device, it.step].append(it)
    for (device, _), own in by_device.items():
        ops = [span[:2] for span in filled.timeline.spans[device]]
        busy = sorted([*ops, *((it.start, it.end) for it in own)])
        for (_, end), (start, _) in itertools.pairwise(busy):
            assert end <= start
        starts = [*(start for start, _ in ops), pipe]
        for it in own:
            following = next((s for s in starts if s >= it.end), math.inf)
            assert it.end + margin * it.task.duration < following + EPS * pipe


def check_order(filled, every, gate):
    """Checks what waits for what; times count from the begin of the refresh."""
    lengths = [filled.timeline.makespan + added for added in filled.added]
    begins = [sum(lengths[:step]) for step in range(filled.period)]
    passes = {
        (span.op.kind, span.op.replica, span.op.stage, span.op.micro_batch): span.end
        for row in filled.timeline.spans
        for span in row
    }
    # When the last task of a kind ends, by layer and by device.
    last = collections.defaultdict(float)
    for it in every:
        end = begins[it.step] + it.end
        layer = it.task.kind, it.task.stage, it.task.layer
        last[layer] = max(last[layer], end)
        last[it.task[:2]] = max(last[it.task[:2]], end)
    panels = collections.defaultdict(list)
    for it in every:
        task, side = it.task, it.task.kind[-1]
        start = begins[it.step] + it.start + EPS * lengths[0]
        if task.kind.startswith("curv"):
            kind = {"A": "F", "B": "B"}[side]
            assert start >= passes[kind, task.replica, task.stage, task.unit]
            continue
        for kind in ["curv" + side] + ["sync" + side] * task.kind.startswith("inv"):
            assert last[kind, task.stage, task.layer] <= start
            if gate == "device":
                assert last[task.device, kind] <= start
        panels[task[:5]].append((task.unit, start))
    for row in panels.values():
        assert [unit for unit, _ in row] == list(range(len(row)))
        assert sorted(row, key=lambda panel: panel[1]) == row
