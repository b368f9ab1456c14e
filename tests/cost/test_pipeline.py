"""Simulated pipelines against closed forms and against rules read off the spans."""

import itertools
import json
import random

import jax
import jax.numpy as jnp
import pytest

from hpcjax import cost, models, perf, sharding
from hpcjax.core import compat
from hpcjax.core.errors import ConfigError

SCHEDULES = {
    "gpipe": sharding.gpipe(4, 8),
    "one_f_one_b": sharding.one_f_one_b(4, 8),
    "interleaved": sharding.interleaved(8, 8, 2),
    "chimera": sharding.chimera(4, 8),
    "zero_bubble_h1": sharding.zero_bubble_h1(4, 8),
}


def made(schedule, t_f=1, t_b=2, **costs):
    return cost.simulate(schedule, cost.StageCosts(t_f=t_f, t_b=t_b, **costs))


@pytest.mark.slow
@pytest.mark.acceptance("pipefisher", 1)
@pytest.mark.parametrize("make", [sharding.gpipe, sharding.one_f_one_b])
def test_gpipe_and_1f1b_take_what_the_closed_form_says(make):
    rng = random.Random(0)
    for stages, micro_batches in itertools.product(range(1, 17), range(1, 65)):
        t_f, t_b = rng.randint(0, 9), rng.randint(1, 20)
        line = made(make(stages, micro_batches), t_f, t_b)
        assert line.makespan == (micro_batches + stages - 1) * (t_f + t_b)


@pytest.mark.acceptance("pipefisher", 1)
@pytest.mark.parametrize("stages", range(2, 17, 2))
def test_chimera_takes_what_the_closed_form_says(stages):
    schedule = sharding.chimera(stages, stages)
    for t_f, t_b in ((1, 1), (1, 2), (2, 3), (3, 10), (5, 5)):
        line = made(schedule, t_f, t_b)
        assert line.makespan == stages * t_f + (2 * stages - 2) * t_b


@pytest.mark.acceptance("pipefisher", 1)
@pytest.mark.parametrize(("times", "makespans"), [(2, (30, 48, 66)), (3, (44, 70, 96))])
def test_chimera_overlaps_its_units(times, makespans):
    found = [made(sharding.chimera(d, times * d)).makespan for d in (4, 6, 8)]
    assert tuple(found) == makespans
    two = made(sharding.chimera(2, 2 * times))
    assert two.utilization == 1
    assert two.bubbles(0) == two.bubbles(1) == ()


@pytest.mark.acceptance("pipefisher", 1)
def test_chimera_with_shorter_backwards_is_off_the_closed_form():
    assert made(sharding.chimera(4, 4), 2, 1).makespan == 16


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(("t_f", "t_b", "t_w"), [(1, 2, 1), (3, 5, 2), (4, 6, 3)])
def test_zero_bubble_saves_what_the_closed_form_says(stages, t_f, t_b, t_w):
    # Qi et al., ICLR 2024, table 1: a bubble of (D − 1)(T_F + T_B − T_W).
    for micro_batches in (stages, 2 * stages, 3 * stages):
        schedule = sharding.zero_bubble_h1(stages, micro_batches)
        line = made(schedule, t_f, t_b, t_w=t_w)
        bubble = (stages - 1) * (t_f + (t_b - t_w) - t_w)
        assert line.makespan == micro_batches * (t_f + t_b) + bubble


def test_what_is_not_said_of_a_backward_pass():
    costs = cost.StageCosts(t_f=1, t_b=6, recompute=True)
    assert costs.of("W", 0) == 3
    assert costs.of("B", 0, splits_backward=True) == 3 + 1


def test_interleaving_divides_the_bubble_by_the_chunks():
    plain = made(sharding.one_f_one_b(4, 8), 2, 4)
    line = made(sharding.interleaved(8, 8, 2), 1, 2)
    whole = 8 * (2 + 4)
    assert plain.makespan - whole == 3 * 6
    assert line.makespan - whole == 3 * 3


