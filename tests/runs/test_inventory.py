"""Runs at a glance: what is listed, what is left out, and what may be deleted."""

import io
import json
import os
import re
import shutil

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import (
    _verify,
    cli,
    directory,
    execute,
    inventory,
    list_commands,
    tags,
)
from tests.runs import papers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = papers.make(tmp_path_factory.mktemp("inventory"))
    execute.run("curves/plain", root=root, quiet=True)
    execute.run("curves/plain", {"train.steps": "2"}, root=root, quiet=True)
    return root


def runs_of(root):
    return [entry.id for entry in inventory.list_runs(root)]


def test_what_is_told_of_a_run(root):
    first, second = inventory.list_runs(root)
    assert first.title.startswith("curves/plain")
    assert (first.state, first.made_by) == ("done", "this code")
    last = [r for r in directory.RunDirectory(first.path).records() if "val_loss" in r]
    assert first.scores["loss"] == last[-1]["val_loss"]
    assert 0 <= first.days < 1
    whole = sum(p.stat().st_size for p in first.path.rglob("*") if p.is_file())
    assert first.bytes == whole
    (second.path / "status").write_text("running\n")
    assert [e.state for e in inventory.list_runs(root)] == ["done", "interrupted"]
    found = inventory.list_runs(root, "curves", "interrupted")
    assert [entry.id for entry in found] == [second.id]
    (second.path / "status").write_text("?")
    (found,) = inventory.list_runs(root, state="damaged")
    assert (found.id, found.made_by) == (second.id, "unknown")
    (second.path / "status").write_text("done\n")
    assert inventory.list_runs(root, "jorge") == []
    with pytest.raises(ConfigError, match=r"unknown state 'dome'.*'done'"):
        inventory.list_runs(root, state="dome")


def test_the_list_as_a_command(root, capsys):
    assert cli.main(["list", "--runs", "--root", os.fspath(root)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in runs_of(root))
    assert "2 runs" in out
    assert f"loss {inventory.list_runs(root)[0].scores['loss']:.4g}" in out
    head, *lines = [line for line in out.splitlines() if re.search("age| h ", line)]
    end = head.index("age") + len("age")  # numbers end where their column's name does
    assert len(lines) == 2
    assert all(line[end - 2 : end] == " h" for line in lines)
    assert cli.main(["list", "--state", "done", "--root", os.fspath(root)]) == 2


def test_a_run_of_a_committed_table_shows_how_many_claims_hold(root, capsys):
    listed = ["list", "--runs", "--root", os.fspath(root)]
    assert cli.main(listed) == 0
    assert "claims" not in capsys.readouterr().out
    first, second = runs_of(root)
    results = root / "experiments/curves/results"
    results.mkdir()
    record = {
        "table": "curves/speed",
        "claims": {"fast": {"holds": True}, "small": {"holds": False}},
        "runs": [{"id": first}, {"id": first}, {"id": "gone"}],
    }
    (results / "speed.cpu.json").write_text(json.dumps(record))
    (results / "other.cpu.json").write_text("{}")  # is no record, and stops nobody
    found = {entry.id: entry.verdicts for entry in inventory.list_runs(root)}
    assert found == {first: ("curves/speed 1 of 2",), second: ()}
    assert cli.main(listed) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{first} .* curves/speed 1 of 2 *\n", out)
    assert out.count("curves/speed") == 1
    shutil.rmtree(results)


def test_tags_find_runs_and_are_no_part_of_the_config(root, capsys):
    command = ["run", "curves/plain", "train.steps=5", "--quiet", "--root", str(root)]
    assert cli.main([*command, "--tag", "poster", "--tag", "draft-2"]) == 0
    assert cli.main(command) == 0
    one, other = (
        directory.RunDirectory(e.path) for e in inventory.list_runs(root)[-2:]
    )
    assert tags.read_tags(one.path) == ("poster", "draft-2")
    assert one.read_config() == other.read_config()
    assert _verify.exit_status(_verify.verify(one.id, root=root)) == 0
    capsys.readouterr()
    asked = ["list", "--runs", "--root", str(root), "--tag"]
    assert cli.main([*asked, "poster"]) == 0
    out = capsys.readouterr().out
    assert one.id in out
    assert other.id not in out
    assert cli.main([*asked, "poster", "--tag", "final"]) == 0
    assert capsys.readouterr().out == "0 runs, 0.0 MB\n"
    # A resumed run keeps its tags, and may have more.
    assert cli.main([*command, "--resume", one.id, "--tag", "final"]) == 0
    assert tags.read_tags(one.path) == ("poster", "draft-2", "final")
    assert cli.main([*command, "--tag", "a b"]) == 2
    assert "tag may hold only" in capsys.readouterr().err
    delete = ["list", "--runs", "--delete", "--yes", "--root", str(root), "--tag"]
    assert cli.main([*delete, "poster"]) == 0
    assert one.id not in runs_of(root)
    inventory.delete(e for e in inventory.list_runs(root) if e.id == other.id)


def test_deleting_needs_a_filter_an_answer_and_a_free_run(root, monkeypatch, capsys):
    more = execute.run("curves/plain", {"train.steps": "3"}, root=root, quiet=True)
    folder = directory.RunDirectory(more.directory)
    folder.set_status("failed")
    before = runs_of(root)
    delete = ["list", "--runs", "--delete", "--root", os.fspath(root)]
    assert cli.main(delete) == 2
    assert "needs a paper, a --state or a --tag" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main([*delete, "--state", "failed"]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(list_commands.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert cli.main([*delete, "--state", "failed"]) == 0
    with folder.hold_lock():
        assert cli.main([*delete, "curves", "--yes"]) == 2
    assert runs_of(root) == before
    (folder.path / "checkpoints").mkdir(exist_ok=True)
    (folder.path / "checkpoints" / "x").touch()
    assert cli.main([*delete, "--state", "failed", "--yes"]) == 0
    assert runs_of(root) == before[:2]


def test_a_paper_in_place_of_a_table_is_told_what_lists_its_tables(capsys):
    assert cli.main(["table", "jorge"]) == 2
    assert "`hpcjax list jorge` names its tables" in capsys.readouterr().err
    assert cli.main(["list", "jorge"]) == 0
    out = capsys.readouterr().out
    assert "jorge/steps" in out
    assert "kaisa" not in out
