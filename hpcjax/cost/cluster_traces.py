"""Jobs of a simulated cluster: drawn, or read from traces; imports no JAX.

Traces tell when jobs came, how many GPUs they had and for how long. What they do not
tell, an iteration's time and its parts, is assumed: see `Assumed`.
"""

import contextlib
import csv
import datetime
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import DataFormatError
from hpcjax.cost.cluster import Job

# How many GPUs jobs want, and the share of the jobs that do.
GPUS = {1: 0.5, 2: 0.2, 4: 0.15, 8: 0.1, 16: 0.05}
CSV_COLUMNS = ("job_id", "submit", "gpus", "duration")
_PAI = "job_name task_name inst_num status start_time end_time plan_cpu plan_mem"
PAI_COLUMNS = (*_PAI.split(), "plan_gpu", "gpu_type")


class Assumed(NamedTuple):
    """What traces do not tell of a job.

    Attributes:
      seconds: of an iteration's longest task, f + b.
      forward: f as a share of it.
      k: roles at most; a job has the largest number up to it that divides its GPUs.
      bytes: of a worker's state.
    """

    seconds: float = 1.0
    forward: float = 1 / 3
    k: int = 4
    bytes: float = 1e9

    def job(self, name: str, arrival: float, gpus: int, iterations: int) -> Job:
        """Returns a job.

        Examples:
          >>> job = Assumed(k=4).job("a", 0.0, 6, 100)
          >>> job.k, job.replicas
          (3, 2)
        """
        checks.require_count(1, gpus=gpus, k=self.k)
        k = max(k for k in range(1, self.k + 1) if gpus % k == 0)
        return Job(
            name=name,
            forward=self.forward * self.seconds,
            backward=(1 - self.forward) * self.seconds,
            k=k,
            replicas=gpus // k,
            iterations=iterations,
            bytes=self.bytes,
            arrival=arrival,
        )


_USUAL = Assumed()


def generate_jobs(
    count: int,
    rate: float,
    seed: int,
    *,
    assumed: Assumed = _USUAL,
    median: float = 200.0,
    spread: float = 0.5,
    limits: tuple[int, int] = (100, 400),
    gpus: Mapping[int, float] = GPUS,
) -> list[Job]:
    """Draws jobs that come as a Poisson process.

    Args:
      count: number of jobs.
      rate: jobs that come in a second, on average.
      seed: of the draws.
      assumed: of all jobs; `seconds` is the median of theirs.
      median: of the iterations, which are log-normal, as are seconds.
      spread: standard deviation of the logarithm of either.
      limits: between which iterations are cut off.
      gpus: `{how many a job wants: share of the jobs}`.

    Raises:
      ConfigError: a rate or median that is not positive; limits that fall; shares that
        do not add up to 1.

    Examples:
      >>> [job.name for job in generate_jobs(2, 0.1, 0)]
      ['job 0', 'job 1']
    """
    checks.require_count(1, count=count)
    checks.require_positive(rate=rate, median=median, seconds=assumed.seconds)
    checks.require_finite(0.0, spread=spread)
    low, high = limits
    checks.require(1 <= low <= high, "limits must rise from 1", limits=limits)
    total = math.fsum(gpus.values())
    checks.require(abs(total - 1) < 1e-9, "shares must add up to 1", shares=total)
    rng = np.random.default_rng([seed, count])
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    sizes = rng.choice(list(gpus), count, p=list(gpus.values()))
    seconds = assumed.seconds * rng.lognormal(0.0, spread, count)
    iterations = median * rng.lognormal(0.0, spread, count)
    drawn = zip(
        arrivals - arrivals[0],
        sizes,
        seconds,
        np.clip(iterations.round(), low, high),
        strict=True,
    )
    return [
        assumed._replace(seconds=float(each)).job(
            f"job {number}", float(arrival), int(size), int(length)
        )
        for number, (arrival, size, each, length) in enumerate(drawn)
    ]


class Record(NamedTuple):
    """A job of a trace; times in seconds.

    Attributes:
      name: of the job.
      submit: when it came.
      gpus: that it had.
      duration: for which it had them.
    """

    name: str
    submit: float
    gpus: int
    duration: float


def read_csv_jobs(path: str | pathlib.Path, assumed: Assumed = _USUAL) -> list[Job]:
    """Reads a CSV file with the columns `job_id,submit,gpus,duration`, in seconds.

    Returns:
      The jobs, the first arriving at 0. One takes so many iterations that it runs about
      as long as in the trace if it never waits.

    Raises:
      DataFormatError: names the file and the line that is malformed.
    """
    path = pathlib.Path(path)
    with path.open(newline="") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        if header != list(CSV_COLUMNS):
            wanted = ",".join(CSV_COLUMNS)
            raise DataFormatError(f"{path}, line 1: columns are {header}, not {wanted}")
        records = []
        for row in filter(None, rows):
            with _line(path, rows.line_num):
                name, submit, gpus, duration = row
                own = Record(name, float(submit), int(gpus), float(duration))
                records.append(_checked(own))
    return _jobs(path, records, assumed)


