"""What may go wrong around a run: another machine, a full disk, no network, no end."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import psutil
import pytest

from hpcjax import sharding, train
from hpcjax.core import trees
from tests.system import killing
from tests.train import test_step, tiny

pytestmark = [pytest.mark.processes]

SMALL = {
    "train.steps": "24",
    "train.batch_size": "16",
    "model.width": "2",
    "train.eval_every": "6",
}


def pairs(**changes):
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in {**SMALL, **named}.items()]


def fit(folder, task, steps, devices):
    config = train.TrainConfig(steps=steps, batch_size=16, eval_every=100)
    records = tiny.Records()
    with train.Checkpoints(folder) as checkpoints:
        state = train.fit(
            task,
            config,
            seed=0,
            mesh=sharding.data_mesh(devices),
            recorder=records,
            checkpoints=checkpoints,
        )
    return state, {r["step"]: r["loss"] for r in records if "loss" in r}


def jitter(batch, rng, _):
    """Draws by the place of an example in the whole order, whoever draws."""
    return {**batch, "x": batch["x"] + rng.random((len(batch["x"]), 4)).astype("f4")}


@pytest.mark.faults(4)
def test_a_run_moves_between_device_counts(tmp_path):
    task = tiny.task(optax.adam(0.05), augment=jitter)
    _, undisturbed = fit(tmp_path / "whole", task, 15, 8)
    losses = {}
    for steps, devices in ((5, 8), (10, 4), (15, 8)):
        _, found = fit(tmp_path / "moved", task, steps, devices)
        losses |= found
    assert sorted(losses) == list(range(1, 16))
    for step, loss in undisturbed.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.faults(4)
def test_residuals_keep_their_mean_between_device_counts(tmp_path):
    task = test_step.sparse_task()
    state, _ = fit(tmp_path, task, 5, 8)
    for devices, steps in ((8, 5), (4, 12), (8, 20)):
        before = trees.flatten(jax.device_get(state.opt_state[0].value))
        mesh = sharding.data_mesh(devices)
        with train.Checkpoints(tmp_path) as checkpoints:
            moved = checkpoints.restore(train.state_shapes(task, mesh), mesh=mesh)
        after = trees.flatten(jax.device_get(moved.state.opt_state[0].value))
        for path, leaf in after.items():
            assert len(leaf) == devices
            np.testing.assert_allclose(leaf.mean(0), before[path].mean(0), atol=1e-6)
            assert np.abs(leaf).max() > 0
        state, losses = fit(tmp_path, task, steps, devices)
        assert np.isfinite(list(losses.values())).all()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of six megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def run(root, *args, **environment):
    return subprocess.run(
        [sys.executable, "-c", killing.MAIN, "run", "jorge/digits:sgd", *args],
        capture_output=True,
        text=True,
        timeout=killing.PATIENCE,
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": str(killing.REPOSITORY),
            **environment,
        },
        check=False,
    )


@pytest.mark.slow
@pytest.mark.faults(18)
def test_a_full_disk_stops_the_run_with_everything_readable(small_disk):
    """Room for some checkpoints: the run ends at one that does not fit."""
    wide = pairs(model__width=16, train__checkpoint_every=2, train__keep=20)
    done = run(small_disk, *wide)
    assert done.returncode == 6, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no space left to write ")
    assert "bytes free" in last
    assert "Traceback" not in done.stderr
    folder = killing.run_folder(small_disk)
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    records = killing.metrics(small_disk)
    assert any(r["step"] == 1 and "loss" in r for r in records)
    complete = killing.checkpoints(small_disk)
    assert complete
    grow = ["mount", "-o", "remount,size=200m", str(small_disk)]
    subprocess.run(grow, check=True)
    again = run(small_disk, *wide, "--resume", folder.name)
    assert again.returncode == 0, again.stderr
    steps = [r["step"] for r in killing.metrics(small_disk) if "loss" in r]
    assert steps == list(range(1, 25))


@pytest.mark.slow
@pytest.mark.faults(18)
def test_a_disk_that_is_full_of_others_data(small_disk):
    """Not even a record fits: what was written before stays whole."""
    with (small_disk / "filler").open("wb") as file:
        room = shutil.disk_usage(small_disk).free
        file.write(bytes(room - 16384))
    done = run(small_disk, *pairs(train__steps=400))
    assert done.returncode == 6, done.stderr
    assert "bytes free" in done.stderr.splitlines()[-1]
    for path in small_disk.glob("runs/*/*.json"):
        json.loads(path.read_text())
    for path in small_disk.glob("runs/*/metrics.jsonl"):
        lines = path.read_text().split("\n")
        assert all(json.loads(line)["step"] >= 0 for line in lines[:-1])


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1))
from hpcjax.runs.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.faults(18)
@pytest.mark.parametrize(
    ("limit", "file"), [("1500", "metrics.jsonl"), ("12000", "checkpoints/24")]
)
def test_a_limit_on_the_size_of_files_is_a_line(tmp_path, limit, file):
    """As `ulimit -f` sets it: the system's own error, and TensorStore's."""
    options = ["model=mlp", "train.steps=24", "train.batch_size=16", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, limit, "run", "train/digits", *options],
        capture_output=True,
        text=True,
        timeout=killing.PATIENCE,
        cwd=tmp_path,
        env=killing.environment(),
        check=False,
    )
    assert done.returncode == 6, done.stderr
    lines = done.stderr.splitlines()
    told = [line for line in lines if "programs are not kept" not in line]
    assert len(told) == 1, told
    (line,) = told
    assert line.startswith("error: ")
    assert f"{file} cannot be written: no file may have more than {limit}" in line
    killing.run_folder(tmp_path)


@pytest.mark.slow
@pytest.mark.faults(23)
def test_a_run_needs_no_network_and_writes_below_its_root(tmp_path):
    home, root = tmp_path / "home", tmp_path / "root"
    home.mkdir()
    root.mkdir()
    probe = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("cannot take the network away: unshare is not allowed")
    command = [
        sys.executable,
        "-c",
        killing.MAIN,
        "run",
        "jorge/digits:jorge",
        *pairs(),
    ]
    done = subprocess.run(
        ["unshare", "-n", *command],
        capture_output=True,
        text=True,
        timeout=killing.PATIENCE,
        cwd=root,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(killing.REPOSITORY),
            "HOME": str(home),
            "TMPDIR": str(home),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Nothing but the programs that were compiled.
    assert {path.name for path in home.iterdir()} <= {".cache"}
    assert {path.name for path in home.glob(".cache/*")} <= {"hpcjax"}
    assert {path.name for path in root.iterdir()} == {"runs"}


@pytest.mark.slow
@pytest.mark.faults(29)
def test_memory_does_not_grow_with_the_steps():
    def train_for(steps):
        config = train.TrainConfig(steps=steps, batch_size=16, eval_every=100)
        arguments = {"seed": 0, "mesh": sharding.data_mesh(8)}
        train.fit(tiny.task(), config, recorder=Forgetful(), **arguments)
        return psutil.Process().memory_info().rss

    class Forgetful(tiny.Records):
        def write(self, record):
            pass

    train_for(200)
    live = len(jax.live_arrays())
    before = train_for(10)
    after = train_for(1000)
    assert after < 1.05 * before
    assert len(jax.live_arrays()) <= live
