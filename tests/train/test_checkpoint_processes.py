"""Checkpoints of processes that are killed, and of two processes together."""

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.train.checkpoint import Checkpoints

pytestmark = pytest.mark.processes

HELPER = pathlib.Path(__file__).parent / "checkpoint_process.py"


def key_bits(key):
    return np.asarray(jax.random.key_data(key)).tobytes()


def start_helper(*arguments):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(HELPER), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_killed_while_saving_leaves_the_step_before(tmp_path):
    draw = random.Random(1)
    for _ in range(3):
        directory = tmp_path / str(draw.random())
        with start_helper("kill", directory) as process:
            assert process.stdout.readline() == "saving\n"
            time.sleep(draw.uniform(0.0, 0.1))
            process.send_signal(signal.SIGKILL)
        checkpoints = Checkpoints(directory)
        like = {"a": jax.ShapeDtypeStruct((1 << 22,), jnp.float32)}
        restored = checkpoints.restore(like)
        assert restored.step == max(checkpoints.steps())
        assert np.all(np.asarray(restored.state["a"]) == restored.step)
        assert not list(directory.glob(".*"))
        checkpoints.save(restored.step + 1, restored.state, {})
        checkpoints.wait()
        checkpoints.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_processes_save_and_restore_shared_arrays(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [start_helper("pair", tmp_path, port, index) for index in range(2)]
    outputs = [worker.communicate(timeout=100)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert all("restored 2" in output for output in outputs)
    checkpoints = Checkpoints(tmp_path)
    manifest = checkpoints.verify(2)
    assert len(manifest.leaves["sharded"].blocks) == 4
    like = {
        "sharded": jnp.zeros((8, 2)),
        "replicated": jnp.zeros(3),
        "local": np.zeros(2),
        "key": jax.random.key(5),
    }
    state = checkpoints.restore(like).state  # on another number of processes
    np.testing.assert_array_equal(state["sharded"], np.arange(16.0).reshape(8, 2))
    np.testing.assert_array_equal(state["replicated"], np.arange(3.0))
    assert key_bits(state["key"]) == key_bits(jax.random.key(5))
    checkpoints.close()