@pytest.mark.acceptance("pipefisher", 2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_no_op_is_early_late_or_at_once_with_another(name, seed):
    rng = random.Random(seed)
    schedule = SCHEDULES[name]

    def each():
        return tuple(rng.uniform(0.5, 3) for _ in range(schedule.stages))

    t_p2p = rng.uniform(0, 0.5)
    line = made(schedule, each(), tuple(2 + t for t in each()), t_p2p=t_p2p)
    ends = {span.op: span.end for row in line.spans for span in row}
    for order, row in zip(schedule.orders, line.spans, strict=True):
        assert tuple(span.op for span in row) == order
        free = 0
        for span in row:
            arrived = [
                ends[need] + t_p2p * (need.device != span.op.device)
                for need in schedule.needs(span.op)
            ]
            assert span.start == max([free, *arrived])
            free = span.end
    assert line.makespan == max(ends.values())
    for device in range(schedule.devices):
        idle = sum(b - a for a, b in line.bubbles(device))
        assert idle + line.busy(device) == pytest.approx(line.makespan)


def test_costs_may_differ_between_stages():
    line = made(sharding.gpipe(2, 1), (1, 2), (3, 4))
    assert line.makespan == 1 + 2 + 4 + 3
    assert line.bubbles(0) == ((1, 7),)
    assert line.utilization == 10 / 20


def test_recomputation_adds_a_forward_to_every_backward():
    line = made(sharding.gpipe(4, 4), 1, 2, recompute=True)
    assert line.makespan == 7 * 1 + 7 * 3
    assert line.busy(0) == 4 * (1 + 2 + 1)


@pytest.mark.acceptance("pipefisher", 9)
@pytest.mark.parametrize("name", SCHEDULES)
def test_live_activations_are_those_that_a_walk_through_time_counts(name):
    line = made(SCHEDULES[name])
    last = "W" if name == "zero_bubble_h1" else "B"
    for device, row in enumerate(line.spans):
        kept, most = set(), 0
        for span in row:
            which = span.op.stage, span.op.micro_batch
            if span.op.kind == "F":
                kept.add(which)
            most = max(most, len(kept))
            if span.op.kind == last:
                kept.discard(which)
        assert not kept
        assert line.live_activations(device) == most


@pytest.mark.acceptance("pipefisher", 9)
def test_live_activations_are_the_published_ones():
    def live(schedule):
        line = made(schedule)
        return [line.live_activations(device) for device in range(schedule.devices)]

    assert live(sharding.gpipe(4, 8)) == [8] * 4
    assert live(sharding.one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert live(sharding.zero_bubble_h1(4, 8)) == [4] * 4
    assert live(sharding.chimera(8, 8)) == [5, 6, 7, 8, 8, 7, 6, 5]


PARTS = cost.StageMemory(
    activations=264.1, peak_errors=145.1, saved_errors=108, factors=94.5, params=39.1
)


@pytest.mark.acceptance("pipefisher", 9)
def test_memory_is_the_papers_sum():
    plain = cost.pipeline_memory(PARTS, live_activations=4, live_errors=4)
    expected = 4 * 264.1 + 145.1 + 4 * 108 + 2 * 94.5 + 2 * 39.1
    assert plain == pytest.approx(expected)
    again = cost.pipeline_memory(
        PARTS, live_activations=4, live_errors=4, recompute=True
    )
    assert again == pytest.approx(expected - 3 * 264.1)
    few = cost.pipeline_memory(PARTS, live_activations=4, live_errors=3)
    assert few == pytest.approx(expected - 108)
    both = cost.pipeline_memory(PARTS, live_activations=4, live_errors=4, replicas=2)
    assert both == pytest.approx(expected + 2 * 39.1)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"t_f": -1.0}, "t_f must be finite and at least 0: got -1.0"),
        ({"t_b": float("inf")}, "t_b must be finite"),
        ({"t_p2p": float("nan")}, "t_p2p must be finite"),
        ({"t_f": (1.0, -2.0)}, "t_f must be finite"),
        ({"t_w": -0.5}, "t_w must be finite"),
    ],
)
def test_impossible_durations_are_refused(costs, words):
    with pytest.raises(ConfigError, match=words):
        cost.StageCosts(**{"t_f": 1, "t_b": 2, **costs})


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"t_f": (1, 1, 1)}, "t_f needs one number or one for each of 2 stages"),
        ({"t_w": 3}, "t_w is a part of t_b"),
        ({"t_b": (4, 1), "t_w": 2}, "t_w is a part of t_b"),
    ],
)
def test_costs_that_do_not_fit_the_schedule_are_refused(costs, words):
    with pytest.raises(ConfigError, match=words):
        made(sharding.gpipe(2, 2), **costs)


