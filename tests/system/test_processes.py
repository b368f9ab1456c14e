"""Data parallelism over two real processes equals the same on one."""

import json
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(__file__).with_name("train_process.py")

pytestmark = pytest.mark.processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_in(count: int, file: pathlib.Path, status: int = 0) -> list[str]:
    """Trains in `count` processes, all of which must end with `status`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(i), str(count), str(port), str(file)],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    ended = [process.returncode for process in processes]
    assert ended == [status] * count, "\n".join(outputs)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "sparse", "values"])
def test_two_processes_train_like_one(tmp_path, kind):
    files = [tmp_path / count / f"{kind}.json" for count in ("one", "two")]
    for count, file in enumerate(files, 1):
        train_in(count, file)
    one, two = (json.loads(file.read_text()) for file in files)
    for path, values in one["params"].items():
        np.testing.assert_allclose(two["params"][path], values, atol=1e-6)
    assert [r["step"] for r in one["records"]] == [r["step"] for r in two["records"]]
    for left, right in zip(one["records"], two["records"], strict=True):
        for name, value in left.items():
            assert right[name] == pytest.approx(value, rel=1e-6, abs=1e-5), (
                left["step"],
                name,
            )


@pytest.mark.slow
def test_processes_stop_after_the_same_step(tmp_path):
    """One of the two is told to; if it stopped alone, the other would wait for ever."""
    outputs = train_in(2, tmp_path / "stopped.json", status=75)
    said = {text.splitlines()[-1] for text in outputs}
    (line,) = said
    step = re.fullmatch(r"SIGTERM: stopped after step (\d+)", line)
    assert step, line
    assert 5 <= int(step[1]) <= 8
    saved = tmp_path / "stopped-checkpoints" / step[1] / "MANIFEST.json"
    assert saved.exists()
