"""Training jobs that share a cluster, as simulated events; imports no JAX.

A job's iteration has a task for each of its workers, and ends with a join of all. With
partial backward passes tasks differ in length: of k blocks, role i takes f + b·i/k
seconds, a forward pass f and i/k of a backward pass b. That makes no job faster, whose
longest task sets the pace; it saves time where GPUs work on another job meanwhile.

References:
  Kumar, Subramanian, Venkataraman, Akella: Doing More by Doing Less, DistributedML
  2021, for a scheduler of single iterations that knows of partial backward passes. Its
  rules are not specified there; those below are choices made here.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hpcjax.core import checks
from hpcjax.cost._cluster_gpus import Gpus
from hpcjax.cost.timelines import Bar
from hpcjax.hostcomm import MessageCost

Policy = Literal["jigsaw", "las", "gang_fifo", "gang_srtf", "spb_gang"]
POLICIES: tuple[Policy, ...] = ("jigsaw", "las", "gang_fifo", "gang_srtf", "spb_gang")
PARTIAL, GANGS = ("jigsaw", "spb_gang"), ("gang_fifo", "gang_srtf", "spb_gang")
SWITCH = "switch"  # the kind of bars in which a GPU changes its job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training job of k · `replicas` workers, each of which wants a GPU.

    Attributes:
      name: of the job.
      forward: f, seconds of a worker's forward pass.
      backward: b, seconds of its whole backward pass.
      k: blocks, and so roles.
      replicas: workers of each role.
      iterations: until it is done.
      bytes: of a worker's state, which a GPU holds that runs it.
      arrival: seconds at which it comes.
      sync: seconds of the join after each iteration.
    """

    name: str
    forward: float
    backward: float
    k: int = 1
    replicas: int = 1
    iterations: int = 1
    bytes: float = 0.0
    arrival: float = 0.0
    sync: float = 0.0

    def __post_init__(self) -> None:
        counts = {"k": self.k, "replicas": self.replicas, "iterations": self.iterations}
        checks.require_count(1, **counts)
        times = {"forward": self.forward, "backward": self.backward, "sync": self.sync}
        checks.require_finite(0.0, **times, bytes=self.bytes, arrival=self.arrival)
        some = self.forward + self.backward > 0
        checks.require(some, f"job {self.name!r} must take time", forward=self.forward)

    @property
    def workers(self) -> int:
        """How many, and so how many GPUs."""
        return self.k * self.replicas

    @property
    def pace(self) -> float:
        """Seconds of an iteration without waiting: the longest task, and the join."""
        return self.seconds(self.k) + self.sync

    def seconds(self, role: int) -> float:
        """Returns the seconds of a task of a role, 1 to k."""
        return self.forward + self.backward * role / self.k

    def role(self, worker: int, iteration: int) -> int:
        """Returns the role of a worker, which moves on by one worker each iteration."""
        return (worker + iteration) % self.k + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal GPUs.

    Attributes:
      gpus: how many.
      memory: bytes of each, for the states of several jobs.
      switch: seconds in which a GPU turns to another job.
      link: over which a state comes that the GPU does not hold, or only from before the
        job's last iteration; this takes its time in addition.
    """

    gpus: int
    memory: float = math.inf
    switch: float = 0.0
    link: MessageCost = MessageCost(0.0, 0.0)

    def __post_init__(self) -> None:
        checks.require_count(1, gpus=self.gpus)
        checks.require(self.memory > 0, "memory must be > 0", memory=self.memory)
        checks.require_finite(0.0, switch=self.switch)


class TaskSpan(NamedTuple):
    """A worker's part of an iteration, on a GPU.

    Attributes:
      gpu: its number.
      start: seconds at which it computes; `switching` before, the GPU turned to it.
      end: when it is done.
      job: name of the job.
      iteration: from 0.
      worker: of the job, whose part of the batch it is.
      role: through how many blocks it goes back.
      switching: seconds.
    """

    gpu: int
    start: float
    end: float
    job: str
    iteration: int
    worker: int
    role: int
    switching: float


@dataclasses.dataclass(frozen=True)
class ClusterRun:
    """What has happened on a cluster.

    Attributes:
      spans: all tasks, in the order in which they were placed.
      completion: seconds at which each job was done, by name.
      slowdown: of each job, its time from arrival to completion over what it would have
        taken alone.
      held: GPU-seconds in which GPUs were taken: those of a gang until all of it ends,
        others only while they compute or switch.
      gpus: how many there were.
      memory: the most bytes that each GPU has held.
      makespan: seconds from the first arrival to the last completion.
    """

    spans: tuple[TaskSpan, ...]
    completion: dict[str, float]
    slowdown: dict[str, float]
    held: float
    gpus: int
    memory: tuple[float, ...]
    makespan: float

    @property
    def busy(self) -> float:
        """GPU-seconds of computing."""
        return math.fsum(span.end - span.start for span in self.spans)

    @property
    def switching(self) -> float:
        """GPU-seconds in which GPUs turned to another job."""
        return math.fsum(span.switching for span in self.spans)

    def rows(self) -> tuple[tuple[TaskSpan, ...], ...]:
        """Returns each GPU's tasks in order."""
        rows: list[list[TaskSpan]] = [[] for _ in range(self.gpus)]
        for span in self.spans:
            rows[span.gpu].append(span)
        return tuple(map(tuple, rows))

    def bars(self) -> tuple[Bar, ...]:
        """Returns tasks, and what GPUs switch, as bars to draw; in seconds."""
        bars = []
        for span in self.spans:
            if span.switching:
                begin = span.start - span.switching
                bars.append(Bar(span.gpu, begin, span.start, SWITCH))
            label = f"{span.iteration}, role {span.role}"
            bars.append(Bar(span.gpu, span.start, span.end, span.job, label))
        return tuple(bars)


