"""Runs and sweeps under a real Slurm and a real mpirun, both on this machine."""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import yaml

from hpcjax.runs import directory, sweeps
from tests.runs import papers
from tests.system import killing

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = killing.REPOSITORY / "docs" / "examples"
RUN = [
    "run",
    "jorge/digits:sgd",
    "train.steps=4",
    "model.width=2",
    "train.batch_size=32",
    "--distributed",
    "--quiet",
]
SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm of one node, from Debian's packages."""
    needed = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
    os.environ["PATH"] += ":/usr/sbin"
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"Slurm needs root and Debian's slurm-wlm: no {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    places = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid")]
    places += [f"--seed-file={folder}/munge.seed", f"--socket={folder}/munge.socket"]
    # Its socket may lie in a folder that only we can write to.
    munged = subprocess.Popen(["munged", "--foreground", "--force", *places])
    config = folder / "slurm.conf"
    host = socket.gethostname()
    config.write_text(
        SLURM.format(
            folder=folder,
            host=host,
            port=free_port(),
            other=free_port(),
            cpus=os.cpu_count(),
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        daemons = [
            subprocess.Popen([name, "-D", "-f", str(config)], stderr=subprocess.DEVNULL)
            for name in ("slurmctld", "slurmd")
        ]
        try:
            wait_until_idle(folder)
            yield
        finally:
            for daemon in [*daemons, munged]:
                daemon.terminate()
                daemon.wait()


def wait_until_idle(folder):
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        told = subprocess.check_output(["sinfo", "-h", "-o", "%t"], text=True)
        if "idle" in told:
            return
        time.sleep(0.5)
    logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
    raise AssertionError("\n".join(logs))


def check_run_of_two(root, *launcher):
    done = subprocess.run(
        [*launcher, sys.executable, "-c", killing.MAIN, *RUN],
        cwd=root,
        env=killing.environment(),
        capture_output=True,
        text=True,
        timeout=killing.PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("directory") == 1  # the first process alone tells
    run = directory.RunDirectory(killing.run_folder(root))
    assert run.status == "done"
    assert run.sessions()[-1]["used_devices"] == 2
    assert (run.path / "log.1.txt").exists()


def test_srun_starts_the_processes_of_a_run(slurm, tmp_path):
    check_run_of_two(tmp_path, "srun", "-n", "2")


def test_mpirun_starts_the_processes_of_a_run(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: Debian's openmpi-bin")
    flags = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    check_run_of_two(tmp_path, "mpirun", *flags)


def test_the_batch_script_of_the_docs(slurm, tmp_path):
    """As written, but for the machine's own settings: time, nodes, environment."""
    text = (EXAMPLES / "slurm.sh").read_text()
    assert "--requeue" in text
    assert "--signal=USR1@60" in text
    bin_folder = pathlib.Path(sys.executable).parent
    script = tmp_path / "job.sh"
    for old, new in {
        "--nodes=2": "--nodes=1",
        "--ntasks-per-node=4": "--ntasks-per-node=2",
        "source .venv/bin/activate": f"export PATH={bin_folder}:$PATH",
        'CONFIG="jorge/digits:jorge"': 'CONFIG="jorge/digits:sgd"',
        'OVERRIDES="train.batch_size=128"': f'OVERRIDES="{" ".join(RUN[2:5])}"',
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    script.write_text(text)
    done = subprocess.run(
        ["sbatch", "--wait", f"--chdir={tmp_path}", str(script)],
        env=killing.environment(),
        capture_output=True,
        text=True,
        timeout=killing.PATIENCE,
        check=False,
    )
    said = "\n".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert done.returncode == 0, done.stderr + said
    run = directory.RunDirectory(killing.run_folder(tmp_path))
    assert run.status == "done"
    assert run.sessions()[-1]["used_devices"] == 2


def test_a_sweep_by_slurm_jobs(slurm, tmp_path):
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    papers.make(tmp_path)
    axes, _ = sweeps.parse({"seed": "0,1,2"})
    result = sweeps.run_sweep(
        sweeps.Sweep(config="curves/plain", axes=tuple(axes)),
        root=tmp_path,
        parallel=2,
        launcher=sweeps.make_launcher("slurm:timeout_min=5,cpus_per_task=1"),
        quiet=True,
    )
    assert result.dataset["status"].values.tolist() == ["done"] * 3


def shells(command, root, named):
    """Runs a script in two shells at once, as two machines would."""
    processes = [
        subprocess.Popen(
            ["bash", "-ec", command],
            cwd=root,
            env={**killing.environment(), **named(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        _, err = process.communicate(timeout=killing.PATIENCE)
        assert process.returncode == 0, err
    run = directory.RunDirectory(killing.run_folder(root))
    assert run.status == "done"
    assert run.sessions()[-1]["used_devices"] == 2


def here(command, root):
    """Puts this machine's command, port and folder into an example's command."""
    program = f'{sys.executable} -c "$MAIN"'
    small = " ".join(RUN[1:5])
    for old, new in {
        "jorge/digits:jorge": small,
        "--root /shared": f"--root {root}",
        ":9876": f":{free_port()}",
    }.items():
        assert old in command, old
        command = command.replace(old, new)
    main = f"export MAIN='{killing.MAIN}'\n"
    return main + re.sub(r"(\.venv/bin/)?hpcjax run", f"{program} run", command)


def test_the_skypilot_example(tmp_path):
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    shells(
        here(task["run"], tmp_path),
        tmp_path,
        lambda index: {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(index),
        },
    )


def test_the_kubernetes_example(tmp_path):
    service, job = yaml.safe_load_all((EXAMPLES / "gke.yaml").read_text())
    pods = job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert pods["subdomain"] == service["metadata"]["name"]
    (container,) = pods["containers"]
    assert container["volumeMounts"][0]["name"] == pods["volumes"][0]["name"]
    (command,) = container["args"]
    # The name of the first pod, which Kubernetes resolves.
    command = command.replace("hpcjax-0.hpcjax:", "127.0.0.1:")
    shells(
        here(command, tmp_path),
        tmp_path,
        lambda index: {"JOB_COMPLETION_INDEX": str(index)},
    )
