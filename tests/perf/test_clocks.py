"""Clocks on a fake tree: the order of writes, and what brings the old values back."""

import functools
import os
import signal
import subprocess
import sys
import threading

import pytest

from hpcjax import perf
from hpcjax.core import ConfigError, DataFormatError, HpcjaxError, RunBusy
from hpcjax.perf import clocks as module
from tests import guides
from tests.perf import fake_sysfs
from tests.perf.fake_sysfs import GPU, ORIGINAL, POLICY, limits

# Forks at each moment a process that sets clocks, and kills it there.
CHILD = """
import os, pathlib, random, signal, sys
from hpcjax import perf
from hpcjax.perf import clocks
from tests.perf.fake_sysfs import limits

root, moments = pathlib.Path(sys.argv[1]), sys.argv[2:]
honest = clocks._write
for moment in moments:
    process = os.fork()
    if not process:
        left = [int(moment)]
        def write(path, value):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            honest(path, value)
        clocks._write = write
        with perf.Sysfs(root / "journal", allow_write=True, root=root) as held:
            for cpu, gpu in ((800, 100), (1600, 900), (1200, 1300), (2000, 500)) * 3:
                held.set(policy0=cpu, gpu=gpu)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    left = limits(root)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (root / "journal").exists()
    with perf.Sysfs(root / "journal", allow_write=False, root=root):
        print(left, limits(root), (root / "journal").exists())
"""


@pytest.fixture
def root(tmp_path):
    return fake_sysfs.make(tmp_path)


def opened(root, **options):
    options = {"allow_write": True, **options}
    return perf.Sysfs(root / "journal", root=root, **options)


def test_the_guide_sets_clocks_and_gives_them_back(root, monkeypatch):
    sysfs = functools.partial(perf.Sysfs, root=root)
    monkeypatch.setattr(perf, "Sysfs", sysfs)
    (root / POLICY / "scaling_cur_freq").write_text("800\n")
    (block,) = guides.blocks("search.md", "Energy and clocks")
    names = {"perf": perf, "journal": root / "journal"}
    guides.run_block(block, "search.md", names)
    assert names["clocks"].grids()["policy0"][0] == 800
    assert limits(root) == ORIGINAL


def test_grids_are_those_of_the_kernel(root):
    grids = opened(root).grids()
    assert grids == {"policy0": (800, 1200, 1600, 2000), "gpu": (100, 500, 900, 1300)}
    listed = root / POLICY / "scaling_available_frequencies"
    listed.write_text("1600 800 1600\n")
    assert opened(root).grids()["policy0"] == (800, 1600)
    listed.write_text("\n")
    assert opened(root).grids()["policy0"] == (800, 2000)
    listed.unlink()
    assert opened(root).grids()["policy0"] == (800, 2000)
    listed.write_text("fast")
    with pytest.raises(ConfigError, match=r"must list clocks: .*'fast'"):
        opened(root)


@pytest.mark.acceptance("polythrottle", 6)
def test_the_least_is_never_above_the_greatest(root, monkeypatch):
    seen, honest = [], module._write

    def write(path, value):
        honest(path, value)
        seen.append(limits(root))

    monkeypatch.setattr(module, "_write", write)
    for last in (100, 1300, 900):
        with opened(root) as clocks:
            for value in (1300, 100, 900, 500, 1300, last):
                clocks.set(gpu=value)
                assert limits(root) == [(800, 2000), (value, value)]
        assert limits(root) == ORIGINAL
    assert all(low <= high for pairs in seen for low, high in pairs)
    assert len(seen) == 3 * 14


def stop(root, how):
    """Sets clocks, then raises an error or sends itself a signal."""
    with opened(root) as clocks:
        clocks.set(policy0=1200, gpu=500)
        if isinstance(how, type):
            raise how
        os.kill(os.getpid(), how)


@pytest.mark.acceptance("polythrottle", 6)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_restores(root, error):
    with pytest.raises(error):
        stop(root, error)
    assert limits(root) == ORIGINAL
    assert not (root / "journal").exists()


@pytest.mark.acceptance("polythrottle", 6)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_restores(root, number):
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            stop(root, number)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert limits(root) == ORIGINAL


