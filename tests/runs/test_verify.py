"""Damage of every part of a run directory is told; looking changes nothing."""

import json
import os
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import data, runs, train
from hpcjax.core import ConfigError
from hpcjax.runs import _verify, cli, directory, execute, results
from hpcjax.runs.metrics import Metrics
from tests.runs import papers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = papers.make(tmp_path_factory.mktemp("verify"))
    run = execute.run("curves/plain", root=root, quiet=True)
    with train.Checkpoints(run.directory / "checkpoints") as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, {"a": jnp.arange(3.0)}, {})
    return root


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (run,) = directory.list_runs(tmp_path)
    return run


def look(run):
    found = runs.verify(run.id, root=run.path.parents[1])
    return {f.part: f for f in found}, _verify.exit_status(found)


def contents(folder):
    return {
        path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_a_whole_run_is_good_and_left_as_it_is(run):
    before = contents(run.path)
    found, status = look(run)
    assert status == 0
    assert {f.verdict for f in found.values()} == {"ok"}
    assert set(found) == {
        "config.json",
        "provenance.json",
        "metrics.jsonl",
        "status",
        "result.nc",
        "log.txt",
        "checksums.json",
        "checkpoints/2",
        "checkpoints/4",
    }
    assert found["metrics.jsonl"].detail == "8 records, up to step 4"
    assert "curves/plain:slow" in found["config.json"].detail
    assert "eval_step 4" in found["result.nc"].detail
    assert "1 arrays" in found["checkpoints/2"].detail
    assert contents(run.path) == before


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


DAMAGE = {
    "config.json": [
        lambda p: p.unlink(),
        halve,
        lambda p: p.write_text("[]"),
        lambda p: p.write_bytes(b"\xff\xfe"),
        lambda p: edit(p, '"wd"', '"wdd"'),
        lambda p: edit(p, "curves.experiment:Config", "curves.experiment:Confog"),
    ],
    "provenance.json": [
        lambda p: p.unlink(),
        halve,
        lambda p: p.write_text('{"earlier": 3}'),
        lambda p: edit(p, '"config_digest": "', '"config_digest": "0'),
    ],
    "metrics.jsonl": [
        lambda p: p.unlink(),
        lambda p: edit(p, '"step": 2', '"step": x'),
        lambda p: edit(p, '"step": 3', '"stop": 3'),
        lambda p: p.write_bytes(b"".join(p.read_bytes().splitlines(True)[:4])),
    ],
    "status": [lambda p: p.unlink(), lambda p: p.write_text("dane\n")],
    "result.nc": [
        lambda p: p.unlink(),
        halve,
        lambda p: p.write_bytes(b"\0" * 5000),
        lambda p: edit_bytes(p, b"measured", b"measurad"),
    ],
    "log.txt": [lambda p: p.write_bytes(b"\xff\xff")],
}


def edit_bytes(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("part", "damage"), [(part, each) for part, ways in DAMAGE.items() for each in ways]
)
def test_damage_of_a_file_is_told(run, part, damage):
    damage(run.path / part)
    found, status = look(run)
    assert found[part].verdict == "bad", found[part]
    assert found[part].detail
    assert status == 3
    others = {name for name, f in found.items() if f.verdict == "bad"} - {part}
    # The provenance tells that the config is another one.
    assert others <= ({"provenance.json"} if part == "config.json" else set())


def other_digit(path):
    """Changes a number to another one, which every reader takes."""
    text = path.read_text()
    found = re.search(r'"loss": \d\.(\d)', text)
    at = found.start(1)
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def other_result(path):
    history = results.read(path)
    results.write(history.assign(loss=history["loss"] / 2), path, {})


@pytest.mark.parametrize(
    ("part", "change"),
    [("metrics.jsonl", other_digit), ("result.nc", other_result)],
)
def test_a_number_that_was_changed_is_told_and_the_run_not_used(run, part, change):
    root = run.path.parents[1]
    digest = run.sessions()[-1]["config_digest"]
    assert directory.find_run(root, digest).id == run.id
    change(run.path / part)
    found, status = look(run)
    assert found[part].verdict == "bad"
    assert found[part].detail == "changed since the run ended"
    assert found["checksums.json"].detail == "1 files differ"
    assert status == 3
    assert directory.find_run(root, digest) is None


def test_a_number_of_a_diverged_run_that_was_changed_is_told(run):
    run.set_status("diverged")
    assert look(run)[0]["checksums.json"].detail == "all files as sealed"
    other_digit(run.path / "metrics.jsonl")
    found, status = look(run)
    assert (found["metrics.jsonl"].verdict, status) == ("bad", 3)


def test_records_of_a_run_that_went_on_before_a_damaged_checkpoint_are_good(run):
    run.set_status("running")
    records = Metrics(run.path / "metrics.jsonl")
    records.path.unlink()
    with train.Checkpoints(run.path / "checkpoints") as checkpoints:
        for step in range(1, 5):
            records.write({"step": step, "loss": 1.0})
            if step in (2, 4):
                saved = {"records": records.mark()}
                checkpoints.save(step, {"a": jnp.arange(3.0)}, saved)
    assert look(run)[1] == 0
    damaged = (run.path / "checkpoints" / "4").rglob("*")
    data = [p for p in damaged if p.is_file() and p.name != "MANIFEST.json"]
    flip(max(data, key=lambda path: path.stat().st_size))
    records.rewind(2)
    records.write({"step": 3, "loss": 1.0})
    found, status = look(run)
    assert found["checkpoints/4"].verdict == "bad"
    assert found["metrics.jsonl"].verdict == "ok"
    assert status == 5
    edit(records.path, '"loss": 1.0', '"loss": 7.0')
    assert look(run)[0]["metrics.jsonl"].verdict == "bad"


def test_a_run_without_checksums_is_told(run):
    (run.path / "checksums.json").unlink()
    found, status = look(run)
    assert (found["checksums.json"].verdict, status) == ("note", 0)
    (run.path / "checksums.json").write_text("[")
    found, status = look(run)
    assert (found["checksums.json"].verdict, status) == ("bad", 3)


@pytest.mark.parametrize("damage", [flip, halve, lambda p: p.unlink()])
def test_damage_of_a_checkpoint_is_told(run, damage):
    files = [p for p in (run.path / "checkpoints" / "2").rglob("*") if p.is_file()]
    damage(max(files, key=lambda p: (p.name != "MANIFEST.json", p.stat().st_size)))
    found, status = look(run)
    assert found["checkpoints/2"].verdict == "bad"
    assert "step 2" in found["checkpoints/2"].detail
    assert found["checkpoints/4"].verdict == "ok"
    assert status == 5
    (run.path / "status").unlink()
    assert look(run)[1] == 5


@pytest.mark.parametrize("steps", [("4",), ("2", "4")])
def test_a_checkpoint_without_manifest_is_bad_unless_it_was_trusted(run, steps):
    for step in steps:
        (run.path / "checkpoints" / step / "MANIFEST.json").unlink()
    found, status = look(run)
    for step in steps:
        assert found[f"checkpoints/{step}"].verdict == "bad"
        assert "loads only with --trust" in found[f"checkpoints/{step}"].detail
    assert status == 5
    run.write_provenance({**run.sessions()[-1], "trusted": True})
    run.seal()
    found, status = look(run)
    assert {found[f"checkpoints/{step}"].verdict for step in steps} == {"foreign"}
    assert status == 0
    (run.path / "provenance.json").write_text("{")
    assert look(run)[1] == 5


def test_rows_on_disk_are_those_of_the_newest_checkpoint(run):
    folder, rows = run.path / "checkpoints", np.arange(20.0).reshape(10, 2)
    path = folder / "rows" / "params.table"
    with data.RowFile.build(path, [rows], (10, 2), "f8", 4) as file:
        file[[0]] = rows[:1] + 1
        saved = {"rows": file.flush()}
        with train.Checkpoints(folder) as checkpoints:
            checkpoints.save(4, {"params": {"table": jnp.zeros((1, 2))}}, saved)
        file.flush()  # a killed run may be ahead of its checkpoint
    found, status = look(run)
    assert (found["checkpoints/rows/params.table"].verdict, status) == ("ok", 0)
    assert "checkpoints/rows" not in found
    whole = path.read_bytes()
    place = whole.rindex(rows[8:].tobytes())
    for damage, words in (
        (lambda: os.truncate(path, len(whole) - 1), f"found {len(whole) - 1} bytes"),
        (lambda: path.write_bytes(whole[:place]), "expected .* bytes: found"),
        (
            lambda: path.write_bytes(whole[:place] + b"?" + whole[place + 1 :]),
            "expected partition 2 of state 3: found other bytes",
        ),
        (path.unlink, "no such file"),
    ):
        damage()
        found, status = look(run)
        told = found["checkpoints/rows/params.table"]
        assert (told.verdict, status) == ("bad", 5)
        assert re.search(words, told.detail)
        path.write_bytes(whole)


def trained(run):
    """Makes the run's result one of our loop, which has compiled its step."""
    history = results.read(run.path / "result.nc")
    results.write(history.assign(compile_seconds=1.0), run.path / "result.nc", {})
    run.seal()


@pytest.mark.parametrize("gone", [("4",), ("2", "4"), ("",)])
def test_a_run_that_is_done_has_a_checkpoint_of_its_last_step(run, gone):
    trained(run)
    assert look(run)[1] == 0
    for name in gone:
        shutil.rmtree(run.path / "checkpoints" / name)
    found, status = look(run)
    assert found["checkpoints/4"].verdict == "bad"
    assert found["checkpoints/4"].detail == "missing, and the status is done"
    assert status == 5
    run.set_status("running")
    assert look(run)[1] == 0


def test_a_run_that_is_done_has_the_records_of_its_result(run):
    shutil.rmtree(run.path / "checkpoints")  # as of a loop that saves none
    assert look(run)[1] == 0
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join(lines[:6]))
    found, status = look(run)
    assert status == 3
    assert found["metrics.jsonl"].detail.endswith("step 3; the run has taken 4 steps")
    path.unlink()
    found, status = look(run)
    assert status == 3
    assert found["metrics.jsonl"].detail == "missing, and the run has taken 4 steps"
    run.set_status("running")
    assert look(run)[1] == 0


