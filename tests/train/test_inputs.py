"""Runs by how their input is read: the same parameters, bit for bit."""

import pathlib
import re
import subprocess
import sys

import chex
import jax
import pytest

from hpcjax import data, train
from hpcjax.core import ConfigError, parts
from hpcjax.data import DigitsConfig
from hpcjax.models import MlpConfig
from hpcjax.runs import directory, training
from hpcjax.runs.training import TrainingConfig
from hpcjax.train import loop
from hpcjax.train.config import TrainConfig
from tests.system import killing
from tests.train import tiny

INPUTS = sorted(parts.classes("input"))
SMALL = {"clairvoyant": {"memory": 20_000, "staging": 64}}


def config(name=None, steps=8):
    how = None if name is None else parts.classes("input")[name](**SMALL.get(name, {}))
    return TrainingConfig(
        dataset=DigitsConfig(limit=60, augment=data.CropFlipConfig(pad=1)),
        input=how,
        model=MlpConfig(widths=()),
        train=TrainConfig(steps=steps, batch_size=16, eval_every=steps),
    )


def fit(cfg, root, **more):
    made = training.task(cfg, root)
    records = tiny.Records()
    state = train.fit(
        made, cfg.train, seed=0, mesh=made.mesh(1), recorder=records, **more
    )
    return jax.device_get(state.params), records.values()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fit(config(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", INPUTS)
def test_parameters_do_not_depend_on_how_input_is_read(name, tmp_path, plain):
    chex.assert_trees_all_equal(fit(config(name), tmp_path), plain)


def test_a_run_goes_on_by_another_reader_and_at_its_end(tmp_path, plain):
    sessions = [("clairvoyant", 3), ("read_ahead", 5), *[("clairvoyant", 8)] * 2]
    for name, steps in sessions:
        with train.Checkpoints(tmp_path / "kept", keep=2) as checkpoints:
            params, _ = fit(config(name, steps), tmp_path, checkpoints=checkpoints)
    chex.assert_trees_all_equal(params, plain[0])


def test_too_little_memory_is_told_before_the_step_is_compiled(tmp_path, monkeypatch):
    how = data.ClairvoyantConfig(memory=10)
    cfg = TrainingConfig(input=how, model=MlpConfig(widths=()))
    made = training.task(cfg, tmp_path)
    compiled = []
    monkeypatch.setattr(loop, "compile_step", lambda *given: compiled.append(given))
    with pytest.raises(ConfigError, match="must hold the largest record"):
        train.fit(
            made,
            TrainConfig(steps=2, batch_size=16),
            seed=0,
            mesh=made.mesh(1),
            recorder=tiny.Records(),
        )
    assert compiled == []


def test_memory_may_be_larger_than_an_int32():
    assert data.ClairvoyantConfig(memory=8_000_000_000).memory > 2**31


def losses(root: pathlib.Path, *given: str):
    """Trains by the command; returns the losses, and how many neighbours have sent."""
    root.mkdir()
    small = ("train.steps=12", "train.eval_every=12", "train.batch_size=32")
    small = (*small, "dataset.limit=100")
    if "input=clairvoyant" in given:
        small = (*small, "input.memory=12000")
    process = subprocess.run(
        [sys.executable, "-c", killing.MAIN, "run", *given, *small, "--quiet"],
        capture_output=True,
        text=True,
        cwd=root,
        env=killing.environment(),
        check=False,
        timeout=killing.PATIENCE,
    )
    assert process.returncode == 0, process.stderr
    run = directory.RunDirectory(killing.run_folder(root))
    counts = re.findall(r"neighbours=(\d+)", (run.path / "log.txt").read_text())
    lost = [record["loss"] for record in run.records() if "loss" in record]
    return lost, sum(map(int, counts))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.acceptance("nopfs", 1)
def test_two_processes_train_the_same_with_every_input(tmp_path):
    found = {
        name: losses(
            tmp_path / name, "train/digits", f"input={name}", "--processes", "2"
        )
        for name in ("none", *INPUTS)
    }
    expected = found["none"][0]
    assert len(expected) == 12
    assert all(lost == expected for lost, _ in found.values())
    assert found["clairvoyant"][1] > 0


@pytest.mark.slow
@pytest.mark.processes
def test_workers_that_are_processes_read_from_each_other(tmp_path):
    given = ("averaging=local_sgd", "averaging.between=processes")
    given = (*given, "averaging.workers=2")
    found = [
        losses(tmp_path / name, "train/digits", *given, f"input={name}")
        for name in ("none", "clairvoyant")
    ]
    assert found[0][0] == found[1][0]
    assert found[1][1] > 0
