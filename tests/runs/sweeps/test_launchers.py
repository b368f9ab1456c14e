"""Workers on a real Ray cluster of two nodes, and as jobs of submitit."""

import sys

import numpy as np
import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import cli, sweeps
from tests.runs import papers

pytestmark = [pytest.mark.slow, pytest.mark.processes]

# Each run tells which node agent, or which job, its worker was started by.
TOLD = """
    import os
    import time
    time.sleep(1.0)
    place = os.environ.get("RAY_RAYLET_PID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")
"""


@pytest.fixture
def root(tmp_path):
    papers.make(tmp_path)
    path = tmp_path / "experiments/curves/experiment.py"
    text = path.read_text()
    text = text.replace("def run(cfg, ctx):\n", f"def run(cfg, ctx):\n{TOLD}")
    text = text.replace(
        'return results.history(metrics.read(), "measured")',
        'return results.history(metrics.read(), "measured").assign(place=int(place))',
    )
    path.write_text(text)
    return tmp_path


def sweep():
    axes, _ = sweeps.parse({"seed": "0,1,2,3,4,5"})
    return sweeps.Sweep(config="curves/plain", axes=tuple(axes))


@pytest.mark.processes
def test_a_ray_cluster_of_two_nodes(root, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        launcher = sweeps.make_launcher(f"ray:address={cluster.address}")
        result = sweeps.run_sweep(
            sweep(), root=root, parallel=2, launcher=launcher, quiet=True
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert result.dataset["status"].values.tolist() == ["done"] * 6
    assert len(np.unique(result.dataset["place"])) == 2  # both nodes had work


@pytest.mark.processes
def test_jobs_of_submitit(root):
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    launcher = sweeps.make_launcher("slurm:cluster=local,timeout_min=5")
    result = sweeps.run_sweep(
        sweep(), root=root, parallel=2, launcher=launcher, quiet=True
    )
    assert result.dataset["status"].values.tolist() == ["done"] * 6
    assert len(np.unique(result.dataset["place"])) == 2
    assert list((result.directory / "jobs").glob("*_log.out"))


def test_nothing_is_written_for_options_that_are_wrong(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    papers.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*.py"))
    for option, words in {
        "bogus=1": "submitit does not take these: Parameter 'bogus'",
        "timeout_min=soon": "expected type <class 'int'>",
        "slurm_bogus=1": "Unknown argument 'bogus'",
        "cluster=moon": "any executor named moon",
    }.items():
        launcher = (
            f"slurm:{option}" if "moon" in option else f"slurm:cluster=local,{option}"
        )
        args = ["sweep", "curves/plain", "lr=0.1,0.2", "--launcher", launcher]
        assert cli.main(args) == 2
        assert words in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ray:address=127.0.0.1:1", "no Ray cluster at '127.0.0.1:1': .*refused"),
        ("ray:address=nonsense", "no Ray cluster at 'nonsense': Invalid address"),
        ("ray:address=6379", "no Ray cluster at '6379'"),
        # Options are looked at before a cluster is asked for.
        ("ray:address=127.0.0.1:1,bogus=1", "ray does not take these options"),
    ],
)
def test_clusters_of_ray_that_are_not_there(text, words):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with pytest.raises(ConfigError, match=words):
        sweeps.make_launcher(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rai", "did you mean 'ray'"),
        ("local:cpus=2", r"no options: got \['cpus'\]"),
        ("ray:num_gpus", "key=value"),
    ],
)
def test_launchers_that_are_none(text, words):
    with pytest.raises(ConfigError, match=words):
        sweeps.make_launcher(text)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[slurm\]'"):
        sweeps.make_launcher("slurm")
