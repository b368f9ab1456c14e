"""How runs and configs differ, as objects and as the command prints it."""

import math
import re

import pytest

from hpcjax import runs
from hpcjax.core import ConfigError, Diverged
from hpcjax.core.files import read_json, write_json
from hpcjax.runs import cli, difference, directory, execute, results
from hpcjax.runs.config import ABSENT
from tests.runs import papers, roots


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return roots.make(papers.make(tmp_path_factory.mktemp("difference")))


def run(root, **overrides):
    return execute.run("curves/plain", overrides, root=root, quiet=True).id


def test_configs_by_name(root):
    found = runs.compare_runs("curves/plain:slow", "curves/plain:fast", root=root)
    assert found.names == ("curves/plain:slow", "curves/plain:fast")
    assert found.config == {"speed": (1.0, 2.0)}
    assert (found.results, found.provenance, found.notes) == ({}, {}, ())
    chosen = runs.compare_runs("mine/first:first", "mine/first:second", root=root)
    assert chosen.config == {
        "optimizer": ("a", "b"),
        "optimizer.lr": (0.1, ABSENT),
        "optimizer.momentum": (ABSENT, 0.9),
    }


def test_runs_by_id_and_ending(root):
    old, new = run(root, lr="0.5"), run(root, lr="0.5", wd="0.25")
    found = runs.compare_runs(old, new[-6:], root=root)
    assert found.names == (old, new)
    assert found.config == {"wd": (0.0, 0.25)}
    floor = math.log10(5.0) ** 2
    assert found.results["steps"] == (4.0, 4.0)
    for name in ("last", "best"):
        expected = pytest.approx((floor + 1 / 4, floor + 1 / 2))
        assert found.results[f"val_loss ({name})"] == expected
    assert found.provenance == {}


def test_a_run_and_a_config(root):
    found = runs.compare_runs("curves/plain", run(root, lr="0.3"), root=root)
    assert found.config == {"lr": (0.1, 0.3)}
    assert found.results == {}


def test_the_best_is_finite_and_the_last_is_the_last(root):
    history = results.history(
        (
            {"step": n, "seconds": 0.5 * n, "val_loss": value, "val_x": math.nan}
            for n, value in enumerate((math.nan, 2.0, 3.0, math.inf), 1)
        ),
        "measured",
    )
    found = difference.figures(history.assign(spent_compute_seconds=4.0))
    assert found["val_loss (best)"] == 2.0
    assert found["val_loss (last)"] == math.inf
    assert found["val_x (best)"] == math.inf
    assert found["compute s"] == 4.0


def test_provenance_that_differs(root):
    old, new = run(root), run(root)
    path = root / "runs" / new / "provenance.json"
    origin = read_json(path)
    versions = {**origin["versions"], "jax": "0.0.1"}
    later = {**origin, "git_commit": "f" * 40, "versions": versions}
    write_json(path, {**later, "devices": {"H200": 8}, "earlier": [origin]})
    found = runs.compare_runs(old, new, root=root).provenance
    commit, jax = origin["git_commit"], origin["versions"]["jax"]
    assert found["git_commit"] == (str(commit), f"{commit}, {'f' * 40}")
    assert found["versions.jax"] == (jax, f"{jax}, 0.0.1")
    assert found["devices.H200"] == (ABSENT, "None, 8")
    assert found["sessions"] == ("1", "2")
    assert not {"started", "command", "versions.numpy"} & set(found)


def test_runs_that_have_not_ended_and_that_diverged(root):
    with pytest.raises(RuntimeError):
        run(root, ends="broken")
    broken = directory.list_runs(root)[-1].id
    with pytest.raises(Diverged):
        run(root, ends="diverged")
    diverged = directory.list_runs(root)[-1].id
    whole = run(root)
    found = runs.compare_runs(whole, broken, root=root)
    assert found.config == {"ends": ("well", "broken")}
    assert found.results == {}
    assert found.notes == (f"run {broken} is failed",)
    assert runs.compare_runs(whole, diverged, root=root).results["steps"] == (4.0, 2.0)


def test_a_run_whose_class_is_gone_is_compared_as_written(root):
    old, new = run(root), run(root, lr="0.2")
    path = root / "runs" / new / "config.json"
    data = read_json(path)
    data["class"] = "experiments.curves.experiment:Gone"
    data["values"]["extra"] = {"deep": 1}
    write_json(path, data)
    found = runs.compare_runs(old, new, root=root)
    assert found.config == {"lr": (0.1, 0.2), "extra.deep": (ABSENT, 1)}
    assert len(found.notes) == 1
    assert new in found.notes[0]


def test_the_command(root, capsys):
    old, new = run(root, lr="0.5"), run(root, lr="0.25")
    assert cli.main(["diff", old, new, "--root", str(root)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"lr +0\.5 +0\.25", text)
    assert re.search(r"steps +4 +4 ", text)
    assert re.search(r"val_error \(best\) +0\.0738559 +0\.0408356", text)
    assert "seed" not in text
    assert cli.main(["diff", old, old, "--root", str(root)]) == 0
    assert "The configs are equal." in capsys.readouterr().out


def test_names_that_are_not_there(root, capsys):
    assert cli.main(["diff", "curves/plan", "curves/plain", "--root", str(root)]) == 2
    assert "did you mean 'curves/plain'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no run 'abcdef'"):
        runs.compare_runs("abcdef", "curves/plain", root=root)
