"""Tables made from runs: tuning, what is run again, what is committed and compared."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import xarray as xr

from hpcjax.core import ConfigError, Diverged
from hpcjax.perf import bench
from hpcjax.runs import (
    build,
    cli,
    code,
    directory,
    execute,
    record_age,
    render,
    results,
    table_records,
)
from hpcjax.runs import config as configs
from hpcjax.runs.tables import Runs, Table, Tier
from tests.runs import papers

RUNS_OF_HOLDS = 6 + 2 + 2


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


def make(root, name="curves/holds", **options):
    return build.build_table(name, root=root, progress=False, **options)


def ids(root):
    return {run.id for run in directory.list_runs(root)}


def test_the_grid_settles_on_the_least(root):
    result = make(root)
    assert result.tuned == {"slow": {"lr": "0.1", "wd": "0.25"}}
    assert result.passed
    # 1/4 after four steps, the penalty, and the mean of the seeds' 0 and 0.001
    best = result.dataset["best"]
    assert best.sel(row="slow").item() == pytest.approx(0.25 + 0.25 + 0.0005)
    assert best.sel(row="fast").item() == pytest.approx(0.125 + 0.125 + 0.0005)


def test_a_row_takes_only_what_it_names_and_is_not_tuned(root):
    fast = [run for run in make(root).runs if run["row"] == "fast"]
    assert [run["overrides"] for run in fast] == [
        {"wd": "0.125", "lr": "0.1", "seed": seed} for seed in ("0", "1")
    ]
    assert not any(run["tuning"] for run in fast)


def test_tuning_seeds_are_not_reported(root):
    result = make(root)
    tuning = [run for run in result.runs if run["tuning"]]
    assert len(tuning) == 6
    assert {run["overrides"]["seed"] for run in tuning} == {"1000"}
    assert result.dataset["steps_by_seed"]["seed"].values.tolist() == [0, 1]


def test_every_run_behind_a_table_can_be_found(root):
    for run in make(root).runs:
        folder = directory.open_run(root, run["id"])
        origin = json.loads((folder.path / "provenance.json").read_text())
        assert run["config_digest"] == origin["config_digest"]
        assert run["commit"] == origin["git_commit"]
        assert folder.status == "done"


@pytest.mark.acceptance("how-to-train", 8)
def test_runs_are_used_again_unless_fresh(root):
    first = make(root)
    before = ids(root)
    assert len(before) == RUNS_OF_HOLDS
    assert make(root).dataset.identical(first.dataset)
    assert ids(root) == before
    make(root, fresh=True)
    assert len(ids(root)) == 2 * RUNS_OF_HOLDS


def test_an_unfinished_run_is_not_used(root):
    make(root)
    last = directory.list_runs(root)[-1]
    last.set_status("failed")
    with pytest.raises(build.RunMissing):
        make(root, run_missing=False)
    make(root)
    assert len(ids(root)) == RUNS_OF_HOLDS + 1


@pytest.mark.slow
def test_nothing_is_run_without_leave(root):
    with pytest.raises(
        build.RunMissing, match=r"curves/plain:slow with .* not been run"
    ):
        make(root, run_missing=False)
    assert not ids(root)
    make(root)
    assert make(root, run_missing=False).passed


def test_a_diverged_trial_is_the_worst_and_not_repeated(root):
    result = make(root, "curves/steep")
    assert result.tuned == {"slow": {"lr": "0.1"}}
    assert result.at_edge == {"slow": {"lr": "0.1"}}
    before = ids(root)
    assert make(root, "curves/steep", run_missing=False).tuned == result.tuned
    assert ids(root) == before


@pytest.mark.acceptance("how-to-train", 7)
@pytest.mark.parametrize("last", [1.02, 1.12])
def test_a_table_of_times_that_drifted_says_so_and_so_does_its_record(
    root, monkeypatch, last
):
    history = results.history

    def measure(*args):
        ticks = itertools.accumulate([0, 1, 0, 1, 0, last, 0, last])
        clock = iter(ticks).__next__
        bench.compare({"a": int}, "a", repetitions=4, warmup=0, clock=clock)
        return history(*args)

    monkeypatch.setattr(results, "history", measure)
    made = make(root, "curves/steep", record=True)
    read = table_records.to_result(table_records.read_record(made.table, "cpu", root))
    moved = {"slow": 0.12, "fast": 0.12} if last > 1.05 else {}
    for result in (made, read):
        assert result.drifts == pytest.approx(moved)
    told = "UNSTABLE: within a measurement a median of times moved, by the row's runs"
    shown = render.describe_drifts(read)
    assert shown == f"{told}: fast 12%, slow 12%" * bool(moved)


def test_a_grid_that_diverges_everywhere_is_an_error(root):
    with pytest.raises(Diverged, match="each of 2 trials"):
        make(root, "curves/hopeless")
    assert {run.status for run in directory.list_runs(root)} == {"diverged"}


def test_a_reported_run_that_diverges_has_missed_the_target(root):
    result = make(root, "curves/fragile", record=True)
    # slow: 1, 1/2, 1/3, 1/4 and its seed / 1000; the median is that of seed 1
    assert result.dataset["target"].item() == pytest.approx(0.251)
    steps = result.dataset["steps_by_seed"]
    assert steps.sel(row="slow").values.tolist() == [4, 4, math.inf]
    # fast has 1/2 and 1/4 before it diverges: it was there in time
    assert steps.sel(row="fast").values.tolist() == [2, 2, 3]
    # A row of a run that diverged is of the others' source, if it has others.
    assert {"slow": "measured", "fast": "measured"}.items() <= result.sources.items()
    assert steps.sel(row="none", seed=1).item() == math.inf
    for column in ("best", "steps", "ratio", "ratio_high", "seconds"):
        assert result.dataset[column].sel(row="none").item() == math.inf
    assert result.passed
    diverged = [run for run in result.runs if run["diverged"]]
    assert [run["row"] for run in diverged] == ["fast", "none"]
    assert {run["overrides"]["seed"] for run in diverged} == {"1"}
    for run in diverged:
        assert directory.open_run(root, run["id"]).status == "diverged"
    path = root / "experiments/curves/results/fragile.cpu.json"
    written = json.loads(path.read_text())["runs"]
    assert [run["diverged"] for run in written] == [
        run["diverged"] for run in result.runs
    ]


@pytest.mark.slow
def test_a_run_that_diverged_is_not_run_again_unless_fresh(root):
    first = make(root, "curves/fragile")
    before = ids(root)
    assert len(before) == 7
    again = make(root, "curves/fragile", run_missing=False)
    assert again.dataset.identical(first.dataset)
    assert [run["id"] for run in again.runs] == [run["id"] for run in first.runs]
    assert all(run["used_again"] for run in again.runs)
    assert ids(root) == before
    fresh = make(root, "curves/fragile", fresh=True)
    assert not {run["id"] for run in fresh.runs} & before
    assert len(ids(root)) == 14


def test_a_seed_of_the_baseline_that_diverges_is_outrun(root):
    table = make(root, "curves/weak_base").dataset
    # the target is that of seed 1 alone, 0.251; seed 2 counts with the last of 4 steps
    assert table["target"].item() == pytest.approx(0.251)
    assert table["steps_by_seed"].sel(row="slow").values.tolist() == [4, 4, math.inf]
    assert table["steps_by_seed"].sel(row="fast").values.tolist() == [2, 2, 3]
    assert table["ratio"].sel(row="fast").item() == 0.5
    assert table["ratio_high"].sel(row="fast").item() == 0.75
    with pytest.raises(Diverged, match="no seed of 'slow', the baseline, has a finite"):
        make(root, "curves/no_base")


@pytest.mark.slow
def test_a_run_resumed_with_another_config_is_not_its_clean_run(root):
    chosen = {"lr": "0.1", "wd": "0.25"}  # what the row's tuning settles on
    shorter = {**chosen, "train.steps": "3"}
    resumed = execute.run("curves/plain:slow", shorter, root=root, quiet=True).id
    execute.run("curves/plain:slow", chosen, root=root, resume=resumed, quiet=True)
    (clean,) = [
        run
        for run in make(root).runs
        if run["row"] == "slow" and run["overrides"]["seed"] == "0"
    ]
    same = configs.digest_json(directory.open_run(root, resumed).read_config())
    assert clean["config_digest"] == same
    assert clean["id"] != resumed


@pytest.mark.slow
@pytest.mark.faults(25)
def test_a_record_is_compared_with_later_tables(root):
    recorded = make(root, record=True)
    path = root / "experiments/curves/results/holds.cpu.json"
    content = json.loads(path.read_text())
    assert content["table"] == "curves/holds"
    assert content["source"] == "measured"
    assert content["tuned"] == {"slow": {"lr": "0.1", "wd": "0.25"}}
    # Of the rates 1, 0.1 and 0.01 it is the middle one, of the two decays the lower.
    assert content["at_edge"] == {"slow": {"wd": "0.25"}}
    assert content["claims"]["fewer"]["holds"] is True
    assert content["claims"]["fewer"]["bound"] == "≤ 0.9"
    assert len(content["runs"]) == RUNS_OF_HOLDS
    assert content["provenance"]["versions"]["jax"]
    assert content["cells"]["fast.ratio"] == recorded.dataset["ratio"].sel(row="fast")
    assert make(root, check=True).differences == ()
    again = make(root, check=True, fresh=True)
    assert again.differences == ()
    assert not {run["id"] for run in again.runs} & {run["id"] for run in recorded.runs}

    content["cells"]["fast.best"] *= 1.01
    del content["cells"]["slow.best"]
    path.write_text(json.dumps(content))
    checked = make(root, check=True)
    assert not checked.passed
    *differing, damaged = checked.differences
    assert [text.split(":")[0] for text in differing] == ["slow.best", "fast.best"]
    assert "does not hold its cells: KeyError('slow.best')" in damaged


@pytest.mark.slow
def test_a_verdict_that_does_not_follow_from_the_cells_is_told(root):
    make(root, "curves/fails", record=True)
    path = root / "experiments/curves/results/fails.cpu.json"
    content = json.loads(path.read_text())
    assert not make(root, "curves/fails", check=True).differences
    content["claims"]["fewer"]["holds"] = True
    path.write_text(json.dumps(content))
    (told,) = make(root, "curves/fails", check=True).differences
    assert re.search(r'claim fewer: committed .*"holds": true.*follows .*false', told)


def edit_experiment(root, old, new):
    path = root / "experiments/curves/experiment.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_runs_of_older_code_are_not_used_again(root):
    """As when the sign of a coefficient has changed between two tables."""
    first = make(root)
    edit_experiment(root, "loss = math", "# The rate's share.\n        loss = math")
    code.forget()  # what another process would see
    assert make(root, run_missing=False).dataset.identical(first.dataset)
    edit_experiment(root, "loss += 1 /", "loss -= 1 /")
    code.forget()
    with pytest.raises(build.RunMissing, match="has not been run by this code yet"):
        make(root, run_missing=False)
    assert [run["used_again"] for run in make(root).runs] == [False] * RUNS_OF_HOLDS


@pytest.mark.slow
def test_a_record_is_refused_if_the_code_changed_meanwhile(root):
    make(root)
    edit_experiment(root, "loss += 1 /", "loss -= 1 /")
    with pytest.raises(ConfigError, match="the code has changed since"):
        make(root, record=True)
    assert not (root / "experiments/curves/results").exists()


def ages(root):
    return {
        record.table.id: record_age.find_age(record, root)
        for record in table_records.find_records(root)
        if record.table.id.startswith("curves/")
    }


@pytest.mark.slow
def test_a_record_tells_whether_todays_code_made_it(root, capsys):
    make(root, record=True)
    assert ages(root) == {"curves/holds": ("this code", ())}
    assert make(root, check=True).recorded == "this code"
    path = root / "experiments/curves/results/holds.cpu.json"
    record = path.read_text()
    edit_experiment(root, "loss += 1 /", "loss -= 1 /")
    code.forget()
    assert ages(root) == {
        "curves/holds": ("older code", ("the code of 10 of 10 runs: older code",))
    }
    assert cli.main(["list", "curves", "--stale", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 are made by this code" in out
    assert "the code of 10 of 10 runs" in out
    edit_experiment(root, "loss -= 1 /", "loss += 1 /")
    code.forget()
    assert ages(root) == {"curves/holds": ("this code", ())}

    content = json.loads(record)
    content["runs"][0]["config_digest"] = "0" * 16
    del content["runs"][1]["code"]
    content["code"] = "0" * 16
    path.write_text(json.dumps(content))
    assert ages(root)["curves/holds"] == (
        "older code",
        (
            "the config of 1 of 10 runs: older code",
            "the reduction: older code",
            "the code of 1 of 10 runs: unknown",
        ),
    )


DAMAGE = {
    "a list": lambda content: [content],
    "no provenance": lambda content: {**content, "provenance": None},
    "claims of texts": lambda content: {**content, "claims": {"fewer": "holds"}},
    "runs of nothing": lambda content: {**content, "runs": [{}]},
    "no cells": lambda content: {**content, "cells": [1]},
}


@pytest.mark.quick("a list")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_told_before_a_table_is_made(root, damage, capsys):
    make(root, record=True)
    path = root / "experiments/curves/results/holds.cpu.json"
    path.write_text(json.dumps(DAMAGE[damage](json.loads(path.read_text()))))
    flags, before = ["--root", str(root)], ids(root)
    assert cli.main(["table", "curves/holds", "--check", "--fresh", *flags]) == 3
    assert cli.main(["list", "curves", "--stale", *flags]) == 3
    assert ids(root) == before
    assert "holds.cpu.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_of_other_rows_or_seeds_is_not_of_the_table(root):
    result = make(root, record=True)
    record = table_records.read_record(result.table, "cpu", root)
    tier = result.table.tier("cpu")
    for changed in (
        {"devices": 4},
        {"runs": {"slow": tier.runs["slow"]}},
        {
            "runs": {
                name: dataclasses.replace(runs, seeds=(7,))
                for name, runs in tier.runs.items()
            }
        },
    ):
        tiers = {"cpu": dataclasses.replace(tier, **changed)}
        other = record._replace(table=dataclasses.replace(result.table, tiers=tiers))
        found = record_age.find_age(other, root)
        assert found == ("older code", ("the table: older code",))


def test_a_record_holds_all_that_is_needed_to_have_its_table_again(root):
    result = make(root, "curves/fragile", record=True)
    record = table_records.read_record(result.table, "cpu", root)
    assert table_records.to_dataset(record).equals(result.dataset)


@pytest.mark.slow
def test_seconds_are_not_compared(root):
    make(root, record=True)
    path = root / "experiments/curves/results/holds.cpu.json"
    content = json.loads(path.read_text())
    for name in ("fast.seconds", "fast.compile_seconds"):
        assert name in content["cells"]
        content["cells"][name] = 1234.5
    path.write_text(json.dumps(content))
    assert make(root, check=True).differences == ()


def test_without_a_record_there_is_nothing_to_compare(root):
    with pytest.raises(ConfigError, match=r"no committed result.*holds\.cpu\.json"):
        make(root, check=True)
    assert not list((root / "runs").glob("*"))


def test_the_times_of_a_benchmark_are_compared_by_factors():
    table = Table(
        id="curves/timed",
        title="",
        paper="",
        tiers={},
        reduce=dict,
        columns={"plain": "pass, ms", "timed": "seconds", "ratio": "arms / ms of it"},
        benchmark=True,
    )
    assert table.times == ("plain", "timed", "ratio")
    table = dataclasses.replace(table, columns={**table.columns, "ratio": "alarms"})
    assert table.times == ("plain", "timed")
    made = xr.Dataset(
        {
            "plain": ("row", [10.0, 10.0, 10.0]),
            "ratio": ("row", [-0.1, 0.1, 0.0]),
            "timed": ("row", [3.0, 3.0, 3.0]),
            "timed_low": ("row", [2.0, 2.0, 2.0]),
            "timed_high": ("row", [4.0, 4.0, 4.0]),
        },
        coords={"row": ["x", "y", "z"]},
    )
    old = table_records.to_cells(made)
    assert table_records.compare(made, old, table) == ()
    now = made.copy(deep=True)
    now["plain"][:] = [19.9, 20.1, 4.9]
    now["ratio"][:] = [0.3, -0.2, 1.0]
    now["timed"][:] = [1.1, 7.9, 8.1]
    now["timed_low"][:] = now["timed_high"][:] = 99.0
    assert [text.split(":")[0] for text in table_records.compare(now, old, table)] == [
        "y.plain",
        "z.plain",
        "z.timed",
    ]
    now["timed"][:] = [0.9, 1.0, 8.0]  # half of the low end, twice the high one
    assert [
        text for text in table_records.compare(now, old, table) if "timed" in text
    ] == ["x.timed: 0.9 beside 3.0 or so"]
    for odd, old_word in ((math.nan, "nan"), (math.inf, "inf")):
        now = made.assign(plain=("row", [10.0, odd, 10.0]))
        assert len(table_records.compare(now, old, table)) == 1
        changed = old | {"y.plain": old_word}
        assert table_records.compare(now, changed, table) == ()
        assert len(table_records.compare(made, changed, table)) == 1
    assert (
        len(table_records.compare(made.assign(plain=("row", [10, 99, 9])), old, table))
        == 1
    )
    # Where nothing is measured every digit counts, but for seconds.
    exact = dataclasses.replace(table, benchmark=False)
    assert (
        len(table_records.compare(made.assign(plain=made.plain + 1e-4), old, exact))
        == 3
    )


@pytest.mark.slow
def test_a_benchmark_of_another_machine_is_not_compared(root):
    path = root / "experiments/curves/tables.py"
    timed = 'HOLDS = dataclasses.replace(table("holds", 0.9, ROWS), benchmark=True)'
    text = path.read_text().replace('HOLDS = table("holds", 0.9, ROWS)', timed)
    path.write_text("import dataclasses\n" + text)
    make(root, record=True)
    assert make(root, check=True).differences == ()
    path = root / "experiments/curves/results/holds.cpu.json"
    content = json.loads(path.read_text())
    content["provenance"]["cpu_count"] = 1234
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"another machine, .*1234.*leave out"):
        make(root, check=True)


@pytest.mark.slow
def test_a_claim_that_fails_is_recorded_as_failed(root):
    result = make(root, "curves/fails", record=True)
    assert not result.passed
    (verdict,) = result.verdicts
    assert verdict.ours > 0.1
    path = root / "experiments/curves/results/fails.cpu.json"
    assert json.loads(path.read_text())["claims"]["fewer"]["holds"] is False


@pytest.mark.quick("holds-flags1-2", "hopeless-flags3-4")
@pytest.mark.parametrize(
    ("name", "flags", "code"),
    [
        ("holds", ["--record"], 0),
        ("holds", ["--check"], 2),
        ("fails", ["--record"], 1),
        ("hopeless", [], 4),
    ],
)
def test_exit_status(root, capsys, name, flags, code):
    assert cli.main(["table", f"curves/{name}", "--root", str(root), *flags]) == code
    out = capsys.readouterr().out
    assert ("FAILS" in out) == (name == "fails")


@pytest.mark.slow
def test_a_check_that_fails_ends_with_1(root, capsys):
    make(root, record=True)
    path = root / "experiments/curves/results/holds.cpu.json"
    content = json.loads(path.read_text())
    content["cells"]["fast.best"] = 9.0
    path.write_text(json.dumps(content))
    assert cli.main(["table", "curves/holds", "--check", "--root", str(root)]) == 1
    assert "fast.best: 0.2505 instead of 9.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("like", "takes", "message"),
    [
        ("sloww", ("lr",), "did you mean 'slow'"),
        ("slow", ("momentum",), r"does not tune: \['momentum'\]"),
    ],
)
def test_a_row_like_another_names_what_that_tunes(like, takes, message):
    rows = {
        "slow": Runs(config="curves/plain", tune={"lr": ("1",)}),
        "fast": Runs(config="curves/plain", like=like, takes=takes),
    }
    with pytest.raises(ConfigError, match=message):
        Tier(runs=rows, claims={}, minutes=1.0)


def test_unknown_tables_and_tiers_are_named(root):
    with pytest.raises(ConfigError, match="did you mean 'curves/holds'"):
        make(root, "curves/hold")
    with pytest.raises(ConfigError, match=r"no tier 'gpu'; allowed: \['cpu'\]"):
        make(root, tier="gpu")


@pytest.mark.slow
def test_a_missed_target_is_a_word_in_the_record(root):
    result = make(root, "curves/holds")
    result.dataset["steps"].loc[{"row": "slow"}] = math.inf
    content = json.dumps(table_records.to_json(result), allow_nan=False)
    assert json.loads(content)["cells"]["slow.steps"] == "inf"


@pytest.mark.slow
def test_texts_of_a_table_are_recorded_whoever_holds_them(root):
    result = make(root, "curves/holds")
    for kind in ("U4", object):
        texts = np.array(["some"] * result.dataset.sizes["row"], kind)
        texted = result.dataset.assign(model=("row", texts))
        cells = table_records.to_json(dataclasses.replace(result, dataset=texted))[
            "cells"
        ]
        assert cells["slow.model"] == "some"


@pytest.mark.slow
def test_a_run_on_more_devices_is_not_a_tables_run(root):
    for seed in ("0", "1"):
        chosen = {"lr": "0.1", "wd": "0.25", "seed": seed}
        execute.run("curves/plain:slow", chosen, root=root, devices=2, quiet=True)
    before = ids(root)
    assert not {run["id"] for run in make(root).runs} & before


def test_a_table_says_which_of_how_many_runs_it_makes(tmp_path, capsys):
    root = papers.make(tmp_path)
    build.build_table("curves/holds", root=root)
    told = re.findall(
        r"run (\d+) of (\d+), about \d+ s left: (.*): done", capsys.readouterr().err
    )
    rows = ["curves/plain:slow"] * 8 + ["curves/plain:fast"] * 2
    assert told == [(str(n), "10", row) for n, row in enumerate(rows, 1)]
