"""Several training jobs in one set of processes, which take turns by iteration.

Each process is a worker of every job. It walks a row of tasks, each a worker's part of
a job's iteration; averages are taken meanwhile, so that a job's next task waits for its
own average only, and what one job leaves idle another one uses.
"""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcjax import hostcomm
from hpcjax.core import checks
from hpcjax.cost.cluster import ClusterRun
from hpcjax.cost.timelines import Bar


class CoTask(NamedTuple):
    """A worker's part of an iteration of a job.

    Attributes:
      job: its name.
      iteration: from 0.
      worker: whose part of the batch it is.
      role: through how many blocks it goes back.
    """

    job: str
    iteration: int
    worker: int
    role: int


class CoSpan(NamedTuple):
    """A task that was done.

    Attributes:
      start: seconds at which the job's last average was there.
      end: when the task was done, with the update before it.
      task: what was done.
    """

    start: float
    end: float
    task: CoTask


class CoJob(NamedTuple):
    """What a process does for a job; each must return only when it is done.

    Attributes:
      compute: `task -> contribution` to the iteration's average.
      average: `(contribution, roles) -> mean` over all processes, given the roles that
        these have; called in another thread than the rest.
      update: takes the mean.
    """

    compute: Callable[[CoTask], Any]
    average: Callable[[Any, tuple[int, ...]], Any]
    update: Callable[[Any], Any]


Rows = Sequence[Sequence[CoTask]]


def rows_of(run: ClusterRun) -> tuple[tuple[CoTask, ...], ...]:
    """Returns the tasks of each GPU of a simulated cluster, in order."""
    return tuple(
        tuple(CoTask(s.job, s.iteration, s.worker, s.role) for s in row)
        for row in run.rows()
    )


def run_tasks(
    rows: Rows,
    rank: int,
    jobs: Mapping[str, CoJob],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[CoSpan, ...]:
    """Does the tasks of a row; the other processes do theirs at the same time.

    Args:
      rows: of all processes.
      rank: of this one.
      jobs: by name.
      clock: seconds; must be the same for all processes.

    Raises:
      ConfigError: rows that are not of all processes, or of no common order, in which
        averages would wait for each other.
      ProcessLost: another process has ended or hangs.
    """
    roles, spans = _roles(rows), []
    waiting: dict[str, hostcomm.Work] = {}
    with hostcomm.Agent("averages") as agent:
        for task in rows[rank]:
            job = jobs[task.job]
            mean = waiting.pop(task.job).result() if task.job in waiting else None
            start = clock()
            if mean is not None:
                job.update(mean)
            own = job.compute(task)
            spans.append(CoSpan(start, clock(), task))
            given = roles[task.job, task.iteration]
            waiting[task.job] = agent.submit(job.average, own, given)
        for name, work in waiting.items():
            jobs[name].update(work.result())
    return tuple(spans)


def _roles(rows: Rows) -> dict[tuple[str, int], tuple[int, ...]]:
    """Returns the roles of all processes in each iteration."""
    orders = [[(task.job, task.iteration) for task in row] for row in rows]
    rule = "rows must have the same iterations in the same order"
    checks.require(
        all(order == orders[0] for order in orders), rule, lengths=[*map(len, orders)]
    )
    workers = collections.Counter(
        (t.job, t.iteration, t.worker) for r in rows for t in r
    )
    twice = sorted(each for each, count in workers.items() if count > 1)
    checks.require(not twice, "a worker's part must be done once", twice=twice[:3])
    each = zip(*rows, strict=True)
    return {(own[0].job, own[0].iteration): tuple(t.role for t in own) for own in each}


def idle_share(spans: Sequence[Sequence[CoSpan]]) -> float:
    """Returns the share of the time, from first to last, in which processes waited.

    Args:
      spans: of each process.

    Examples:
      >>> task = CoTask("a", 0, 0, 1)
      >>> idle_share([[CoSpan(0.0, 4.0, task)], [CoSpan(0.0, 2.0, task)]])
      0.25
    """
    every = [span for row in spans for span in row]
    whole = max(s.end for s in every) - min(s.start for s in every)
    return 1 - sum(s.end - s.start for s in every) / (len(spans) * whole)


def task_bars(spans: Sequence[Sequence[CoSpan]]) -> tuple[Bar, ...]:
    """Returns the spans of each process as bars to draw, in seconds from the first."""
    begin = min(span.start for row in spans for span in row)
    return tuple(
        Bar(rank, s.start - begin, s.end - begin, s.task.job, f"role {s.task.role}")
        for rank, row in enumerate(spans)
        for s in row
    )
