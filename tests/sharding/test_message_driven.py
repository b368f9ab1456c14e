"""A stage that follows messages, and the times of pipelines of such stages."""

import itertools
from typing import Any, cast, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import cost, sharding
from hpcjax.core.errors import ConfigError, HpcjaxError

sizes = st.tuples(st.integers(1, 5), st.integers(1, 7))


@pytest.mark.acceptance("axonn-myelin", 3)
@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 8), st.sampled_from(get_args(sharding.Ties)), st.data())
def test_each_stage_does_each_micro_batch_once_in_any_order_of_arrival(
    size, in_flight, ties, data
):
    """Forward before backward, what it needs before it, and never more in flight."""
    stages, count = size
    machines = [
        sharding.MessageDriven(stages, stage, count, in_flight, ties)
        for stage in range(stages)
    ]
    done: list[list[tuple[str, int]]] = [[] for _ in machines]
    waiting: list[list[tuple[str, int]]] = [[] for _ in machines]

    def act(stage, actions):
        for kind, number, to in actions:
            done[stage].append((kind, number))
            kinds = [kind for kind, _ in done[0]]
            most = count if stages == 1 else in_flight
            assert kinds.count("F") - kinds.count("B") <= most
            if to is not None:
                assert to == stage + (1 if kind == "F" else -1)
                waiting[to].append((kind, number))

    act(0, machines[0].start())
    while busy := [stage for stage, own in enumerate(waiting) if own]:
        stage = data.draw(st.sampled_from(busy))
        kinds = [kind for kind, _ in waiting[stage]]
        place = machines[stage].choose(kinds)
        if ties == "arrival" or len(set(kinds)) == 1:
            assert place == 0
        else:
            assert kinds[place] == ("B" if ties == "backward" else "F")
        act(stage, machines[stage].arrived(*waiting[stage].pop(place)))
    for machine, own in zip(machines, done, strict=True):
        every = [(kind, number) for kind in "FB" for number in range(count)]
        assert sorted(own) == sorted(every)
        assert machine.expected == {"F": 0, "B": 0}
        for number in range(count):
            assert own.index(("F", number)) < own.index(("B", number))
    last = done[-1]
    assert last[::2] == [("F", number) for _, number in last[1::2]]


def test_the_first_stage_injects_before_messages_that_wait():
    first = sharding.MessageDriven(3, 0, 5)
    assert [a.number for a in first.start()] == [0, 1, 2]
    assert first.arrived("B", 1) == [("B", 1, None), ("F", 3, 1)]
    assert first.arrived("B", 0) == [("B", 0, None), ("F", 4, 1)]
    assert first.arrived("B", 3) == [("B", 3, None)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sharding.MessageDriven(0, 0, 1), "stages"),
        (lambda: sharding.MessageDriven(2, 2, 1), r"stage must be in \[0, 2\)"),
        (lambda: sharding.MessageDriven(2, 0, 0), "micro_batches"),
        (lambda: sharding.MessageDriven(2, 0, 1, 0), "in_flight"),
        (
            lambda: sharding.MessageDriven(2, 0, 1, ties=cast(Any, "last")),
            "ties must be one of",
        ),
        (lambda: cost.draw_durations(2, 2, -1.0), "sigma"),
        (lambda: cost.simulate_messages(np.ones((2, 3))), "stages, micro-batches, 2"),
        (lambda: cost.simulate_messages(np.zeros((2, 3, 2))), "above 0"),
        (lambda: cost.simulate_messages(np.ones((2, 3, 2)), -1.0), "latency"),
        (lambda: cost.simulate_one_f_one_b(np.ones((3, 3, 2)), 0.0, 2), "3 stages"),
    ],
)
def test_what_cannot_be_is_told(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_message_that_is_not_to_come_is_told():
    stage = sharding.MessageDriven(3, 1, 2)
    stage.arrived("F", 1)
    for message in (("F", 1), ("F", 2), ("B", -1)):
        with pytest.raises(HpcjaxError, match=r"stage 1 waits for no"):
            stage.arrived(*message)


@pytest.mark.acceptance("axonn-myelin", 7)
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 2), (4, 16), (3, 1)])
@pytest.mark.parametrize("latency", [0.0, 0.4])
def test_without_jitter_times_are_the_formulas(stages, count, latency):
    """(m + G - 1)(t_f + t_b), and a way there and back of messages on top."""
    times = np.broadcast_to([1.0, 2.0], (stages, count, 2))
    deep = 2 * stages + count
    messages = cost.simulate_messages(times, latency, deep)
    fixed = cost.simulate_one_f_one_b(times, latency, deep)
    ideal = 3 * (count + stages - 1) + 2 * (stages - 1) * latency
    if latency == 0 or count == 1:
        assert messages.makespan == pytest.approx(ideal)
        assert fixed.makespan == pytest.approx(ideal)
    assert messages.makespan >= ideal - 1e-9


def test_1f1b_is_that_of_the_schedule():
    plan = sharding.one_f_one_b(4, 6)
    line = cost.simulate(plan, cost.StageCosts(t_f=1.0, t_b=2.0, t_p2p=0.3))
    times = np.broadcast_to([1.0, 2.0], (4, 6, 2))
    ours = cost.simulate_one_f_one_b(times, 0.3)
    assert ours.makespan == pytest.approx(line.makespan)
    for own, row in zip(ours.spans, line.spans, strict=True):
        assert [(s.op.kind, s.op.micro_batch) for s in own] == [
            (s.op.kind, s.op.micro_batch) for s in row
        ]
        np.testing.assert_allclose([s.start for s in own], [s.start for s in row])
    assert [ours.held(stage) for stage in range(4)] == [4, 3, 2, 1]
    deep = cost.simulate_one_f_one_b(times, 0.3, 5)
    assert [deep.held(stage) for stage in range(4)] == [5, 4, 3, 2]


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(1, 8), st.floats(0, 1), st.integers(0, 99))
def test_times_keep_what_pipelines_keep(size, in_flight, latency, seed):
    """Stages do one thing at a time, after what it needs and a message's time."""
    stages, count = size
    durations = cost.draw_durations(stages, count, 0.5, seed)
    for times in (
        cost.simulate_messages(durations, latency, in_flight),
        cost.simulate_one_f_one_b(durations, latency, in_flight + stages),
    ):
        ends = {s.op[1:4]: s.end for row in times.spans for s in row}
        for stage, row in enumerate(times.spans):
            assert len(row) == 2 * count
            for before, after in itertools.pairwise(row):
                assert after.start >= before.end - 1e-12
            for span in row:
                kind, _, number = span.op[1:4]
                took = durations[stage, number, int(kind == "B")]
                assert span.end - span.start == pytest.approx(took)
                source = stage + (1 if kind == "B" else -1)
                if 0 <= source < stages:
                    assert span.start >= ends[kind, source, number] + latency - 1e-9
        busiest = durations.sum((1, 2)).max()
        assert times.makespan >= busiest - 1e-9
    assert times.bars()[0].device == 0


def test_durations_have_their_means_and_are_the_same_again():
    drawn = cost.draw_durations(20, 500, 0.3, 7)
    np.testing.assert_array_equal(drawn, cost.draw_durations(20, 500, 0.3, 7))
    np.testing.assert_allclose(drawn.mean((0, 1)), [1, 2], rtol=0.01)
    np.testing.assert_allclose(np.log(drawn).std((0, 1)), 0.3, rtol=0.02)
