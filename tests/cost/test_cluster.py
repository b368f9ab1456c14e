"""Jobs on a cluster, replayed: who ran where, held what, and waited for whom."""

import itertools
import math

import numpy as np
import pytest

from hpcjax import optim
from hpcjax.core.errors import ConfigError
from hpcjax.cost import Cluster, Job, cluster, simulate_cluster
from hpcjax.cost._cluster_gpus import Gpus
from hpcjax.hostcomm import MessageCost

SEEDS = range(3)
ITERATION_LEVEL = ("jigsaw", "las")
TWO = tuple(
    Job(name=name, forward=1, backward=2, k=2, iterations=10) for name in ("a", "b")
)
TIGHT = Cluster(gpus=6, memory=7.0, switch=0.1, link=MessageCost(0.0, 0.25))


def draw_jobs(seed, count=14, gpus=6):
    rng = np.random.default_rng(seed)
    jobs = []
    for number in range(count):
        k, replicas = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2))[rng.integers(5)]
        job = Job(
            name=f"job {number}",
            forward=rng.uniform(0.1, 1),
            backward=rng.uniform(0.1, 2),
            k=k,
            replicas=replicas,
            iterations=int(rng.integers(1, 12)),
            bytes=float(rng.integers(1, 5)),
            arrival=rng.uniform(0, 20),
            sync=float(rng.choice([0.0, 0.2])),
        )
        assert job.workers <= gpus
        jobs.append(job)
    return jobs


@pytest.fixture(scope="module")
def runs():
    """What each policy makes of drawn jobs, with little memory."""
    return {
        (policy, seed): (jobs, simulate_cluster(jobs, TIGHT, policy, quantum=2.0))
        for seed in SEEDS
        for jobs in [draw_jobs(seed)]
        for policy in cluster.POLICIES
    }


def tasks_of(run, job, iteration):
    place = job.name, iteration
    return [span for span in run.spans if (span.job, span.iteration) == place]


EACH = pytest.mark.parametrize(
    "key", list(itertools.product(cluster.POLICIES, SEEDS)), ids=str
)


@pytest.mark.acceptance("spb-jigsaw", 8)
@pytest.mark.parametrize(
    ("policy", "seconds", "busy", "held"),
    [
        ("jigsaw", 50.0, 100.0, 100.0),
        ("las", 60.0, 120.0, 120.0),
        ("gang_fifo", 60.0, 120.0, 120.0),
        ("gang_srtf", 60.0, 120.0, 120.0),
        ("spb_gang", 60.0, 100.0, 120.0),
    ],
)
def test_two_jobs_take_five_sixths_of_the_time(policy, seconds, busy, held):
    """A pair of iterations has tasks of 3 + 2 + 3 + 2 seconds, of 3 + 3 + 3 + 3."""
    run = simulate_cluster(TWO, Cluster(gpus=2), policy)
    assert (run.makespan, run.busy, run.held) == (seconds, busy, held)


@pytest.mark.parametrize("policy", cluster.POLICIES)
def test_one_job_alone_gains_nothing(policy):
    run = simulate_cluster(TWO[:1], Cluster(gpus=4), policy)
    assert run.completion == {"a": 30.0}
    assert run.slowdown == {"a": 1.0}


@pytest.mark.acceptance("spb-jigsaw", 8)
@EACH
def test_work_is_neither_lost_nor_made(runs, key):
    jobs, run = runs[key]
    partial = key[0] in ("jigsaw", "spb_gang")
    work = {
        job.name: job.iterations
        * job.workers
        * (job.forward + job.backward * ((job.k + 1) / (2 * job.k) if partial else 1))
        for job in jobs
    }
    for job in jobs:
        own = [span for span in run.spans if span.job == job.name]
        assert math.fsum(s.end - s.start for s in own) == pytest.approx(work[job.name])
    assert run.busy == pytest.approx(sum(work.values()))
    if key[0] in ITERATION_LEVEL:
        assert run.held == pytest.approx(run.busy + run.switching)


@pytest.mark.acceptance("spb-jigsaw", 8)
@EACH
def test_no_gpu_does_two_things_at_once(runs, key):
    for row in runs[key][1].rows():
        for before, after in itertools.pairwise(row):
            assert after.start - after.switching >= before.end - 1e-9


