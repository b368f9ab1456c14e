"""Rows in files: what numpy would hold; after a crash the last flush, no mixture."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hpcjax import data, graphs
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing

ROWS, PART = 37, 5  # the last partition has two rows


def build(path, dtype="f4", rows=ROWS, width=3, part=PART):
    start = np.arange(rows * width).reshape(rows, width).astype(dtype)
    return data.RowFile.build(path, [start], start.shape, dtype, part), start


@pytest.fixture
def quick(monkeypatch):
    """Does not wait for the disk, of which no power fails here."""
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.acceptance("marius", 6)
def test_ten_thousand_operations_leave_what_numpy_holds(quick, tmp_path):
    file, held = build(tmp_path / "rows")
    rng, flushed = np.random.default_rng(0), held.copy()
    for number in range(600):  # of about 9 partitions each way
        ids = rng.integers(ROWS, size=rng.integers(40))  # some of them twice
        if number % 3 == 0:
            first = PART * rng.integers(8)
            ids = np.arange(first, min(first + PART, ROWS))
        values = rng.integers(1000, size=(len(ids), 3)).astype("f4")
        file[ids], held[ids] = values, values
        other = rng.integers(ROWS, size=20)
        assert file[other].tobytes() == held[other].tobytes()
        if number % 60 == 59:
            file.flush()
            flushed = held.copy()
        elif number % 60 == 30:
            with data.RowFile(file.path) as seen:
                np.testing.assert_array_equal(np.asarray(seen), flushed)
    np.testing.assert_array_equal(np.asarray(file), held)
    with data.RowFile(file.path) as again:
        np.testing.assert_array_equal(again[:], held)
        assert again.sequence == file.sequence == 12
        assert again.bytes_read == held.nbytes


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.acceptance("marius", 6)
def test_a_write_that_is_cut_short_leaves_the_last_flush(quick, monkeypatch, tmp_path):
    """After any number of bytes, of a partition or of a state."""
    whole, left, rng = os.pwrite, 0, np.random.default_rng(1)

    def write(file, taken, place):
        nonlocal left
        count = whole(file, taken[: max(left, 0)], place) if left > 0 else 0
        left -= len(taken)
        if left < 0:
            raise Killed
        return count

    def write_on(states):
        while True:
            for _ in range(3):
                part = PART * rng.integers(8) + np.arange(PART)
                ids = part[part < ROWS]
                held[ids] += 1
                file[ids] = held[ids]
            states[file.sequence + 1] = held.copy()
            file.flush()

    file, held = build(tmp_path / "rows")
    ends = set()
    for budget in [*range(0, 700, 23), *range(700, 2000, 97)]:
        before, states, left = held.copy(), {file.sequence: held.copy()}, budget
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", write)
            with pytest.raises(Killed):
                write_on(states)
        file.close()
        file = data.RowFile(file.path)
        np.testing.assert_array_equal(np.asarray(file), states[file.sequence])
        ends.add(np.array_equal(file[:], before))
        held = np.asarray(file)
    assert ends == {True, False}


def steps(file=None, last=None):
    """Yields what is held after each flush; of a file the same is written."""
    rng, held, sequence = np.random.default_rng(3), np.zeros((64, 4096)), 2
    while sequence != last:
        for _ in range(6):
            part = rng.integers(8)
            held[8 * part : 8 * part + 8] += 1 + rng.integers(5)
            if file is not None:
                file[8 * part + np.arange(8)] = held[8 * part : 8 * part + 8]
        sequence += 1
        if file is not None:
            file.flush()
        yield held


def kill_twenty(folder):
    """Forks writers, of a process without threads, and looks at their files."""
    for number in range(20):
        path, (opened, ready) = folder / f"{number}", os.pipe()
        data.RowFile.build(path, [np.zeros((64, 4096))], (64, 4096), "f8", 8).close()
        child = os.fork()
        if not child:
            file = data.RowFile(path)
            os.write(ready, b"1")
            for _ in steps(file):
                pass
        os.read(opened, 1)
        time.sleep(0.05 + 0.013 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with data.RowFile(path) as file:
            found = [np.zeros((64, 4096)), *map(np.copy, steps(last=file.sequence))]
            np.testing.assert_array_equal(np.asarray(file), found[-1])
            print(file.sequence)


@pytest.mark.slow
@pytest.mark.acceptance("marius", 6)
def test_twenty_kills_leave_a_state_that_was_flushed(tmp_path):
    call = (
        "from tests.data.test_row_file import *; kill_twenty(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", call, str(tmp_path)]
    folder = pathlib.Path(__file__).parents[2]
    told = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True)
    assert len({*told.stdout.split()}) > 1  # some have flushed, others not yet
    assert len(told.stdout.split()) == 20


def test_files_that_belong_together_are_opened_at_a_state_that_all_have(tmp_path):
    (one, held), (two, _) = build(tmp_path / "1"), build(tmp_path / "2")
    for file in (one, two):
        file[[0]] = held[:1] + 1
        file.flush()
    one[[0]] = held[:1] + 2
    assert (one.flush(), two.sequence) == (4, 3)  # and then it is killed
    with data.RowFile(one.path, sequence=3) as back:
        np.testing.assert_array_equal(back[[0]], held[:1] + 1)
        back[[0]] = held[:1] + 5  # and is killed: the state 4 must not come back,
    with data.RowFile(one.path) as back:  # which `two` may have reached anew
        assert back.sequence == 3
        np.testing.assert_array_equal(back[:], [*held[:1] + 1, *held[1:]])
        back[[0]] = held[:1] + 5
        assert back.flush() == 4
    with data.RowFile(one.path) as back:
        np.testing.assert_array_equal(back[[0]], held[:1] + 5)
    with pytest.raises(ConfigError, match=r"newest are \[3, 4\]: got sequence=1"):
        data.RowFile(one.path, sequence=1)


def test_an_older_state_that_is_gone_is_refused_and_costs_no_newer_one(tmp_path):
    file, held = build(tmp_path / "rows")
    for _ in range(2):  # the second one takes the place of rows of the state 2
        file[[0]] = held[:1] = held[:1] + 1
        file.flush()
    file[[0]] = held[:1] + 7  # that of the state 3, and then it is killed
    file.close()
    with pytest.raises(DataFormatError, match="expected partition 0 of state 3: found"):
        data.RowFile(file.path, sequence=3)
    with data.RowFile(file.path) as back:
        assert back.sequence == 4
        np.testing.assert_array_equal(back[:], held)


@pytest.mark.parametrize("dtype", ["f4", "i8", "bfloat16"])
def test_rows_come_in_pieces_of_any_size(dtype, tmp_path):
    _, held = build(tmp_path / "rows", dtype)
    cuts = np.split(held, [1, 2, 9, 9, 30])
    with data.RowFile.build(tmp_path / "b", cuts, held.shape, dtype, PART) as file:
        np.testing.assert_array_equal(np.asarray(file), held)
    for bad in (cuts[:-1], [*cuts, held[:1]], [held[:, :2]], [held.astype("f8")]):
        with pytest.raises(ConfigError, match=r"pieces must|rows must be"):
            data.RowFile.build(tmp_path / "c", bad, held.shape, dtype, PART)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "rows"]


@pytest.mark.parametrize("dtype", ["i1", "u1", "u8"])
def test_numbers_of_rows_are_of_any_width(dtype, tmp_path):
    file, held = build(tmp_path / "rows", rows=700, part=300)
    for ids in (np.array([3, 0, 120], dtype), np.array([], dtype)):
        np.testing.assert_array_equal(file[ids], held[ids])


def test_what_is_no_row_or_no_file_is_told(tmp_path):
    file, _ = build(tmp_path / "rows")
    for ids in ([-1], [ROWS], [0.5], [[0]], [True]):
        with pytest.raises(ConfigError, match="must be a list of numbers from 0 to 36"):
            file[ids]
    with pytest.raises(ConfigError, match="rows must be float32"):
        file[[0]] = np.zeros((1, 3))
    file.close()
    with pytest.raises(ValueError, match="rows is closed"):
        file[[0]]
    size = file.path.stat().st_size
    os.truncate(file.path, size - 1)
    with pytest.raises(DataFormatError, match=f"expected {size} .*found {size - 1} by"):
        data.RowFile(file.path)
    with pytest.raises(DataMissing, match="no such file"):
        data.RowFile(tmp_path / "none")
    for other in ("{}", '{"format": "hpcjax rows 1"}'):
        (tmp_path / "other").write_text(other)
        with pytest.raises(DataFormatError, match="expected a file of rows"):
            data.RowFile(tmp_path / "other")


def test_a_file_that_is_only_read_is_opened_for_reading(monkeypatch, tmp_path):
    """Of a root that is read-only."""
    (file, held), opened = build(tmp_path / "rows"), os.open

    def read_only(path, flags, *mode):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with data.RowFile(file.path, writable=False) as seen:
        np.testing.assert_array_equal(seen[:], held)
        for write in (seen.flush, lambda: seen.__setitem__([0], held[:1])):
            with pytest.raises(ValueError, match="rows was opened for reading only"):
                write()
    with pytest.raises(AssertionError):
        data.RowFile(file.path)


def test_other_bytes_are_no_rows(tmp_path):
    file, held = build(tmp_path / "rows")
    content = bytearray(file.path.read_bytes())
    place = content.rindex(held[35:].tobytes())
    content[place + 1] ^= 1
    file.path.write_bytes(content)
    with data.RowFile(file.path) as damaged:
        np.testing.assert_array_equal(damaged[[0, 34]], held[[0, 34]])
        with pytest.raises(DataFormatError, match="expected partition 7 of state 2"):
            damaged[[35]]
    content[2 * 4096 + 8] ^= 1  # the older state
    file.path.write_bytes(content)
    assert data.RowFile(file.path).sequence == 2
    content[4096 + 8] ^= 1
    file.path.write_bytes(content)
    with pytest.raises(DataFormatError, match="expected a whole state"):
        data.RowFile(file.path)


def counted():
    told = pathlib.Path("/proc/self/io").read_text().split()
    return np.array([int(told[1]), int(told[3])])


@pytest.mark.acceptance("marius", 7)
@pytest.mark.parametrize("policy", ["beta", "comet"])
def test_an_epoch_reads_and_writes_the_bytes_of_its_swaps(policy, tmp_path):
    """As the kernel counts them, too; the last partition is shorter."""
    rng, part, rows = np.random.default_rng(2), 40, 16 * 40 - 13
    make = {"beta": (16, 4), "comet": (16, 8, 4)}[policy]
    order = getattr(graphs, policy)(*make, rng)
    file, _ = build(tmp_path / "rows", rows=rows, width=256, part=part)
    store = data.RowStore({"table": file})
    states = np.repeat(order.states, 2, axis=0)
    batches = [state[:1] * part for state in states]
    before = counted()
    for move in data.partition_moves(states, batches, rows, part):
        for start in range(0, len(move.evict), part):
            ids = move.evict[start : start + part]
            store.write(ids, {"table": np.zeros((len(ids), 256), "f4")})
        for start in range(0, len(move.fetch), part):
            store.read(move.fetch[start : start + part])
    sets = [set(), *map(set, order.states.tolist())]
    fetched = [p for old, new in itertools.pairwise(sets) for p in new - old]
    assert len(fetched) == order.states.shape[1] + graphs.count_swaps(order.states)
    wanted = 1024 * sum(min(part, rows - p * part) for p in fetched)
    assert (store.bytes_read, store.bytes_written) == (wanted, wanted)
    assert (file.bytes_read, file.bytes_written) == (wanted, wanted)
    np.testing.assert_allclose(counted() - before, wanted, rtol=0.02)
