"""Rows of a table that start from another row's runs."""

import contextlib
import json
import pathlib

import pytest

from hpcjax.core import ConfigError, Diverged
from hpcjax.runs import (
    build,
    confirmation,
    directory,
    discover,
    execute,
    table_records,
)
from hpcjax.runs.tables import Runs, Tier
from tests.runs import roots

ROOT = pathlib.Path(__file__).parents[2]

EXPERIMENT = '''
import dataclasses
from typing import ClassVar

from hpcjax.core.errors import Diverged

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Adds to what the run has.

    Attributes:
      value: is added.
      seed: is added too.
    """
    figures: ClassVar = {"total": ": of all"}

    value: float = 1.0
    seed: int = 0

def run(cfg, ctx):
    from hpcjax.runs import results
    kept = ctx.directory.path / "checkpoints" / "total"
    before = float(kept.read_text()) if kept.exists() else 0.0
    if cfg.value < 0:
        raise Diverged("below zero")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(str(before + cfg.value + cfg.seed))
    return results.measured({"total": before + cfg.value + cfg.seed})
'''
CONFIG = '''
"""Sums; no time at all.

Expect: a sum.
"""
from experiments.sums.experiment import Config

base = Config()
'''
TABLES = """
from hpcjax.runs.reduce import cell, extent
from hpcjax.runs.tables import Runs, Table, on_cpu

def row(value, **fields):
    return Runs(config="sums/plain", overrides={"value": str(value)}, **fields)

def table(name, runs):
    return Table(
        id=f"sums/{name}", title="Sums", paper="none", caption="", shows="",
        columns={"total": "total"}, over=extent,
        tiers=on_cpu(minutes=0.1, runs=runs, claims={
            "one": cell("total", "last").at_most(1e9, "a sum")
            .fails({"last": "last"}),
        }),
    )

CHAIN = table("chain", {
    "last": row(4, after="then"),
    "first": row(1, seeds=(0, 1)),
    "then": row(2, seeds=(0, 1), after="first"),
    "same": row(2),
})
BROKEN = table("broken", {"first": row(-1), "last": row(1, after="first")})
"""


@pytest.fixture
def root(tmp_path):
    roots.write(tmp_path, "experiments/sums/experiment.py", EXPERIMENT)
    roots.write(tmp_path, "experiments/sums/tables.py", TABLES)
    roots.write(tmp_path, "configs/sums/plain.py", CONFIG)
    return tmp_path


def make(root, name="sums/chain", **options):
    return build.build_table(name, root=root, progress=False, **options)


def of(result, row, seed="0"):
    (found,) = [
        run
        for run in result.runs
        if (run["row"], run["overrides"]["seed"]) == (row, seed)
    ]
    return found


def test_a_row_goes_on_from_the_run_of_the_same_seed(root):
    result = make(root)
    total = result.dataset["total"]
    # Of seeds 0 and 1: 1 and 2, then 3 and 5; of seed 0 alone 7.
    expected = {"first": 1.5, "then": 4.0, "last": 7.0, "same": 2.0}
    assert {row: total.sel(row=row).item() for row in expected} == expected
    last, then = of(result, "last"), of(result, "then")
    assert (last["after"], last["parent"]) == ("then", then["id"])
    assert directory.open_run(root, last["id"]).parent == then["id"]
    assert "parent" not in of(result, "first")
    # A run of the same config that is no fork is another one.
    assert of(result, "same")["config_digest"] == then["config_digest"]
    assert of(result, "same")["id"] != then["id"]
    held = [(run["row"], run["overrides"]["seed"]) for run in result.runs]
    assert len(held) == len(set(held)) == 6


def test_forks_of_the_same_parent_alone_are_used_again(root):
    first = make(root)
    other = execute.run("sums/plain", {"value": "9"}, root=root, quiet=True).id
    execute.run(
        "sums/plain", {"value": "2"}, root=root, resume=other, fork=True, quiet=True
    )
    assert [run["id"] for run in make(root).runs] == [run["id"] for run in first.runs]
    anew = make(root, fresh=True)
    assert of(anew, "last")["parent"] == of(anew, "then")["id"]
    assert of(anew, "then")["id"] != of(first, "then")["id"]