def read_philly_jobs(path: str | pathlib.Path, assumed: Assumed = _USUAL) -> list[Job]:
    """Reads the JSON `cluster_job_log` of Microsoft's Philly trace.

    A job's duration is that of all its attempts; it has the GPUs of its first attempt.
    Jobs that never ran, or whose end is not known, are left out. See `read_csv_jobs`.
    At the peak it takes two to three times the size of the file.

    References:
      Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training
      Workloads, ATC 2019; github.com/msr-fiddle/philly-traces.
    """
    path = pathlib.Path(path)
    records = []
    for line, entry in _entries(path):
        with _line(path, line):
            attempts = [each for each in entry["attempts"] if _ended(each)]
            if not attempts:
                continue
            gpus = sum(len(host["gpus"]) for host in attempts[0]["detail"])
            spans = [_time(a["end_time"]) - _time(a["start_time"]) for a in attempts]
            submit = _time(entry["submitted_time"])
            if gpus and sum(spans) > 0:
                own = Record(str(entry["jobid"]), submit, gpus, sum(spans))
                records.append(_checked(own))
    return _jobs(path, records, assumed)


def read_pai_jobs(
    path: str | pathlib.Path,
    assumed: Assumed = _USUAL,
    columns: Sequence[str] = PAI_COLUMNS,
) -> list[Job]:
    """Reads the `pai_task_table` of Alibaba's PAI trace, a CSV file without a header.

    A job's GPUs are those of all its tasks, `inst_num` times `plan_gpu` percent of one,
    rounded up; it lasts from its first task's start, at which it is taken to come, to
    its last one's end. Tasks without a GPU or an end are left out. See `read_csv_jobs`.

    Args:
      path: of the file.
      assumed: what it does not tell.
      columns: of the file, in order.

    References:
      Weng et al., MLaaS in the Wild, NSDI 2022; github.com/alibaba/clusterdata,
      cluster-trace-gpu-v2020.
    """
    path = pathlib.Path(path)
    tasks: dict[str, list[tuple[float, float, float]]] = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        for row in filter(None, rows):
            with _line(path, rows.line_num):
                cells = dict(zip(columns, row, strict=True))
                percent = float(cells["plan_gpu"] or 0)
                if not percent or not cells["start_time"] or not cells["end_time"]:
                    continue
                start, end = float(cells["start_time"]), float(cells["end_time"])
                gpus = float(cells["inst_num"]) * percent / 100
                _checked(Record(cells["job_name"], start, math.ceil(gpus), end - start))
                tasks.setdefault(cells["job_name"], []).append((start, end, gpus))
    records = []
    for name, own in tasks.items():
        starts, ends, gpus = zip(*own, strict=True)
        begin, count = min(starts), math.ceil(round(sum(gpus), 6))
        records.append(Record(name, begin, count, max(ends) - begin))
    return _jobs(path, records, assumed)


def _jobs(path: pathlib.Path, records: list[Record], assumed: Assumed) -> list[Job]:
    if not records:
        raise DataFormatError(f"{path}: no job that ran on GPUs")
    checks.require_positive(seconds=assumed.seconds)
    first = min(record.submit for record in records)
    return [
        assumed.job(
            record.name,
            record.submit - first,
            record.gpus,
            max(1, round(record.duration / assumed.seconds)),
        )
        for record in records
    ]


def _checked(record: Record) -> Record:
    """Returns a record, or raises ValueError."""
    finite = math.isfinite(record.submit) and math.isfinite(record.duration)
    if record.gpus < 1 or record.duration <= 0 or not finite:
        raise ValueError(f"gpus={record.gpus}, duration={record.duration:g}")
    return record


@contextlib.contextmanager
def _line(path: pathlib.Path, line: int) -> Iterator[None]:
    """Says in an error where in a file it was."""
    try:
        yield
    except KeyError as error:
        raise DataFormatError(f"{path}, line {line}: {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise DataFormatError(f"{path}, line {line}: malformed: {error}") from None


def _entries(path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Yields the entries of a JSON list, each with the line on which it begins."""
    text, decoder = path.read_text(), json.JSONDecoder()
    number, counted = 1, 0
    with _line(path, 1):
        place = _skip(text, 0, "[")
    while text[place : place + 1] != "]":
        number += text.count("\n", counted, place)
        counted = place
        with _line(path, number):
            entry, end = decoder.raw_decode(text, place)
            place = _skip(text, end, ",")
        yield number, entry


def _skip(text: str, place: int, mark: str) -> int:
    """Returns where the next entry begins, behind a mark, or where the list ends."""
    between = re.compile(rf"\s*(\{mark}|(?=\]))\s*").match(text, place)
    if between is None:
        raise ValueError(f"{text[place : place + 20]!r} in place of {mark!r}")
    return between.end()


def _ended(attempt: Mapping[str, Any]) -> bool:
    times = attempt["start_time"], attempt["end_time"]
    return all(time not in (None, "None", "") for time in times)


def _time(text: str) -> float:
    """Returns the seconds of a time such as `2017-10-09 07:02:35`."""
    moment = datetime.datetime.fromisoformat(text)
    return moment.replace(tzinfo=datetime.UTC).timestamp()
