"""Commands as processes: exit status, streams, and what they do not import."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.runs import roots
from tests.system.killing import MAIN

pytestmark = pytest.mark.processes

REPOSITORY = pathlib.Path(__file__).parents[2]
WATCHED = """
import sys
from hpcjax.runs.cli import main
code = main()
heavy = {"jax", "flax", "optax", "orbax", "pandas", "xarray"} & set(sys.modules)
print("imported:", *sorted(heavy), file=sys.stderr)
sys.exit(code)
"""
SLOW = """
import time

def run(cfg, ctx):
    print("started", flush=True)
    time.sleep(60)
"""


def command(*args, cwd=REPOSITORY, code=MAIN, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.quick(
    "args1-0-hammingmesh",
    "args5-2-train.steps must be int",
    "args8-2-unknown table",
)
@pytest.mark.parametrize(
    ("args", "status", "part"),
    [
        (["--help"], 0, "75 preempted"),
        (["list"], 0, "hammingmesh"),
        (["list", "jorge"], 0, "jorge/digits:"),
        (["show", "jorge/digits:sgd"], 0, "optimizer.momentum"),
        (["run", "jorge/digits", "optimizer.learning_rat=1"], 2, "unknown key"),
        (["run", "jorge/digits", "train.steps=many"], 2, "train.steps must be int"),
        (["run", "jorge/digits", "--dry-run", "sead=1"], 2, "did you mean 'seed'"),
        (["run", "jorge/digit"], 2, "did you mean 'jorge/digits'"),
        (["table", "jorge/nothing"], 2, "unknown table"),
        (["data", "list"], 0, "digits"),
    ],
)
def test_what_needs_neither_jax_nor_xarray_does_not_import_them(args, status, part):
    code, out, err = finish(command(*args, code=WATCHED))
    assert code == status, err
    assert part in out + err
    assert err.endswith("imported:\n")
    assert "Traceback" not in err


@pytest.mark.quick("ascii")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_piped_output_is_plain_text_in_whole_lines(encoding):
    process = command("list", PYTHONIOENCODING=f"{encoding}:backslashreplace")
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    line = next(line for line in out.splitlines() if line.startswith("jorge "))
    assert line.split()[-1] == "min"


@pytest.mark.quick("args1")
@pytest.mark.parametrize("args", [["list"], ["run", "--help"], ["--version"]])
def test_a_reader_that_leaves_is_no_traceback(args):
    process = command(*args)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.quick("flags0")
@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_platform_that_does_not_start_is_told(tmp_path, flags):
    options = ["--root", str(tmp_path), *flags]
    process = command("run", "train/digits", *options, JAX_PLATFORMS="foo")
    code, _, err = finish(process)
    assert code == 2
    assert err.startswith("error: JAX cannot start JAX_PLATFORMS='foo': ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_in_an_empty_folder(tmp_path):
    roots.make(tmp_path)
    text = (tmp_path / "experiments/mine/experiment.py").read_text()
    (tmp_path / "experiments/mine/experiment.py").write_text(
        text[: text.index("def run")]
        + "def run(cfg, ctx):\n"
        + "    from hpcjax import runs\n"
        + "    devices = ctx.mesh.devices.size\n"
        + "    return runs.measured({'devices': devices})\n"
    )
    process = command("run", "mine/first", "--devices", "3", cwd=tmp_path, XLA_FLAGS="")
    code, out, err = finish(process)
    assert code == 0, err
    (folder,) = (tmp_path / "runs").glob("*/")
    assert folder.name in out
    import xarray as xr

    assert xr.load_dataset(folder / "result.nc", engine="h5netcdf").devices == 3
    assert (folder / "status").read_text() == "done\n"
    assert not (folder / "lock").exists()
    code, out, err = finish(command("list", cwd=tmp_path))
    assert "mine/first:second" in out
    assert "jorge/digits:" in out


def test_ctrl_c_leaves_a_consistent_directory(tmp_path):
    roots.make(tmp_path)
    path = tmp_path / "experiments/mine/experiment.py"
    text = path.read_text()
    path.write_text(text[: text.index("def run")] + SLOW)
    process = command("run", "mine/first", cwd=tmp_path)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert err.splitlines()[-1].startswith("error: interrupted")
    (folder,) = (tmp_path / "runs").glob("*/")
    assert (folder / "status").read_text() == "preempted\n"
    assert not (folder / "lock").exists()


@pytest.mark.faults(17)
def test_two_processes_on_one_run(tmp_path):
    roots.make(tmp_path)
    path = tmp_path / "experiments/mine/experiment.py"
    text = path.read_text()
    path.write_text(text[: text.index("def run")] + SLOW)
    first = command("run", "mine/first", cwd=tmp_path)
    try:
        assert first.stdout.readline() == "started\n"
        (folder,) = (tmp_path / "runs").glob("*/")
        second = command("run", "mine/first", "--resume", folder.name, cwd=tmp_path)
        code, _, err = finish(second)
        assert code == 2
        assert f"is held by process {first.pid} on " in err
    finally:
        first.kill()
        first.communicate()
    assert (folder / "status").read_text() == "running\n"


def test_an_installation_in_an_empty_folder(tmp_path):
    """Laid out as the wheel lays it out: no checkout beside the package."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "hpcjax", site / "hpcjax", ignore=ignored)
    for package in ("configs", "experiments"):
        bundled = site / "hpcjax/_bundled" / package
        shutil.copytree(REPOSITORY / package, bundled, ignore=ignored)
    empty.mkdir()
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{MAIN}"
    listed = command("list", "jorge", cwd=empty, code=code, PYTHONPATH="")
    code, out, err = finish(listed)
    assert code == 0, err
    assert "jorge/digits:" in out
    assert "\njorge/quickstart" in out
    assert not list(empty.iterdir())


@pytest.mark.slow
def test_doctor():
    code, out, err = finish(command("doctor"))
    assert code == 0, out + err
    assert "jaxlib" in out