def test_a_fork_that_was_cut_goes_on_as_that_fork(root):
    last = of(make(root), "last")
    folder = directory.open_run(root, last["id"])
    (folder.path / "result.nc").unlink()
    folder.unseal()
    folder.set_status("preempted")
    (folder.path / "checkpoints" / "total").write_text("3.0")
    again = make(root)
    assert of(again, "last")["id"] == last["id"]
    assert again.dataset["total"].sel(row="last") == 7


def test_a_record_names_both_runs_and_is_made_again_whole(root):
    make(root, record=True)
    path = root / "experiments/sums/results/chain.cpu.json"
    runs = json.loads(path.read_text())["runs"]
    by_id = {run["id"]: run["row"] for run in runs}
    forks = {run["row"]: by_id[run["parent"]] for run in runs if "parent" in run}
    assert forks == {"last": "then", "then": "first"}
    table = build.discover.find_tables(root)["sums/chain"]
    record = table_records.read_record(table, "cpu", root)
    with pytest.raises(ConfigError, match="start from others"):
        confirmation.require_confirmable(record)


def test_nothing_starts_from_what_diverged(root):
    with pytest.raises(Diverged, match="last starts from first, which diverged"):
        make(root, "sums/broken")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"b": {"after": "c"}}, "row 'b' must be after another row.*'c'"),
        ({"a": {"after": "b"}, "b": {"after": "a"}}, "not after it: got 'a'"),
        ({"b": {"after": "a", "seeds": (0, 1)}}, r"'a', which has no seeds \[1\]"),
        ({"b": {"after": "a", "tune": {"lr": ("1",)}}}, "is not tuned"),
    ],
)
def test_rows_after_what_there_is_not_are_refused(rows, message):
    def make_tier():
        made = {name: Runs(config="x", **fields) for name, fields in rows.items()}
        Tier(runs={"a": Runs(config="x"), **made}, claims={}, minutes=1.0)

    with pytest.raises(ConfigError, match=message):
        make_tier()


_HALVES = {"dataset.train": "16", "dataset.validation": "4", "dataset.fold_dates": "4"}


@pytest.mark.parametrize(
    ("joint", "had"),
    [
        ({"fold_dates": "3"}, "fold_dates=4"),
        ({"folds": "2"}, "folds=4"),
        ({"members": "4"}, "members=5"),
        ({"share": "0.1"}, "share=0.005"),
        ({"holdout": "validation"}, None),
    ],
)
def test_means_of_other_folds_are_no_start_for_a_spread(tmp_path, joint, had):
    """They would know the dates that the spread is learnt around them."""
    loaded = [
        discover.load(f"ens_postprocess/circle:{variant}", {**_HALVES, **more}, ROOT)
        for variant, more in (
            ("staged", {}),
            ("joint", {f"dataset.{name}": text for name, text in joint.items()}),
        )
    ]
    before = directory.create(tmp_path, loaded[0].title, loaded[0].config)
    claimed = directory.claim(tmp_path, loaded[1], resume=before.id, fork=True)
    refused = pytest.raises(ConfigError, match=f"learn=both: got {had}")
    with refused if had else contextlib.nullcontext(), claimed as child:
        assert child.parent == before.id
    assert len(directory.list_runs(tmp_path)) == (1 if had else 2)


def test_what_learnt_no_mean_is_no_start_for_a_spread(tmp_path):
    loaded = [
        discover.load(f"ens_postprocess/circle:{variant}", {}, ROOT)
        for variant in ("spread", "joint", "bias")
    ]
    before = directory.create(tmp_path, loaded[0].title, loaded[0].config)
    with (
        pytest.raises(ConfigError, match="learn='spread'"),
        directory.claim(tmp_path, loaded[1], resume=before.id, fork=True),
    ):
        pass
    # What does not go on from means may be forked from anything.
    with directory.claim(tmp_path, loaded[2], resume=before.id, fork=True) as child:
        assert child.parent == before.id
