"""Data parallelism over two real processes equals the same on one."""

import json
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(__file__).with_name("train_process.py")

pytestmark = pytest.mark.system


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_in(count: int, file: pathlib.Path) -> dict:
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
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return json.loads(file.read_text())


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_two_processes_train_like_one(tmp_path, kind):
    one = train_in(1, tmp_path / "one" / f"{kind}.json")
    two = train_in(2, tmp_path / "two" / f"{kind}.json")
    for path, values in one["params"].items():
        np.testing.assert_allclose(two["params"][path], values, atol=1e-6)
    assert [r["step"] for r in one["records"]] == [r["step"] for r in two["records"]]
    for left, right in zip(one["records"], two["records"], strict=True):
        for name, value in left.items():
            assert right[name] == pytest.approx(value, abs=1e-5), (left["step"], name)