@EACH
def test_an_iteration_has_all_workers_and_waits_for_the_one_before(runs, key):
    jobs, run = runs[key]
    for job in jobs:
        joined = job.arrival
        for iteration in range(job.iterations):
            own = [
                s for s in run.spans if (s.job, s.iteration) == (job.name, iteration)
            ]
            assert sorted(s.worker for s in own) == list(range(job.workers))
            assert len({s.gpu for s in own}) == job.workers
            roles = sorted(s.role for s in own)
            whole = [job.k] * job.workers
            partial = key[0] in ("jigsaw", "spb_gang")
            each = sorted([*range(1, job.k + 1)] * job.replicas)
            assert roles == (each if partial else whole)
            assert min(s.start - s.switching for s in own) >= joined - 1e-9
            joined = max(s.end for s in own) + job.sync
        assert run.completion[job.name] == pytest.approx(joined)


def test_roles_are_those_of_training():
    job = Job(name="a", forward=1, backward=2, k=3, replicas=2, iterations=4)
    for step in range(job.iterations):
        mine = tuple(job.role(worker, step) for worker in range(job.workers))
        assert mine == optim.roles(job.workers, job.k, step)


def test_every_worker_has_each_role_once_in_k_iterations(runs):
    jobs, run = runs["jigsaw", 0]
    for job in jobs:
        for worker in range(job.workers):
            own = [s.role for s in run.spans if (s.job, s.worker) == (job.name, worker)]
            for first in range(job.iterations - job.k + 1):
                assert len(set(own[first : first + job.k])) == job.k


@pytest.mark.acceptance("spb-jigsaw", 8)
@EACH
def test_what_gpus_hold_fits_and_what_they_do_not_is_loaded(runs, key):
    """A state that a task finds there has been there since the job's last one."""
    jobs, run = runs[key]
    size = {job.name: job.bytes for job in jobs}
    assert max(run.memory) <= TIGHT.memory
    for row in run.rows():
        held = [(s.job, s.start - s.switching, s.end) for s in row]
        for job, count in size.items():
            load = TIGHT.switch + TIGHT.link.seconds(count)
            own = [span for span in row if span.job == job]
            for before, after in itertools.pairwise([None, *own]):
                current = before and before.iteration == after.iteration - 1
                choices = [load, TIGHT.switch, 0.0] if current else [load]
                assert any(after.switching == pytest.approx(c) for c in choices)
                if after.switching < load - 1e-9:
                    held.append((job, before.start, after.end))
        for moment in [span.start for span in row]:
            there = {job for job, start, end in held if start <= moment < end}
            assert sum(size[job] for job in there) <= TIGHT.memory


@pytest.mark.parametrize("policy", ITERATION_LEVEL)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_gpu_is_idle_while_a_job_waits(policy, seed):
    """Between a join and the first task that follows, all GPUs are busy."""
    jobs = draw_jobs(seed)
    run = simulate_cluster(jobs, Cluster(gpus=6), policy)
    idle = [
        (before.end, after.start)
        for row in run.rows()
        for before, after in itertools.pairwise(row)
    ]
    for job in jobs:
        ready = job.arrival
        for iteration in range(job.iterations):
            own = [
                s for s in run.spans if (s.job, s.iteration) == (job.name, iteration)
            ]
            begun = min(s.start for s in own)
            for start, end in idle:
                assert min(end, begun) <= max(start, ready) + 1e-9
            ready = max(s.end for s in own) + job.sync


@pytest.mark.acceptance("spb-jigsaw", 8)
@EACH
def test_the_order_in_which_jobs_are_given_does_not_matter(runs, key):
    jobs, run = runs[key]
    again = simulate_cluster(jobs[::-1], TIGHT, key[0], quantum=2.0)
    assert again.spans == run.spans


def test_without_roles_jigsaw_is_least_attained_service():
    jobs = [
        Job(name=f"{n}", forward=1.0, backward=2.0 + n, replicas=2, iterations=5)
        for n in range(4)
    ]
    found = [simulate_cluster(jobs, Cluster(gpus=3), p) for p in ITERATION_LEVEL]
    assert found[0] == found[1]


def test_who_has_had_least_is_next():
    jobs = [
        Job(name="old", forward=1, backward=1, iterations=6),
        Job(name="new", forward=1, backward=1, iterations=2, arrival=7.0),
    ]
    run = simulate_cluster(jobs, Cluster(gpus=1), "las")
    order = [span.job for span in run.spans]
    assert order == ["old"] * 4 + ["new"] * 2 + ["old"] * 2
    # Those that know, or do not care, how long it takes.
    srtf = simulate_cluster(jobs, Cluster(gpus=1), "gang_srtf", quantum=1.0)
    assert srtf.completion == {"old": 12.0, "new": 16.0}  # 4 left of either at 8
    fifo = simulate_cluster(jobs, Cluster(gpus=1), "gang_fifo", quantum=1.0)
    assert fifo.completion == {"old": 12.0, "new": 16.0}


