"""Jobs that are drawn have the stated shares, those of files the files' values."""

import collections
import json
import tracemalloc

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.cost import (
    Assumed,
    generate_jobs,
    read_csv_jobs,
    read_pai_jobs,
    read_philly_jobs,
)

ASSUMED = Assumed(seconds=2.0, forward=0.25, k=4, bytes=5.0)


def write(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def found(jobs):
    return [(j.name, j.arrival, j.k, j.replicas, j.iterations) for j in jobs]


def test_drawn_jobs_have_the_stated_shares():
    jobs = generate_jobs(4000, 0.5, 1)
    sizes = collections.Counter(job.workers for job in jobs)
    for size, share in {1: 0.5, 2: 0.2, 4: 0.15, 8: 0.1, 16: 0.05}.items():
        assert sizes[size] / 4000 == pytest.approx(share, abs=0.025)
    assert all(job.k == min(4, job.workers) for job in jobs)
    gaps = np.diff([job.arrival for job in jobs])
    assert gaps.mean() == pytest.approx(2.0, rel=0.06)
    assert gaps.std() == pytest.approx(2.0, rel=0.1)  # of an exponential distribution
    lengths = [job.iterations for job in jobs]
    assert (min(lengths), max(lengths)) == (100, 400)
    assert np.median(lengths) == pytest.approx(200, rel=0.05)
    logs = np.log([job.forward + job.backward for job in jobs])
    assert (logs.mean(), logs.std()) == pytest.approx((0.0, 0.5), abs=0.03)
    assert all(job.backward == pytest.approx(2 * job.forward) for job in jobs[:9])


def test_the_mix_of_jobs_saves_what_was_derived():
    """19.9 % of a whole pass; 16.7 % of jobs of two GPUs, none of those of one."""
    jobs = generate_jobs(20_000, 1.0, 0, spread=0.0)
    whole = sum(job.workers * job.seconds(job.k) for job in jobs)
    roles = [(job, job.role(w, 0)) for job in jobs for w in range(job.workers)]
    assert 1 - sum(j.seconds(r) for j, r in roles) / whole == pytest.approx(
        0.199, abs=0.003
    )


def test_draws_are_of_the_seed():
    assert generate_jobs(5, 1.0, 3) == generate_jobs(5, 1.0, 3)
    assert generate_jobs(5, 1.0, 3) != generate_jobs(5, 1.0, 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": 0.0}, "rate must be finite and > 0"),
        ({"limits": (9, 3)}, "limits must rise"),
        ({"gpus": {1: 0.5}}, "shares must add up to 1: got shares=0.5"),
        ({"count": 0}, "count must be an integer >= 1"),
    ],
)
def test_draws_that_cannot_be_are_refused(given, words):
    wanted = {"count": 2, "rate": 1.0, "seed": 0} | given
    with pytest.raises(ConfigError, match=words):
        generate_jobs(**wanted)


def test_a_csv_trace(tmp_path):
    text = "job_id,submit,gpus,duration\na,100,1,40\nb,130.5,6,1\n\nc,90,8,9.2\n"
    jobs = read_csv_jobs(write(tmp_path, text), ASSUMED)
    assert found(jobs) == [
        ("a", 10.0, 1, 1, 20),
        ("b", 40.5, 3, 2, 1),
        ("c", 0.0, 4, 2, 5),
    ]
    assert (jobs[0].forward, jobs[0].backward, jobs[0].bytes) == (0.5, 1.5, 5.0)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("job_id,submit,gpus,duration\na,1,1,4\nb,x,1,4\n", 3, "'x'"),
        ("job_id,submit,gpus,duration\na,1,0,4\n", 2, "gpus=0"),
        ("job_id,submit,gpus,duration\na,1,1\n", 2, "not enough values"),
        ("job_id,submit,gpus,duration\na,1,1,nan\n", 2, "duration=nan"),
        ("job,when\n", 1, "columns are"),
        ("", 1, "columns are"),
    ],
)
def test_a_malformed_line_of_a_csv_trace_is_named(tmp_path, text, line, words):
    path = write(tmp_path, text)
    with pytest.raises(DataFormatError, match=f"trace, line {line}: .*{words}"):
        read_csv_jobs(path)