def check_kills(root, moments):
    command = [sys.executable, "-c", CHILD, str(root), *map(str, moments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = output.splitlines()
    assert len(lines) == len(moments)
    assert all(line.endswith(f"{ORIGINAL} False") for line in lines)
    # Most moments are such that there is something to restore.
    assert sum(not line.startswith(str(ORIGINAL)) for line in lines) >= len(lines) // 2


@pytest.mark.acceptance("polythrottle", 6)
def test_the_next_start_restores_after_a_kill(root):
    check_kills(root, [0, 1, 2, 5, 11])


@pytest.mark.slow
@pytest.mark.acceptance("polythrottle", 6)
def test_the_next_start_restores_after_twenty_kills(root):
    check_kills(root, range(0, 40, 2))


@pytest.mark.acceptance("polythrottle", 6)
def test_one_file_that_fails_leaves_the_others_restored(root, monkeypatch):
    honest, broken = module._write, root / POLICY / "scaling_max_freq"

    def write(path, value):
        if path == broken and value == 2000:
            raise ConfigError(f"{path} cannot be set to {value}: broken")
        honest(path, value)

    monkeypatch.setattr(module, "_write", write)
    with (
        pytest.raises(HpcjaxError, match=r"scaling_max_freq .*it had 800 to 2000"),
        opened(root) as clocks,
    ):
        clocks.set(policy0=1200, gpu=500)
    assert limits(root) == [(800, 1200), (100, 1300)]
    monkeypatch.undo()
    assert perf.restore_clocks(root / "journal")
    assert limits(root) == ORIGINAL
    assert not perf.restore_clocks(root / "journal")


def test_what_was_not_changed_is_not_written(root, monkeypatch):
    """Who may set the GPU's clocks alone gives these back, and needs no other right."""
    honest = module._write

    def write(path, value):
        if "policy0" in str(path):
            raise ConfigError(f"{path} cannot be set to {value}: it needs root")
        honest(path, value)

    monkeypatch.setattr(module, "_write", write)
    with opened(root) as clocks:
        clocks.set(gpu=500)
        assert limits(root) == [(800, 2000), (500, 500)]
    assert limits(root) == ORIGINAL
    assert not (root / "journal").exists()


@pytest.mark.parametrize("text", ['{"a": 1}', "[[1, 2]]", "7"])
def test_a_file_that_is_no_journal_is_told(tmp_path, text):
    (tmp_path / "journal").write_text(text)
    with pytest.raises(DataFormatError, match="journal"):
        perf.restore_clocks(tmp_path / "journal")


def test_nothing_is_written_unless_it_is_asked_for(root):
    with (
        pytest.raises(ConfigError, match="only with allow_write=true"),
        opened(root, allow_write=False) as clocks,
    ):
        clocks.set(gpu=500)
    with pytest.raises(ConfigError, match="inside of a `with`"):
        opened(root).set(gpu=500)
    assert limits(root) == ORIGINAL
    assert not (root / "journal").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu": 600}, "gpu=600 is not on the grid: the nearest are 500 and 900"),
        ({"gqu": 500}, "no knob 'gqu'; did you mean 'gpu'"),
    ],
)
def test_what_cannot_be_set(root, values, message):
    with pytest.raises(ConfigError, match=message), opened(root) as clocks:
        clocks.set(**values)
    assert limits(root) == ORIGINAL


def test_a_file_that_cannot_be_written_is_named(root):
    path = root / GPU / "min_freq"
    with opened(root) as clocks:
        clocks._keep()
        honest = path.read_text()
        path.unlink()
        path.mkdir()
        with pytest.raises(ConfigError, match=r"min_freq cannot be .*"):
            clocks.set(gpu=500)
        path.rmdir()
        path.write_text(honest)


def test_two_do_not_set_clocks_at_once(root):
    with opened(root), pytest.raises(RunBusy, match="clocks are in use"):
        opened(root).__enter__()
    with opened(root):
        pass


def test_a_clock_that_is_not_reached_is_told(root):
    with opened(root) as clocks:
        clocks.set(gpu=500)
        with pytest.raises(HpcjaxError, match="cur_freq is 1300, not 500"):
            clocks.settle(timeout=0.05)
        obey = threading.Timer(0.1, (root / GPU / "cur_freq").write_text, ["600"])
        obey.start()
        clocks.settle(timeout=5.0)
        obey.join()


def test_a_clock_that_others_have_fixed_off_the_grid_is_reached(root):
    for name in ("scaling_min_freq", "scaling_max_freq", "scaling_cur_freq"):
        (root / POLICY / name).write_text("1900")
    (root / GPU / "cur_freq").write_text("500")
    with opened(root) as clocks:
        clocks.set(gpu=500)
        clocks.settle()


def test_without_knobs(tmp_path):
    with pytest.raises(ConfigError, match="no clock to set"):
        perf.Sysfs(tmp_path / "journal", allow_write=False, root=tmp_path)
