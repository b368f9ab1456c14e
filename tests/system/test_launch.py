"""Runs of several processes by the real command: killed, stuck, told to stop."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hpcjax.runs import directory
from tests.runs import roots
from tests.system import killing

pytestmark = pytest.mark.processes

# Softmax regression on digits; one process may be made to sleep, once.
EXPERIMENT = '''
import dataclasses
import os
import time

from hpcjax import train
from hpcjax.data import DigitsConfig
from hpcjax.models import MlpConfig
from hpcjax.optim import SgdConfig
from hpcjax.train.config import TrainConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A small run.

    Attributes:
      model: what learns.
      train: how long.
      pause: seconds a step takes at least.
      asleep: process that sleeps at step 6.
      seed: of everything.
    """
    model: MlpConfig = MlpConfig(widths=())
    train: TrainConfig = TrainConfig()
    pause: float = 0.0
    asleep: int = -1
    seed: int = 0

class Slow:
    def __init__(self, source, pause, asleep):
        self.source, self.pause, self.asleep, self.served = source, pause, asleep, 0

    def __len__(self):
        return len(self.source)

    def gather(self, indices):
        self.served += 1
        time.sleep(self.pause)
        if self.asleep and self.served > 12:
            time.sleep(3600)
        return self.source.gather(indices)

def task(cfg, data_root):
    import jax
    dataset = DigitsConfig().load(data_root)
    asleep = cfg.asleep == jax.process_index()
    dataset = dataset._replace(train=Slow(dataset.train, cfg.pause, asleep))
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    return train.supervised(model, SgdConfig().make(cfg.train.steps), dataset)

def run(cfg, ctx):
    made = task(cfg, ctx.data_root)
    return ctx.train(made, cfg.train, seed=cfg.seed, source="measured")
'''
CONFIG = '''
"""A small run."""
import dataclasses
from experiments.small.experiment import Config
from hpcjax.train.config import TrainConfig

base = Config(
    train=TrainConfig(steps=40, batch_size=16, eval_every=20, checkpoint_every=4),
    pause=0.05,
)
smoke = {}
'''


@pytest.fixture
def root(tmp_path):
    roots.write(tmp_path, "experiments/small/experiment.py", EXPERIMENT)
    roots.write(tmp_path, "configs/small/small.py", CONFIG)
    return tmp_path


def command(root, *args):
    return subprocess.Popen(
        [sys.executable, "-c", killing.MAIN, "run", "small/small", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=killing.environment(),
    )


def finish(process):
    out, err = process.communicate(timeout=killing.PATIENCE)
    return process.returncode, out, err


def wait_for(root, step, process):
    limit = time.monotonic() + killing.PATIENCE
    while killing.last_step(root) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


def rank(process, index):
    """Returns the child of a launcher that has this rank."""
    limit = time.monotonic() + killing.PATIENCE
    while time.monotonic() < limit:
        for child in psutil.Process(process.pid).children():
            if child.environ().get("JAX_PROCESS_ID") == str(index):
                return child
        time.sleep(0.05)
    raise AssertionError(f"no process {index}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    roots.write(root, "experiments/small/experiment.py", EXPERIMENT)
    roots.write(root, "configs/small/small.py", CONFIG)
    process = command(root, "--processes", "2", "--quiet")
    code, out, err = finish(process)
    assert code == 0, err
    assert out.count("directory") == 1
    return root


def test_two_processes_by_the_command(undisturbed):
    run = directory.RunDirectory(killing.run_folder(undisturbed))
    assert run.status == "done"
    assert run.sessions()[-1]["used_devices"] == 2
    assert [r["step"] for r in killing.metrics(undisturbed) if "loss" in r][-1] == 40
    assert not (run.path / "lock").exists()


@pytest.mark.slow
@pytest.mark.faults(13)
def test_a_killed_process_ends_the_run_and_is_named(root):
    process = command(root, "--processes", "2", "--quiet")
    wait_for(root, 9, process)
    rank(process, 1).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - killed < 15  # heartbeat and 5 s
    assert code == 7, err
    assert "process 1 was killed by SIGKILL" in err.splitlines()[-1]
    assert "--resume" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.faults(13)
def test_a_killed_process_is_restarted_from_the_last_checkpoint(root, undisturbed):
    process = command(root, "--processes", "2", "--restart", "1", "--quiet")
    wait_for(root, 9, process)
    rank(process, 1).send_signal(signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert "beginning anew, 0 more times" in err
    assert killing.metrics(root) == killing.metrics(undisturbed)
    assert killing.last_leaves(root) == killing.last_leaves(undisturbed)


@pytest.mark.slow
@pytest.mark.faults(14)
def test_a_stuck_process_is_found_and_named(root):
    flags = ["asleep=1", "train.stall_seconds=4", "--processes", "2", "--quiet"]
    process = command(root, *flags)
    wait_for(root, 2, process)
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < 90
    assert code == 7, err
    assert "process 1 is behind" in err.splitlines()[-1]
    # The stacks of the one that slept say where.
    said = (killing.run_folder(root) / "process-1.txt").read_text() + err
    assert "gather" in said


@pytest.mark.slow
@pytest.mark.faults(14)
def test_a_process_that_was_stopped_is_named(root):
    """However far it was: the other waits for it within the same step or the next."""
    process = command(root, "train.stall_seconds=4", "--processes", "2", "--quiet")
    wait_for(root, 9, process)
    rank(process, 1).send_signal(signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 7, err
    assert "process 1 shows no sign of life" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.faults(2)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_all_processes_save_and_stop(root, undisturbed, number, status):
    process = command(root, "--processes", "2", "--quiet", "train.checkpoint_every=0")
    wait_for(root, 9, process)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == status, err
    run_id = killing.run_folder(root).name
    assert f"--resume {run_id}" in err.splitlines()[-1]
    assert len(killing.checkpoints(root)) == 1
    flags = ["--processes", "2", "--quiet", "--resume", run_id]
    code, _, err = finish(command(root, *flags, "train.checkpoint_every=0"))
    assert code == 0, err
    assert killing.metrics(root) == killing.metrics(undisturbed)


@pytest.mark.slow
def test_the_variables_alone_join_processes(root):
    """As on machines without Slurm or MPI: started one by one, by hand."""
    from hpcjax.core import environment
    from hpcjax.runs import launch

    address = f"127.0.0.1:{launch._free_port()}"
    processes = []
    for index in range(2):
        env = {
            **os.environ,
            **environment.member(address, 2, index),
            "PYTHONPATH": str(killing.REPOSITORY),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        args = ["run", "small/small", "train.steps=4", "--distributed", "--quiet"]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", killing.MAIN, *args],
                cwd=root,
                env=env,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        _, err = process.communicate(timeout=killing.PATIENCE)
        assert process.returncode == 0, err
    assert killing.metrics(root)[-1]["step"] == 4


def test_half_the_variables_are_an_error(root):
    env = {**os.environ, "JAX_PROCESS_ID": "0", "PYTHONPATH": str(killing.REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", killing.MAIN, "run", "small/small", "--distributed"],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "also set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES" in done.stderr


def test_devices_that_processes_cannot_share_are_refused(root):
    code, _, err = finish(command(root, "--processes", "2", "--devices", "3"))
    assert code == 2
    assert "processes=2, devices=3" in err
    assert not (root / "runs").exists()