def simulate_cluster(
    jobs: Sequence[Job], cluster: Cluster, policy: Policy, *, quantum: float = 60.0
) -> ClusterRun:
    """Simulates jobs until all are done.

    - "jigsaw" places single iterations with partial backward passes. When a GPU has
      nothing to do, the ready job with the least attained GPU time is next. Its
      tasks, the longest first, go each to a GPU of its own, that which can begin the
      earliest, after the tasks it has and the switch: so a long task lies beside
      a short one, and weights stay where they are unless another GPU is sooner free.
    - "las" does the same, with whole backward passes.
    - "gang_fifo" gives a job all its GPUs at once, in the order of arrival, for a
      quantum; then, after an iteration, the first in order is next. Who does not fit
      keeps those behind it waiting.
    - "gang_srtf" does so by least remaining time: it knows how long jobs will take.
    - "spb_gang" is "gang_fifo" with partial backward passes: GPUs are idle until
      the longest role ends.

    No other policy knows how many iterations are left, or who will come. Ties are
    broken by arrival, then name.

    Args:
      jobs: in any order.
      cluster: where they run.
      policy: who is next, and where.
      quantum: seconds that a gang keeps its GPUs at least, if it is not done.

    Raises:
      ConfigError: no job, two of one name, or one that needs more GPUs than there are
        or more memory than one has; an unknown policy.

    Examples:
      >>> jobs = [Job(name=n, forward=1, backward=2, k=2, iterations=10) for n in "ab"]
      >>> for policy in ("jigsaw", "gang_fifo"):
      ...     print(simulate_cluster(jobs, Cluster(gpus=2), policy).makespan)
      50.0
      60.0
    """
    _check(jobs, cluster, policy, quantum)
    order = sorted(jobs, key=lambda job: (job.arrival, job.name))
    kind = _Gangs if policy in GANGS else _Iterations
    return kind(order, cluster, policy, quantum).run()


