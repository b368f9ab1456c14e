"""Jobs that take turns in threads that stand for processes, and rows that cannot be."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import cost, hostcomm, optim, perf
from hpcjax.core.errors import ConfigError
from hpcjax.perf import CoJob, CoSpan, CoTask
from tests.hostcomm.threads import in_threads

PAIR = tuple(
    cost.Job(name=name, forward=1, backward=2, k=2, iterations=3) for name in "ab"
)
ROWS = perf.rows_of(cost.simulate_cluster(PAIR, cost.Cluster(gpus=2), "jigsaw"))


def test_rows_are_those_of_the_simulated_cluster():
    first = [[tuple(task) for task in row[:2]] for row in ROWS]
    assert first == [
        [("a", 0, 1, 2), ("b", 0, 0, 1)],
        [("a", 0, 0, 1), ("b", 0, 1, 2)],
    ]
    assert [len(row) for row in ROWS] == [6, 6]


class Sums:
    """A job whose contributions are what identifies a task, and which adds up means."""

    def __init__(self, transport):
        self.transport, self.total, self.seen = transport, 0.0, []

    def co_job(self):
        return CoJob(self.compute, self.average, self.update)

    def compute(self, task):
        self.seen.append((task, self.total))
        return np.array([1.0 + task.worker + 10 * task.iteration, task.role])

    def average(self, own, roles):
        tag = hostcomm.Tag("mean")
        every = hostcomm.allgather(self.transport, own, tag=tag)
        np.testing.assert_array_equal(every[:, 1], roles)
        return every[:, 0].mean()

    def update(self, mean):
        self.total += mean


def test_a_task_finds_its_jobs_last_average():
    def work(transport):
        jobs = {name: Sums(transport) for name in "ab"}
        made = {name: job.co_job() for name, job in jobs.items()}
        ticks = iter(range(100))
        spans = perf.run_tasks(ROWS, transport.rank, made, clock=lambda: next(ticks))
        return spans, jobs

    for rank, (spans, jobs) in enumerate(in_threads(work, hostcomm.connected(2))):
        assert [span.task for span in spans] == list(ROWS[rank])
        assert [(s.start, s.end) for s in spans] == [
            (2 * n, 2 * n + 1) for n in range(6)
        ]
        for name, job in jobs.items():
            # Means of 1 and 2, 11 and 12, 21 and 22.
            assert [before for _, before in job.seen] == [0.0, 1.5, 13.0]
            assert all(task.job == name for task, _ in job.seen)
            assert job.total == 34.5


@pytest.mark.acceptance("spb-jigsaw", 10)
def test_a_job_computes_while_the_average_of_another_is_not_there():
    """Job a has an average once b has computed, and would wait for it in vain."""
    begun = threading.Event()

    def average(own, roles):
        assert begun.wait(20.0)
        return own

    def compute(task):
        begun.set()
        return 0

    rows = [[CoTask("a", 0, 0, 1), CoTask("b", 0, 0, 1), CoTask("a", 1, 0, 1)]]
    means = []
    jobs = {
        "a": CoJob(lambda task: task.iteration, average, means.append),
        "b": CoJob(compute, lambda own, roles: own, lambda mean: None),
    }
    perf.run_tasks(rows, 0, jobs)
    assert means == [0, 1]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], ROWS[1][::-1]], "same iterations in the same order"),
        ([ROWS[0], ROWS[1][1:]], "same iterations in the same order"),
        ([ROWS[0], ROWS[0]], "a worker's part must be done once"),
    ],
)
def test_rows_whose_averages_would_not_meet_are_refused(rows, words):
    with pytest.raises(ConfigError, match=words):
        perf.run_tasks(rows, 0, {})


def test_bars_begin_with_the_first_span():
    spans = [[CoSpan(5.0, 7.0, CoTask("a", 0, 0, 2))]]
    assert [tuple(bar) for bar in perf.task_bars(spans)] == [(0, 0, 2, "a", "role 2")]


def test_times_of_roles_make_a_job():
    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    blocks = optim.Blocks((("a",), ("b",)))
    times = perf.iteration_times(loss, blocks, params, jnp.ones((2, 4)), repetitions=2)
    assert len(times.roles) == 2
    assert min(times.forward, *times.roles) > 0
    job = perf.IterationTimes(1.0, (2.5, 4.0)).job("x", replicas=3, sync=0.5)
    assert (job.backward, job.k, job.workers, job.sync) == (3.0, 2, 6, 0.5)
