"""Runs that are also logged to TensorBoard, Weights & Biases and MLflow."""

import sys
from typing import get_args

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import cli, directory, execute
from hpcjax.train import writers
from tests.data import writers as data_writers
from tests.train import services

NAMES = get_args(writers.WriterName)
SMALL = {
    "train.steps": "4",
    "train.batch_size": "16",
    "train.eval_every": "2",
    "train.checkpoint_every": "2",
    "model.width": "2",
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    data_writers.write_all(tmp_path / "data")
    monkeypatch.setenv("HPCJAX_DATA", str(tmp_path / "data"))
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def command(root, *flags, **changes):
    overrides = [f"{key}={value}" for key, value in (SMALL | changes).items()]
    flags = [*flags, "--root", str(root), "--quiet"]
    return cli.main(["run", "jorge/digits:sgd", *flags, *overrides])


def only_run(root):
    (run,) = directory.list_runs(root)
    return run


def check_copies(run, names=NAMES):
    for name in names:
        held, config = services.READERS[name](run.path)
        assert held == services.expected(name, run.records()), name
        assert "jorge/digits:sgd" in config


@pytest.mark.slow
def test_every_service_has_the_runs_records(root):
    flags = [part for name in NAMES for part in ("--log", name)]
    assert command(root, *flags) == 0
    run = only_run(root)
    assert run.records()[-1]["step"] == 4
    check_copies(run)
    assert command(root, "--resume", run.id, *flags, **{"train.steps": 6}) == 0
    assert run.records()[-1]["step"] == 6
    check_copies(run)


@pytest.mark.slow
def test_only_what_was_asked_for_is_written(root):
    done = execute.run("jorge/digits:sgd", SMALL, root=root, quiet=True)
    assert not {path.name for path in done.directory.iterdir()} & set(NAMES)
    again = execute.run(
        "jorge/digits:sgd",
        SMALL | {"train.steps": "6"},
        root=root,
        resume=done.id,
        log=("tensorboard",),
        quiet=True,
    )
    assert {path.name for path in again.directory.iterdir()} & set(NAMES) == {
        "tensorboard"
    }
    check_copies(only_run(root), ["tensorboard"])


@pytest.mark.slow
def test_a_service_that_fails_ends_the_run_and_it_can_go_on(root, monkeypatch):
    real = writers.TensorBoard._write

    def fail(self, step, values):
        if step == 3:
            raise RuntimeError("gone")
        real(self, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(writers.TensorBoard, "_write", fail)
        assert command(root, "--log", "tensorboard") == 9
    run = only_run(root)
    assert run.status == "failed"
    assert run.records()[-1]["step"] == 3
    assert "loss" in run.records()[-1]
    assert command(root, "--resume", run.id, "--log", "tensorboard") == 0
    assert run.status == "done"
    check_copies(run, ["tensorboard"])


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_logged_makes_no_run(root, monkeypatch, capsys, name):
    module = {"tensorboard": "tensorboardX"}.get(name, name)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        assert command(root, "--log", name) == 2
    assert f"pip install 'hpcjax[{name}]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="does not train"):
        execute.run("jorge/step_cost", root=root, log=(name,), quiet=True)
    with pytest.raises(ConfigError, match="unknown writer"):
        execute.run("jorge/digits", root=root, log=("comet",), quiet=True)
    assert not (root / "runs").exists()