def _check(
    jobs: Sequence[Job], cluster: Cluster, policy: Policy, quantum: float
) -> None:
    checks.require_choice("policy", policy, POLICIES)
    checks.require_positive(quantum=quantum)
    checks.require(len(jobs) > 0, "there must be jobs", jobs=len(jobs))
    counts = collections.Counter(job.name for job in jobs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    checks.require(not twice, "jobs must have names of their own", twice=twice[:3])
    for job in jobs:
        rule = f"job {job.name!r} needs more GPUs than the cluster has"
        good = job.workers <= cluster.gpus
        checks.require(good, rule, needs=job.workers, gpus=cluster.gpus)
        rule = f"the state of job {job.name!r} needs more memory than a GPU has"
        good = job.bytes <= cluster.memory
        checks.require(good, rule, bytes=job.bytes, memory=cluster.memory)


class _Simulation:
    """Events in order of time, and the jobs that are ready, by priority."""

    def __init__(
        self, jobs: Sequence[Job], cluster: Cluster, policy: Policy, quantum: float
    ) -> None:
        self.jobs, self.policy, self.quantum = jobs, policy, quantum
        self.gpus = Gpus(jobs, cluster)
        self.partial = policy in PARTIAL
        self.done, self.attained = [0] * len(jobs), [0.0] * len(jobs)
        self.spans: list[TaskSpan] = []
        self.completion: dict[str, float] = {}
        self.held = 0.0
        # A job by number becomes ready, or at -1 a GPU may have become idle.
        self.events = [(job.arrival, number) for number, job in enumerate(jobs)]
        self.ready: list[tuple[float, int]] = []

    def run(self) -> ClusterRun:
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, number = heapq.heappop(self.events)
                if number >= 0:
                    self._make_ready(number, now)
            self._place(now)
        return ClusterRun(
            tuple(self.spans),
            self.completion,
            {job.name: self._slowdown(job) for job in self.jobs},
            self.held,
            self.gpus.cluster.gpus,
            tuple(self.gpus.peak.tolist()),
            max(self.completion.values()) - self.jobs[0].arrival,
        )

    def _slowdown(self, job: Job) -> float:
        cluster = self.gpus.cluster
        begin = cluster.switch + cluster.link.seconds(job.bytes)
        alone = begin + job.iterations * job.pace
        return (self.completion[job.name] - job.arrival) / alone

    def _make_ready(self, number: int, now: float) -> None:
        job = self.jobs[number]
        if self.done[number] == job.iterations:
            self.completion[job.name] = now
            return
        priority = self._priority(number)
        heapq.heappush(self.ready, (priority, number))  # numbers are by arrival, name

    def _priority(self, number: int) -> float:
        raise NotImplementedError

    def _place(self, now: float) -> None:
        raise NotImplementedError

    def _run_task(
        self, gpu: int, number: int, worker: int, start: float, switching: float
    ) -> float:
        """Notes a task of a job's next iteration and returns its end."""
        job, iteration = self.jobs[number], self.done[number]
        role = job.role(worker, iteration) if self.partial else job.k
        end = start + job.seconds(role)
        self.gpus.compute(gpu, start, end)
        self.attained[number] += end - start
        span = (gpu, start, end, job.name, iteration, worker, role, switching)
        self.spans.append(TaskSpan(*span))
        return end


class _Iterations(_Simulation):
    """Places single iterations."""

    def _priority(self, number: int) -> float:
        return self.attained[number]

    def _place(self, now: float) -> None:
        while self.ready and (self.gpus.free <= now).any():
            number = heapq.heappop(self.ready)[1]
            chosen = self.gpus.choose(number, now, idle=False)
            assert chosen is not None  # no job needs more GPUs than there are
            self._place_iteration(number, chosen, now)

    def _place_iteration(self, number: int, chosen: list[int], now: float) -> None:
        job, iteration = self.jobs[number], self.done[number]
        longest_first = sorted(
            range(job.workers), key=lambda w: (-job.role(w, iteration), w)
        )
        turned = self.gpus.turn(number, chosen, now)
        ends = []
        for gpu, worker, switching in zip(chosen, longest_first, turned, strict=True):
            start = float(self.gpus.free[gpu])
            ends.append(self._run_task(gpu, number, worker, start, switching))
            self.held += ends[-1] - start + switching
            heapq.heappush(self.events, (ends[-1], -1))
        self.done[number] += 1
        heapq.heappush(self.events, (max(ends) + job.sync, number))


class _Gangs(_Simulation):
    """Gives jobs all their GPUs at once."""

    def _priority(self, number: int) -> float:
        job = self.jobs[number]
        left = job.iterations - self.done[number]
        return left * job.pace if self.policy == "gang_srtf" else job.arrival

    def _place(self, now: float) -> None:
        while self.ready:
            number = self.ready[0][1]
            chosen = self.gpus.choose(number, now, idle=True)
            if chosen is None:
                return
            heapq.heappop(self.ready)
            self._lease(number, chosen, now)

    def _lease(self, number: int, chosen: list[int], now: float) -> None:
        job = self.jobs[number]
        switching = self.gpus.turn(number, chosen, now)
        begin = now + max(switching)
        left = job.iterations - self.done[number]
        for _ in range(min(left, math.ceil(self.quantum / job.pace))):
            for worker, gpu in enumerate(chosen):
                self._run_task(gpu, number, worker, begin, switching[worker])
            switching = [0.0] * len(chosen)
            self.done[number] += 1
            begin += job.pace
        self.gpus.free[chosen] = begin
        self.held += len(chosen) * (begin - now)
        heapq.heappush(self.events, (begin, number))