def philly(name, attempts, submitted="2017-10-07 01:00:00"):
    return {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": name,
        "attempts": [
            {
                "start_time": start,
                "end_time": end,
                "detail": [{"ip": "m1", "gpus": ["gpu0"] * gpus}] * 2,
            }
            for start, end, gpus in attempts
        ],
        "submitted_time": submitted,
        "user": "ce2f3c",
    }


DAY = "2017-10-07 "
PHILLY = [
    philly("one", [(DAY + "01:10:00", DAY + "01:11:00", 2)]),
    philly(
        "again",
        [
            (DAY + "02:00:00", DAY + "02:00:30", 1),
            (DAY + "02:01:00", DAY + "02:01:10", 3),
        ],
        DAY + "01:00:07",
    ),
    philly("never", []),
    philly("open", [(DAY + "03:00:00", None, 1)]),
]


def test_the_log_of_philly(tmp_path):
    jobs = read_philly_jobs(write(tmp_path, json.dumps(PHILLY, indent=1)), ASSUMED)
    assert found(jobs) == [("one", 0.0, 4, 1, 30), ("again", 7.0, 2, 1, 20)]


def test_a_log_of_philly_takes_three_times_its_size(tmp_path):
    path = write(tmp_path, json.dumps(PHILLY * 200, indent=1))
    tracemalloc.start()
    assert len(read_philly_jobs(path, ASSUMED)) == 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * path.stat().st_size


def test_a_malformed_entry_of_philly_is_named(tmp_path):
    lines = [json.dumps(each) for each in PHILLY]
    lines[1] = lines[1].replace("submitted_time", "submitted")
    path = write(tmp_path, "[\n" + ",\n".join(lines) + "\n]\n")
    with pytest.raises(DataFormatError, match=r"trace, line 3: .*'submitted_time'"):
        read_philly_jobs(path)


def test_lines_of_an_entry_are_counted_once(tmp_path, monkeypatch):
    looked_at = []

    class Counted(str):
        def count(self, mark, start=0, end=None):
            found = super().count(mark, start, end)
            looked_at.append(len(self[start:end]))
            return found

    text = json.dumps(PHILLY * 50, indent=1)
    path = write(tmp_path, text)
    monkeypatch.setattr(type(path), "read_text", lambda self: Counted(text))
    assert len(read_philly_jobs(path, ASSUMED)) == 100
    assert len(looked_at) == 200
    assert sum(looked_at) <= len(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[\n{"attempts": []},\n{"a" 1}]', 3),
        ('[{"attempts": []}\n', 1),
        ("{}", 1),
        ("", 1),
    ],
)
def test_what_is_no_log_of_philly_is_refused(tmp_path, text, line):
    path = write(tmp_path, text)
    with pytest.raises(DataFormatError, match=f"trace, line {line}"):
        read_philly_jobs(path)


PAI = """\
a,tensorflow,2.0,Terminated,100.0,140.0,600.0,29.3,50.0,MISC
a,worker,1.0,Terminated,104.0,150.0,600.0,29.3,100.0,V100
b,worker,3.0,Terminated,90.0,110.0,600.0,29.3,25.0,T4
c,evaluator,1.0,Terminated,90.0,110.0,600.0,29.3,,CPU
d,worker,1.0,Running,95.0,,600.0,29.3,100.0,P100
"""


def test_the_tasks_of_pai(tmp_path):
    jobs = read_pai_jobs(write(tmp_path, PAI), ASSUMED)
    assert found(jobs) == [("a", 10.0, 2, 1, 25), ("b", 0.0, 1, 1, 10)]


def test_a_malformed_line_of_pai_is_named(tmp_path):
    path = write(tmp_path, PAI.replace("104.0", "a while"))
    with pytest.raises(DataFormatError, match=r"trace, line 2: .*'a while'"):
        read_pai_jobs(path)


def test_iterations_of_no_time_are_refused(tmp_path):
    path = write(tmp_path, "job_id,submit,gpus,duration\na,1,1,4\n")
    with pytest.raises(ConfigError, match="seconds must be finite and > 0"):
        read_csv_jobs(path, ASSUMED._replace(seconds=0.0))


def test_a_trace_without_jobs_is_refused(tmp_path):
    path = write(tmp_path, PAI.splitlines()[3])
    with pytest.raises(DataFormatError, match="no job that ran on GPUs"):
        read_pai_jobs(path)