def test_an_invalid_schedule_is_not_simulated():
    schedule = sharding.gpipe(2, 2)
    broken = sharding.Schedule(
        name="broken",
        micro_batches=2,
        holders=schedule.holders,
        orders=(schedule.orders[0], schedule.orders[1][1:]),
    )
    with pytest.raises(ConfigError, match="F of micro-batch 0 in stage 1"):
        made(broken)


def test_the_trace_holds_every_op_in_microseconds():
    line = made(sharding.chimera(2, 2), 1, 2)
    trace = json.loads(json.dumps(line.to_chrome_trace()))
    work = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(work) == 8
    assert {event["tid"] for event in work} == {0, 1}
    for device, row in enumerate(line.spans):
        starts = [event["ts"] for event in work if event["tid"] == device]
        assert sorted(starts) == [1000 * span.start for span in row]
    first = min((event for event in work if event["tid"] == 0), key=lambda e: e["ts"])
    assert first == {
        "name": "F 0",
        "cat": "F",
        "ph": "X",
        "ts": 0,
        "dur": 1000,
        "pid": 0,
        "tid": 0,
    }
    assert sum(event["dur"] for event in work) == 1000 * sum(map(line.busy, range(2)))
    names = [event["args"]["name"] for event in trace["traceEvents"] if "args" in event]
    assert names == ["device 0", "device 1"]


def test_train_time_is_steps_times_the_length_of_a_step():
    found = cost.train_time(7038, 2961, 400.0, 20.0)
    assert found == (7038 * 400.0, 2961 * 420.0, 2961 * 420 / (7038 * 400))


@pytest.mark.acceptance("axonn-myelin", 7)
@pytest.mark.parametrize("make", [sharding.gpipe, sharding.one_f_one_b])
def test_the_idle_share_is_that_of_the_closed_form(make):
    for stages, count in ((2, 4), (4, 4), (4, 16)):
        line = made(make(stages, count))
        bubble = (stages - 1) / (count + stages - 1)
        assert 1 - line.utilization == pytest.approx(bubble)
        if make is sharding.gpipe:
            late = made(make(stages, count), t_p2p=5).makespan
            assert late == line.makespan + 2 * (stages - 1) * 5


def compiled_activations(depth, every, in_flight, width, rows, time):
    """Bytes of a stage that is compiled: all forward passes, then all backwards."""
    model = models.causal_lm(
        (time,), 8, depth=depth, width=width, heads=1, remat="full"
    )
    block = model.cut().block
    like = jax.eval_shape(model.init, jax.random.key(0))[0]["blocks"]

    def group(y, own):
        return jax.lax.scan(lambda y, one: (block(one, y), None), y, own)[0], None

    def loss(blocks, xs):
        groups = jax.tree.map(
            lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:]), blocks
        )
        run = jax.checkpoint(group, prevent_cse=False)
        return jnp.sum(jax.lax.map(lambda x: jax.lax.scan(run, x, groups)[0] ** 2, xs))

    xs = jax.ShapeDtypeStruct((in_flight, rows, time, width), "float32")
    options = compat.quick_compilation("cpu")
    program = jax.jit(jax.grad(loss)).lower(like, xs).compile(compiler_options=options)
    return perf.temporary_memory(program)


@pytest.mark.quick("1-10")
@pytest.mark.parametrize(("in_flight", "near"), [(1, 10), (4, 20)])
def test_activations_of_a_stage_are_those_of_a_compiled_one(in_flight, near):
    # So many rows that a block's weights are next to nothing.
    sizes = {"width": 8, "rows": 64, "time": 16}
    ks, found = (1, 4, 16), {}
    for k in ks:
        formula = cost.stage_activations(
            16, **sizes, heads=1, in_flight=in_flight, remat_every=k
        )
        found[k] = compiled_activations(16, k, in_flight, **sizes), formula
        assert found[k][0] == pytest.approx(formula, rel=near / 100)
    for which in range(2 if in_flight == 1 else 0):
        assert min(ks, key=lambda k: found[k][which]) == 4
    with pytest.raises(ConfigError, match="must divide the depth: got depth=16"):
        cost.stage_activations(16, **sizes, heads=1, remat_every=3)
