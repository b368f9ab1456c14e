"""A run's records, which survive a kill at any byte, and the lock of its folder."""

import contextlib
import json
import math
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjax.core import files
from hpcjax.core.errors import DataFormatError, DiskFull, RunBusy
from hpcjax.runs import directory, lock
from hpcjax.runs import metrics as records
from tests.runs.example_config import ExampleConfig, SgdConfig

CONFIG = ExampleConfig(optimizer=SgdConfig(lr=0.3))


def test_records_are_written_and_read_back(tmp_path):
    log = records.Metrics(tmp_path / "metrics.jsonl")
    assert log.read() == []
    given_records = [
        {"step": 1, "loss": 0.1, "seconds": 0.5},
        {"step": 2, "loss": math.inf, "low": -math.inf, "note": "text", "flag": True},
        {"step": 3, "loss": np.float32(0.1), "count": np.int64(3), "none": None},
    ]
    for record in given_records:
        log.write(record)
    assert log.read() == given_records
    log.write({"step": 4, "loss": math.nan})
    assert math.isnan(log.read()[-1]["loss"])
    for line in log.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_mark_is_of_records_that_are_safe_on_the_disk(tmp_path, monkeypatch):
    log, synced = records.Metrics(tmp_path / "metrics.jsonl"), []
    log.write({"step": 1})
    log.write({"step": 2})
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle)))
    size = log.mark()["bytes"]
    (file,) = synced
    assert os.path.samestat(file, log.path.stat())
    assert file.st_size == size == log.path.stat().st_size


def test_rewind_keeps_a_step_and_returns_its_seconds(tmp_path):
    log = records.Metrics(tmp_path / "metrics.jsonl")
    assert log.rewind(3) == 0.0
    assert not log.path.exists()
    for step in (1, 2, 3, 4):
        log.write({"step": step, "seconds": step / 4, "loss": 1 / step})
        log.write({"step": step, "seconds": step / 4, "val_loss": step / 3})
    before = log.path.read_text().splitlines()
    assert log.rewind(2) == 0.5
    *kept, last = log.path.read_text().splitlines()
    assert kept == before[:4]
    assert json.loads(last) == {"step": 2, "lost_seconds": 0.5}
    for step in (3, 4):
        log.write({"step": step, "seconds": step / 4, "loss": 1 / step})
    assert [r["step"] for r in log.read()] == [1, 1, 2, 2, 2, 3, 4]
    assert log.rewind(0) == 0.0
    assert log.read() == [{"step": 0, "lost_seconds": 1.5}]  # 0.5 earlier, 1.0 now


@given(st.integers(0, 60), st.booleans())
def test_a_kill_at_any_byte_loses_at_most_the_last_record(cut, rewinds):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "metrics.jsonl"
        log = records.Metrics(path)
        for step in (1, 2, 3):
            log.write({"step": step, "loss": step / 3})
        whole = path.read_bytes()
        os.truncate(path, max(0, len(whole) - cut))
        left = path.read_bytes().count(b"\n")
        again = records.Metrics(path)
        assert [record["step"] for record in again.read()] == [1, 2, 3][:left]
        if rewinds:
            again.rewind(10)
        again.write({"step": 9})
        assert [r["step"] for r in again.read()] == [*[1, 2, 3][:left], 9]


@pytest.mark.parametrize(
    "line", ["{", "[1]", "[" * 100_000, '{"loss": 1}', '{"step": "1"}', ""]
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataFormatError, match="line 2") as caught:
        records.Metrics(path).read()
    assert str(path) in str(caught.value)


@pytest.mark.faults(18)
def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    log = records.Metrics(tmp_path / "metrics.jsonl")
    log.write({"step": 1})
    real = pathlib.Path.open

    def full(self, *args, **kwargs):
        file = real(self, *args, **kwargs)

        class Half:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def write(self, data):
                return file.write(data[: len(data) // 2])

        return Half()

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", full)
        with pytest.raises(DiskFull, match="bytes free") as caught:
            log.write({"step": 2})
    assert caught.value.exit_code == 6
    assert log.read() == [{"step": 1}]
    log.write({"step": 3})
    assert log.read() == [{"step": 1}, {"step": 3}]


# The lock

HOLDER = """
import pathlib, sys
from hpcjax.runs import lock
with lock.hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_second_process_is_told_who_holds_the_run(tmp_path):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    with holder(run.path) as process:
        with pytest.raises(RunBusy) as caught, run.hold_lock():
            pass
        text = str(caught.value)
        assert f"process {process.pid} on {socket.gethostname()} since 20" in text
        assert caught.value.exit_code == 2
        process.communicate("")
    with run.hold_lock():
        assert (run.path / "lock").exists()
    assert not (run.path / "lock").exists()


@pytest.mark.processes
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, caplog):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    with holder(run.path) as process:
        process.kill()
        process.wait()
        with run.hold_lock():
            owner = files.read_json(run.path / "lock")
            assert owner["pid"] == os.getpid()
    assert f"process {process.pid}, which has ended" in caplog.text


def test_one_process_cannot_hold_a_run_twice(tmp_path):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    with run.hold_lock(), pytest.raises(RunBusy), run.hold_lock():
        pass
    with pytest.raises(KeyError), run.hold_lock():
        raise KeyError
    assert not (run.path / "lock").exists()


def test_locks_of_other_hosts_reused_pids_and_torn_files(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    mine = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": "then",
        "started": psutil.Process().create_time(),
    }
    path = folder / "lock"
    path.write_text(json.dumps(mine | {"host": "another"}))
    with pytest.raises(RunBusy, match=r"on another since then; .* wait 120 s"):
        lock.hold(folder).__enter__()
    os.utime(path, (0, 0))  # it has not been touched since: whoever it was is gone
    with lock.hold(folder):
        assert files.read_json(path)["pid"] == os.getpid()
    caplog.clear()
    for torn in (json.dumps(mine | {"started": 1.0}), "", "{", "[]"):
        path.write_text(torn)
        with lock.hold(folder):
            assert files.read_json(path)["pid"] == os.getpid()
    assert len(caplog.records) == 4


def take(folder, results, done):
    try:
        with lock.hold(folder):
            owner = files.read_json(folder / "lock")["pid"]
            results.put(("held", owner == os.getpid()))
            done.wait(60)
    except RunBusy:
        results.put(("busy", True))


@pytest.mark.slow
@pytest.mark.processes
def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    ended = subprocess.Popen(["true"])
    ended.wait()
    owner = {"pid": ended.pid, "host": socket.gethostname()}
    (tmp_path / "lock").write_text(json.dumps(owner))
    results, done = context.Queue(), context.Event()
    workers = [
        context.Process(target=take, args=(tmp_path, results, done)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    outcomes = [results.get(timeout=60) for _ in workers]
    done.set()
    for worker in workers:
        worker.join()
    assert sorted(outcomes) == [("busy", True), ("busy", True), ("held", True)]