def test_what_a_kill_leaves_is_no_damage(run):
    run.set_status("running")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    for name in (".saving-6", ".replaced-2"):
        (run.path / "checkpoints" / name).mkdir()
    for name in ("result.nc", "provenance.json"):
        (run.path / name).unlink()
    (run.path / ".result.nc.x7").touch()
    (run.path / "lock").write_text(json.dumps({"pid": 2**22 + 1, "host": "here"}))
    os.utime(run.path / "lock", (0, 0))
    (run.path / "mine.txt").touch()
    (run.path / "log.1.txt").write_text("one\ntwo\n")
    found, status = look(run)
    assert status == 0
    notes = {name for name, f in found.items() if f.verdict == "note"}
    assert notes == {
        "metrics.jsonl",
        "status",
        "checkpoints/.saving-6",
        "checkpoints/.replaced-2",
        ".result.nc.x7",
        "lock",
        "mine.txt",
    }
    assert "cut off" in found["metrics.jsonl"].detail
    assert found["log.1.txt"].detail == "2 lines"
    assert found["mine.txt"].detail == "not checked"
    assert found["status"].detail.startswith("interrupted: it was killed")


def test_a_run_that_is_held_says_so(run):
    with run.hold_lock():
        found, status = look(run)
    assert status == 0
    assert "may change" in found["status"].detail
    assert found["lock"].detail == "of a living process"


def test_the_command(run, capsys, monkeypatch):
    root = run.path.parents[1]
    monkeypatch.chdir(root.parent)
    ending = run.id[-6:]
    relative = ["--root", os.fspath(root.relative_to(root.parent))]
    assert cli.main(["verify", ending, *relative]) == 0
    text = capsys.readouterr().out
    assert re.search("checkpoints/4 +ok", text)
    assert "Nothing is damaged." in text
    flip(run.path / "checkpoints" / "4" / "MANIFEST.json")
    assert cli.main(["verify", ending, *relative]) == 5
    assert "Bad: checkpoints/4\n" in capsys.readouterr().out
    assert cli.main(["verify", "nothing", *relative]) == 2


def test_only_runs_can_be_verified(run):
    with pytest.raises(ConfigError, match="no run 'x'"):
        runs.verify("x", root=run.path.parents[1])
    with pytest.raises(ConfigError, match=r"no run '\.\./x'"):
        runs.verify("../x", root=run.path.parents[1])