def test_a_gang_is_preempted_after_its_quantum_by_the_shortest():
    jobs = [
        Job(name="long", forward=1, backward=1, iterations=6),
        Job(name="short", forward=1, backward=1, arrival=1.0),
    ]
    one = Cluster(gpus=1, switch=0.5)
    run = simulate_cluster(jobs, one, "gang_srtf", quantum=3.0)
    assert run.completion == {"long": 16.0 - 0.5, "short": 4.5 + 2.5}
    assert [span.switching for span in run.spans] == [0.5, 0, 0.5, 0.5, 0, 0, 0]


def test_a_gang_that_does_not_fit_keeps_others_waiting():
    jobs = [
        Job(name="a", forward=1, backward=2, iterations=2),
        Job(name="b", forward=1, backward=2, replicas=2, arrival=1.0),
        Job(name="c", forward=1, backward=0, arrival=2.0),
    ]
    run = simulate_cluster(jobs, Cluster(gpus=2), "gang_fifo")
    assert run.completion == {"a": 6.0, "b": 9.0, "c": 10.0}
    run = simulate_cluster(jobs, Cluster(gpus=2), "las")
    assert run.completion["c"] < run.completion["b"]


def test_weights_stay_where_they_are():
    """Two jobs on four GPUs that are all free: none goes where it has not been."""
    far = Cluster(gpus=4, switch=0.01, link=MessageCost(0.0, 1.0))
    jobs = [job_of(name, bytes=1.0) for name in ("a", "b")]
    run = simulate_cluster(jobs, far, "jigsaw")
    assert sum(span.switching > 0.5 for span in run.spans) == 4
    assert run.switching == pytest.approx(4 * 1.01)


def test_the_state_that_was_used_longest_ago_makes_room():
    jobs = [job_of(name, bytes=1.0) for name in "abc"]
    gpus = Gpus(jobs, Cluster(gpus=1, memory=2.0, switch=0.1, link=MessageCost(0, 1.0)))
    # c takes a's place, and a then c's, for b was used once more.
    seconds = [gpus.turn(number, [0], 0.0)[0] for number in (0, 1, 2, 1, 0, 1)]
    assert seconds == pytest.approx([1.1, 1.1, 1.1, 0.1, 1.1, 0.1])


def job_of(name, **changes):
    given = {"forward": 1.0, "backward": 2.0, "k": 2, "iterations": 5}
    return Job(name=name, **given | changes)


def test_bars_show_tasks_and_switches():
    one = Cluster(gpus=1, switch=0.5)
    bars = simulate_cluster([Job(name="a", forward=1, backward=1)], one, "las").bars()
    assert [tuple(bar) for bar in bars] == [
        (0, 0.0, 0.5, "switch", ""),
        (0, 0.5, 2.5, "a", "0, role 1"),
    ]


@pytest.mark.parametrize(
    ("jobs", "given", "words"),
    [
        ([], {}, "there must be jobs"),
        ([*TWO, TWO[0]], {}, r"names of their own: got twice=\['a'\]"),
        (
            TWO,
            {"gpus": 1},
            "'a' needs more GPUs than the cluster has: .*needs=2, gpus=1",
        ),
        (
            [job_of("big", bytes=9.0)],
            {"memory": 8.0},
            r"'big' needs more memory than a GPU has: got bytes=9.0, memory=8.0",
        ),
    ],
)
def test_jobs_that_cannot_run_are_refused(jobs, given, words):
    where = Cluster(**{"gpus": 2} | given)
    with pytest.raises(ConfigError, match=words):
        simulate_cluster(jobs, where, "jigsaw")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"forward": -1.0}, "forward must be finite and >= 0"),
        ({"sync": -0.1}, "sync must be finite and >= 0"),
        ({"forward": 0.0, "backward": 0.0}, "'x' must take time"),
        ({"k": 0}, "k must be an integer >= 1"),
    ],
)
def test_jobs_that_cannot_be_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        job_of("x", **given)


def test_unknown_policies_are_refused():
    with pytest.raises(ConfigError, match="policy must be one of"):
        simulate_cluster(TWO, Cluster(gpus=2), "jigsew")
