"""A paper in a root of its own, of a new kind of data: nothing of the house knows it.

`tests/toy` has a data set that draws its own batches, of a tree of arrays, with a score
of its own; a model that takes them; a table with a claim and a control. Another paper
there spreads a model over devices in a way of its own: its table is of the step.
"""

import dataclasses
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest

from hpcjax import data, optim, train
from hpcjax.core import ConfigError, DataFormatError
from hpcjax.runs import build, cli, discover, execute, plan
from hpcjax.runs.directory import open_run
from hpcjax.runs.sweeps import axes
from hpcjax.runs.sweeps.sweep import Sweep
from tests.experiments import rows

TOY = pathlib.Path(__file__).parents[1] / "toy"


@pytest.fixture
def root(tmp_path):
    return pathlib.Path(shutil.copytree(TOY, tmp_path / "root"))


@pytest.mark.parametrize(("paper", "most"), [("waves", 180), ("kernels_only", 150)])
def test_a_paper_is_few_lines(paper, most):
    every = [*TOY.glob(f"configs/{paper}/*"), *TOY.glob(f"experiments/{paper}/*")]
    files = [path for path in every if path.suffix in (".py", ".md")]
    assert len(files) <= 6
    assert sum(len(path.read_text().splitlines()) for path in files) <= most


def test_it_is_listed_and_planned(root, capsys):
    assert cli.main(["list", "waves", "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "waves/move" in shown
    assert "waves/stencils" in shown
    entry, name = discover.find("waves/move", root)
    assert entry.small(name) == {
        "dataset.size": "8",
        "train.steps": "4",
        "train.batch_size": "8",
    }
    assert plan.plan_run("waves/move", entry.small(name), root=root).flops > 0


def test_its_table_is_made_and_can_be_made_of_any_runs(root):
    made = build.build_table("waves/stencils", root=root, progress=False)
    (verdict,) = made.verdicts
    assert verdict.holds, verdict
    rows.check_reduction(discover.find_tables(root)["waves/stencils"], "cpu", root)


def test_a_strategy_of_its_own_is_a_table_of_the_step(root):
    table = discover.find_tables(root)["kernels_only/spread"]
    rows.check_reduction(table, "cpu", root)
    made = build.build_table(table.id, root=root, progress=False)
    assert {v.name for v in made.verdicts if v.holds} == {"state", "equal"}
    kernels, biases = 64 * 64 + 64 * 10, 64 + 10
    rows_of_batch, whole = 2 * (64 + 1), kernels + biases  # and numbers of the step
    held = 2 * (kernels / 4 + biases) + rows_of_batch
    ours = made.dataset.sel(row="kernels")
    assert ours["state"] == pytest.approx(held / whole, abs=0.01)
    assert ours["sent"] == pytest.approx(2 * 3 / 4, rel=0.01)


@pytest.mark.parametrize("devices", [1, 2])
def test_it_is_resumed_bit_for_bit(root, devices):
    small = {"dataset.size": "8", "train.batch_size": "8", "train.keep": "3"}
    found = {}
    for name, steps in (("whole", (6,)), ("parts", (3, 6))):
        run = None
        for length in steps:
            run = execute.run(
                "waves/move",
                {**small, "train.steps": str(length)},
                root=root,
                resume=run and run.id,
                devices=devices,
                quiet=True,
            )
        found[name] = open_run(root, run.id).records()
    assert _values(found["whole"]) == _values(found["parts"])


def _values(records):
    return [(r["step"], r["loss"]) for r in records if "loss" in r]


def test_shards_of_what_it_draws_are_the_batch(root):
    sampler = discover.load("waves/move", {}, root).config.dataset.load().train
    whole = sampler.sample(5, 8, 1, (0, 1))
    parts = [sampler.sample(5, 8, 1, (index, 2)) for index in range(2)]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    chex.assert_trees_all_equal(joined, whole)
    other = sampler.sample(6, 8, 1, (0, 1))
    assert not np.array_equal(other["y"], whole["y"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"model": "mlp"}, "waves is forecast, which model=mlp .* model=stencil"),
        ({"dataset": "digits"}, "model=stencil does not learn: .* dataset=waves"),
    ],
)
def test_what_does_not_fit_it_is_refused_with_what_does(root, overrides, told):
    with pytest.raises(ConfigError, match=told):
        discover.load("waves/move", overrides, root)


def test_a_sweep_looks_for_the_least_of_what_is_better_low(root):
    rates, _ = axes.parse({"optimizer.lr": "0.1,0.2"})
    sweep = Sweep(config="waves/move", axes=tuple(rates))
    sweep.check(root)
    with pytest.raises(ConfigError, match="by='val_close', of which high is"):
        dataclasses.replace(sweep, by="val_close").check(root)


def test_what_it_draws_must_be_the_rows_that_were_asked_for(root):
    discover.load("waves/move", {}, root)
    from experiments.waves.waves import Drawn

    class Whole(Drawn):
        def sample(self, number, batch_size, seed, shard):
            return super().sample(number, batch_size, seed, (0, 1))

    assert len(data.batches(Whole(8), 8, 0)[3]["y"]) == 8
    with pytest.raises(DataFormatError, match=r"batch 3, shard .*: expected 4 rows"):
        data.batches(Whole(8), 8, 0, shard=(1, 2))[3]
    with pytest.raises(IndexError, match="non-negative"):
        data.batches(Whole(8), 8, 0)[-1]


def test_labels_that_are_no_classes_are_not_drawn(root):
    waves = discover.load("waves/move", {}, root).config
    dataset = waves.dataset.load()
    model = waves.model.make(dataset.inputs, dataset.outputs)
    drawing = optim.KfacConfig(fisher="true")
    with pytest.raises(ConfigError, match="labels of forecast are no classes"):
        train.compose(model, dataset, drawing, batch_size=8, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        {"train.accumulate": "2"},
        {"optimizer": "jorge"},
        {"exchange": "ok_topk"},
        {"averaging": "wagma", "averaging.workers": "2"},
        {"averaging": "eager"},
        {"backward": "partial", "backward.k": "1"},
    ],
)
def test_it_trains_with_parts_of_the_house(root, parts):
    small = {"dataset.size": "8", "train.batch_size": "8", "train.steps": "4"}
    done = execute.run(
        "waves/move", {**small, **parts}, root=root, devices=2, quiet=True
    )
    assert done.dataset["val_loss"][-1] < 0.5  # where nothing is learned
