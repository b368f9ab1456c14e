"""What a run would take, against figures counted by hand."""

import dataclasses
import pathlib
import re

import pytest
from rich.console import Console

from hpcjax.core import ConfigError, DataMissing
from hpcjax.data import catalog
from hpcjax.runs import cli, discover, execute, plan
from hpcjax.train import loop
from hpcjax.train.config import TrainConfig
from tests.runs import papers

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = {
    "model": "mlp",
    "model.widths": "[16]",
    "train.steps": "10",
    "train.batch_size": "16",
}
PARAMETERS = (64 * 16 + 16) + (16 * 10 + 10)


@pytest.fixture(scope="module")
def made():
    root = REPOSITORY
    return {
        devices: plan.plan_run("jorge/digits:sgd", SMALL, root=root, devices=devices)
        for devices in (1, 8)
    }


def test_parameters_and_state(made):
    for planned in made.values():
        assert planned.name == "jorge/digits:sgd"
        assert planned.parameters == PARAMETERS
        # parameters and momentum, and a few counters
        assert 0 <= planned.state_bytes - 2 * 4 * PARAMETERS <= 64
        assert planned.peak_bytes >= planned.state_bytes


def test_operations_are_at_least_the_products(made):
    # forward, and both factors' gradients but that of the input
    images = 16
    products = 2 * images * (2 * 64 * 16 + 3 * 16 * 10)
    assert products <= made[1].flops <= 4 * products
    assert made[8].flops < made[1].flops


def test_only_several_devices_communicate(made):
    assert made[1].collective_bytes == 0
    assert made[8].collective_bytes >= 4 * PARAMETERS
    assert made[8].collective_bytes <= 4 * PARAMETERS + 256


def test_epochs(made):
    from sklearn.datasets import load_digits

    assert made[1].steps == 10
    whole = len(load_digits().target)
    assert 160 / whole < made[1].epochs < 160 / (0.7 * whole)


@pytest.mark.parametrize(("steps", "every"), [(10, 3), (10, 5), (9, 10), (1, 1)])
def test_checkpoints_are_those_the_loop_writes(steps, every):
    changes = {
        **SMALL,
        "train.steps": str(steps),
        "train.checkpoint_every": str(every),
        "optimizer.schedule": "constant",
    }
    planned = plan.plan_run("jorge/digits:sgd", changes, root=REPOSITORY)
    config = TrainConfig(steps=steps, checkpoint_every=every)
    due = [step for step in range(1, steps + 1) if loop.is_due(step, config)]
    assert planned.checkpoints == len(due)


def test_it_is_printed_whole(made):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(plan.render_plan(made[8]))
    text = capture.get()
    assert f"{PARAMETERS:,}" in text
    assert "metrics.jsonl" in text
    assert "not run" in text
    assert re.search(r"weight decay +\S+ on all 4 arrays", text)
    assert re.search(r"training takes +unknown", text)
    assert "figures of the method" not in text
    with console.capture() as capture:
        facts = {"ticks": 14.0, "bubble": 3 / 7}
        console.print(plan.render_plan(dataclasses.replace(made[8], facts=facts)))
    assert re.search(r"figures of the method +ticks 14, bubble 0.4286", capture.get())


RULES = {
    "optimizer": "sgd",
    "optimizer.weight_decay": "0.25",
    "optimizer.decay_rules": '[["bias$", false], [".*", true]]',
}


@pytest.mark.parametrize("place", ["optimizer", "optimizer.base"])
def test_weight_decay_covers_what_the_rules_choose(place):
    outer = {} if place == "optimizer" else {"optimizer": "kfac"}
    rules = {key.replace("optimizer", place): text for key, text in RULES.items()}
    loaded = discover.load("train/digits", {**SMALL, **outer, **rules}, REPOSITORY)
    task = loaded.experiment.task(loaded.config, REPOSITORY / ".cache/data")
    decay, decays = plan._find_decay(loaded.config.optimizer, task)
    assert decay == 0.25
    assert decays == {
        f"{layer}/{name}": name == "kernel"
        for layer in ("dense_0", "head")
        for name in ("bias", "kernel")
    }


def test_an_earlier_run_says_how_long_training_takes(tmp_path, monkeypatch):
    given = {**SMALL, "train.steps": "2"}
    assert plan.plan_run("jorge/digits:sgd", given, root=tmp_path).earlier == ""
    done = execute.run("jorge/digits:sgd", given, root=tmp_path, quiet=True)
    planned = plan.plan_run("jorge/digits:sgd", given, root=tmp_path)
    assert planned.earlier == done.id
    assert planned.seconds == done.dataset["seconds"].values[-1] > 0
    # Its step is that of a longer run with another seed, but not of a wider one.
    other = {**given, "train.steps": "20", "seed": "7", "train.eval_every": "3"}
    longer = plan.plan_run("jorge/digits:sgd", other, root=tmp_path)
    assert (longer.earlier, longer.earlier_steps, longer.steps) == (done.id, 2, 20)
    first, second = done.dataset["seconds"].values
    each = second - first
    assert plan._render_time(longer) == (
        f"about {20 * each:.3g} s, as a step takes {each:.3g} s in run {done.id}"
    )
    assert plan._render_time(planned) == f"{planned.seconds:.3g} s, as in run {done.id}"
    loaded = discover.load("jorge/digits:sgd", other | {"optimizer": "adamw"}, tmp_path)
    assert plan._find_earlier(loaded, tmp_path, 1) == {}
    loaded = discover.load("jorge/digits:sgd", other, tmp_path)
    assert plan._find_earlier(loaded, tmp_path, 2) == {}
    monkeypatch.setattr(plan.provenance, "cpu_model", lambda: "another one")
    assert plan._find_earlier(loaded, tmp_path, 1) == {}


def test_nothing_is_written(tmp_path):
    plan.plan_run("jorge/digits:sgd", SMALL, root=tmp_path)
    assert not (tmp_path / "runs").exists()


def test_an_experiment_that_does_not_train_has_no_plan(tmp_path):
    papers.make(tmp_path)
    assert plan.plan_run("curves/plain", root=tmp_path) is None


def test_impossible_combinations_are_refused_before_compiling(compilations):
    changes = {**SMALL, "train.batch_size": "12"}
    with pytest.raises(ConfigError, match=r"8 devices.*got 12"):
        plan.plan_run("jorge/digits:sgd", changes, root=REPOSITORY, devices=8)
    assert compilations == []


def test_missing_data_of_what_does_not_train_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HPCJAX_DATA", str(tmp_path))
    assert cli.main(["run", "lm/generate", "--dry-run"]) == 3
    told = capsys.readouterr().err
    assert told.startswith("error: data set 'smollm2' is not here")
    assert "hpcjax data fetch smollm2" in told
    assert plan.plan_run("lm/generate", {"model": "random"}, root=REPOSITORY) is None
    # What no value names is needed as long as the others are.
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / catalog.SMOLLM2).touch()
    assert plan.plan_run("lm/generate", root=REPOSITORY) is None
    with pytest.raises(DataMissing, match="hpcjax data fetch kjv"):
        plan.plan_run("specdec/distil", root=REPOSITORY)
    other = {"draft.target": "random"}
    assert plan.plan_run("specdec/distil", other, root=REPOSITORY) is None


@pytest.mark.slow
def test_missing_data_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCJAX_DATA", str(tmp_path))
    with pytest.raises(DataMissing, match="kjv"):
        plan.plan_run("jorge/text:sgd", root=REPOSITORY)
