"""Combinations of parts in two processes, which share a program or do not."""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from hpcjax.core import Diverged
from hpcjax.core.errors import CheckpointCorrupt
from hpcjax.hostcomm import load_trace
from hpcjax.runs import directory, execute, launch
from hpcjax.runs._verify import exit_status, verify
from tests.system import killing

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SMALL = {"train.steps": "3", "train.batch_size": "16", "model.widths": "[8]"}
COMBINED = [
    {"optimizer": "kfac", "exchange": "ok_topk", "exchange.density": "0.3"},
    {"optimizer": "jorge", "averaging": "wagma", "averaging.tau": "2"},
    {"optimizer": "adamw", "backward": "partial", "backward.k": "2"},
]


@pytest.mark.parametrize("parts", COMBINED, ids=lambda parts: "-".join(parts.values()))
def test_two_processes_compute_what_two_devices_do(parts, tmp_path, monkeypatch):
    given = SMALL | parts
    # A program from the cache has lost the order of its collectives, which on CPUs
    # pairs them: nothing is read or kept.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    apart = launch.launch("train/digits", given, processes=2, root=tmp_path, quiet=True)
    assert not list(tmp_path.glob("programs/*"))
    alone = execute.run("train/digits", given, devices=2, root=tmp_path, quiet=True)
    for name in ("loss", "val_loss", "val_error"):
        ours, theirs = (run.dataset[name].values for run in (apart, alone))
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)


# Workers that are processes: they sleep now and then, and nobody waits for them.
APART = {
    "averaging": "wagma",
    "averaging.between": "processes",
    "averaging.workers": "2",
    "averaging.late": "late",
    "averaging.late.base": "0.02",
    "averaging.late.delay": "0.05",
    "train.eval_every": "20",
    "train.checkpoint_every": "20",
}


def test_workers_that_do_not_wait_are_stopped_and_go_on(tmp_path):
    given = {**APART, "train.steps": "2000"}
    keys = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "-m", "hpcjax", "run", "train/digits", *keys]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        saved, limit = "checkpoints/20/MANIFEST.json", time.monotonic() + 120
        while process.poll() is None and time.monotonic() < limit:
            both = [*tmp_path.glob(f"runs/*/{saved}")]
            if len([*both, *tmp_path.glob(f"runs/*/workers/1/{saved}")]) == 2:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 75, err
    (folder,) = (tmp_path / "runs").glob("2*")
    assert directory.RunDirectory(folder).status == "preempted"
    taken = directory.RunDirectory(folder).steps_taken()
    assert taken >= 20
    steps = {"train.steps": str(taken + 20)}
    made = execute.run(
        "train/digits",
        {**APART, **steps},
        root=tmp_path,
        resume=folder.name,
        quiet=True,
    )
    history = made.dataset
    assert history["step"].values.tolist() == list(range(1, taken + 21))
    assert float(history["val_error"][-1]) < 0.5
    assert float(history["staleness_max"]) > 0
    assert history["worker_seconds"].dims == ("worker",)
    for own in (folder, folder / "workers" / "1"):
        trace = load_trace(own / f"trace-{taken}.npz")
        assert (trace.steps, trace.size, trace.first) == (20, 1, taken)
    for name in ("log.txt", "log.1.txt"):
        assert f"continuing from step {taken}" in (folder / name).read_text()
    check_damage_is_found(folder)


def check_damage_is_found(folder):
    found = {
        each.part: each.verdict for each in verify(folder.name, root=folder.parents[1])
    }
    assert "bad" not in found.values()
    assert found["workers/1/metrics.jsonl"] == "ok"
    own = folder / "workers" / "1"
    for path in (max(own.glob("checkpoints/*/d/*")), max(own.glob("trace-*"))):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    found = verify(folder.name, root=folder.parents[1])
    bad = [each.part for each in found if each.verdict == "bad"]
    assert len(bad) == 2
    assert all(part.startswith("workers/1/") for part in bad)
    assert exit_status(found) == CheckpointCorrupt.exit_code


def test_workers_that_diverge_say_so(tmp_path):
    given = {**APART, "optimizer.lr": "1e38", "train.max_skipped": "2"}
    with pytest.raises(Diverged, match="2 consecutive steps"):
        execute.run("train/digits", given, root=tmp_path, quiet=True)
    (run,) = (tmp_path / "runs").glob("2*")
    assert directory.RunDirectory(run).status == "diverged"


# Workers that average after every second step, and so are the same bits each time.
IN_STEP = ["averaging=local_sgd", "averaging.workers=2", "averaging.between=processes"]
IN_STEP += ["averaging.period=2", "train.steps=60", "train.checkpoint_every=5"]
IN_STEP += ["train.eval_every=20", "train.batch_size=32", "model.widths=[8]"]


def start(root, *flags):
    return killing.Command(root, "train/digits", IN_STEP, *flags, "--devices", "1")


@pytest.mark.timeout(900)
@pytest.mark.faults(1)
def test_workers_killed_six_times_go_on_bit_for_bit(tmp_path):
    """In turn the run is killed, and one of its workers, which ends the run."""
    whole, root = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    root.mkdir()
    code, err = start(whole).finish()
    assert code == 0, err
    draw, command = random.Random(0), start(root)
    for number, step in enumerate(sorted(draw.sample(range(1, 50), 6))):
        kill(command, max(step, killing.last_step(root) + 1), draw, child=number % 2)
        command = start(root, "--resume", killing.run_folder(root).name)
    code, err = command.finish()
    assert code == 0, err
    for worker in (".", "workers/1"):
        ended = [killing.run_folder(each) / worker for each in (whole, root)]
        first, second = map(kept_by, ended)
        assert first["records"] == second["records"]
        assert first["leaves"] == second["leaves"]


def kill(command, step, draw, child):
    """Kills a run once a step was recorded, or one of its workers, and waits."""
    parent = psutil.Process(command.process.pid)
    if not child:
        command.stop_after(step, draw.uniform(0, 0.02), signal.SIGKILL)
    else:
        command.stop_after(step, draw.uniform(0, 0.02), 0)
        draw.choice(parent.children()).kill()
    assert command.finish()[0] != 0


def kept_by(folder):
    """Returns a worker's records without times, and its last checkpoint's checksums."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [
        {
            name: value
            for name, value in json.loads(line).items()
            if "seconds" not in name and name != "shapes"
        }
        for line in lines
    ]
    newest = json.loads((folder / "checkpoints/60/MANIFEST.json").read_text())
    return {
        "records": [record for record in records if set(record) != {"step"}],
        "leaves": newest["body"]["leaves"],
    }
