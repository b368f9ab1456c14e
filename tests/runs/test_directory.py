"""Run directories: creating, finding, claiming."""

import dataclasses
import logging
import os
import pathlib
import re
from typing import ClassVar

import pytest

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, RunBusy
from hpcjax.runs import config as configs
from hpcjax.runs import directory, discover
from tests.runs.example_config import ExampleConfig, SgdConfig

CONFIG = ExampleConfig(optimizer=SgdConfig(lr=0.3))


def loaded(config=CONFIG, name="paper/some"):
    return discover.Loaded(name=name, variant="sgd", config=config, base=config)


def test_create(tmp_path):
    run = directory.create(tmp_path, "paper/some:sgd", CONFIG)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-paper-some-sgd-[0-9a-f]{6}", run.id)
    assert run.path == tmp_path / "runs" / run.id
    assert run.status == "running"
    assert run.parent is None
    assert configs.from_json(run.read_config()) == CONFIG
    assert run.read_config()["name"] == "paper/some:sgd"
    assert [again.id for again in directory.list_runs(tmp_path)] == [run.id]


@pytest.mark.parametrize("name", ["../x", "a/../../b", "a b", "", ".x", "a\x00b"])
def test_hostile_config_names(tmp_path, name):
    with pytest.raises(ConfigError):
        directory.create(tmp_path, name, CONFIG)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("run_id", ["../x", "/etc", "a/b", "..", "", "a\nb"])
def test_hostile_run_ids(tmp_path, run_id):
    with pytest.raises(ConfigError):
        directory.open_run(tmp_path, run_id)


def test_open(tmp_path):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    assert directory.open_run(tmp_path, run.id).path == run.path
    assert directory.open_run(tmp_path, run.id[-6:]).path == run.path
    with pytest.raises(ConfigError, match=f"did you mean '{run.id}'"):
        directory.open_run(tmp_path, run.id + "0")
    with pytest.raises(ConfigError, match="no run 'x'"):
        directory.open_run(tmp_path / "empty", "x")


def test_a_run_that_is_a_link_out_of_the_root(tmp_path):
    run = directory.create(tmp_path / "elsewhere", "paper/some", CONFIG)
    (tmp_path / "root/runs").mkdir(parents=True)
    (tmp_path / "root/runs/linked").symlink_to(run.path)
    with pytest.raises(ConfigError, match="leads out of"):
        directory.open_run(tmp_path / "root", "linked")


def test_status(tmp_path):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    for word in ("running", "done", "failed", "preempted", "diverged"):
        run.set_status(word)
        assert run.status == word
    with pytest.raises(ConfigError, match="status must be one of"):
        run.set_status("perhaps")
    (run.path / "status").write_text("don")
    with pytest.raises(DataFormatError, match="'don'"):
        _ = run.status


def test_log(tmp_path, caplog):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    with run.logging():
        logging.getLogger("hpcjax.somewhere").info("heard")
        logging.getLogger("elsewhere").warning("not heard")
    logging.getLogger("hpcjax.somewhere").warning("too late")
    text = (run.path / "log.txt").read_text()
    assert re.fullmatch(r"[\d-]+ [\d:,]+Z INFO hpcjax\.somewhere: heard\n", text)


def test_data_root(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCJAX_DATA", raising=False)
    assert directory.data_root(tmp_path) == tmp_path / ".cache" / "data"
    monkeypatch.setenv("HPCJAX_DATA", "/somewhere")
    assert directory.data_root(tmp_path) == pathlib.Path("/somewhere")


def finished(tmp_path, config, status="done", **session):
    run = directory.create(tmp_path, "paper/some", config)
    run.write_provenance({"config_digest": configs.digest(config), **session})
    (run.path / "result.nc").write_bytes(b"")
    run.set_status(status)
    return run


def test_find_run(tmp_path):
    digest = configs.digest(CONFIG)
    assert directory.find_run(tmp_path, digest) is None
    directory.create(tmp_path, "paper/some", CONFIG)
    finished(tmp_path, dataclasses.replace(CONFIG, seed=1))
    assert directory.find_run(tmp_path, digest) is None
    old, new = finished(tmp_path, CONFIG), finished(tmp_path, CONFIG)
    os.utime(old.path / "config.json", (1, 1))
    assert directory.find_run(tmp_path, digest).id == new.id
    for name in ("config.json", "provenance.json"):
        for damage in (
            "{",
            "[]",
            "[" * 100_000,
            '{"a": ' + "[" * 900 + "]" * 900 + "}",
        ):
            before = (new.path / name).read_text()
            (new.path / name).write_text(damage)
            assert directory.find_run(tmp_path, digest).id == old.id
            (new.path / name).write_text(before)
    assert directory.find_run(tmp_path, digest).id == new.id
    (new.path / "result.nc").unlink()
    assert directory.find_run(tmp_path, digest).id == old.id


def test_a_run_without_provenance_is_found_if_it_was_cut_off_at_once(tmp_path):
    digest = configs.digest(CONFIG)
    run = directory.create(tmp_path, "paper/some", CONFIG)
    assert directory.find_run(tmp_path, digest, ("running",)) is None  # just begins
    with run.hold_lock():
        assert directory.find_run(tmp_path, digest, ("running",)).id == run.id
        assert directory.find_run(tmp_path, digest, ("running",), free=True) is None
    for word, found in {"preempted": True, "failed": True, "diverged": False}.items():
        run.set_status(word)
        assert (directory.find_run(tmp_path, digest, (word,)) is not None) == found


def test_a_run_is_running_while_a_process_holds_it(tmp_path):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    with run.hold_lock():
        assert run.standing == "running"
    assert run.standing == "interrupted"
    run.set_status("failed")
    assert run.standing == "failed"
    assert run.again == f"hpcjax run runs/{run.id}/config.json --resume {run.id}"


def test_a_run_that_was_resumed_is_of_a_config_if_all_its_sessions_are(tmp_path):
    digest, other = configs.digest(CONFIG), "0" * 16
    for digests, found in (((digest,) * 2, True), ((other, digest), False)):
        run = finished(tmp_path, CONFIG)
        (run.path / "provenance.json").unlink()
        for each in digests:
            run.write_provenance({"config_digest": each})
        found_run = directory.find_run(tmp_path, digest)
        assert (found_run is not None and found_run.id == run.id) == found
        run.set_status("failed")


def test_a_run_on_other_devices_is_found_only_where_that_does_not_matter(tmp_path):
    digest = configs.digest(CONFIG)
    run = finished(tmp_path, CONFIG, used_devices=4)
    assert directory.find_run(tmp_path, digest).id == run.id
    assert directory.find_run(tmp_path, digest, devices=4).id == run.id
    assert directory.find_run(tmp_path, digest, devices=1) is None
    run.write_provenance({"config_digest": digest, "used_devices": 1})
    for devices in (1, 4):
        assert directory.find_run(tmp_path, digest, devices=devices) is None


def test_ends_that_count_can_be_chosen(tmp_path):
    digest = configs.digest(CONFIG)
    run = finished(tmp_path, CONFIG, status="diverged")
    (run.path / "result.nc").unlink()
    assert directory.find_run(tmp_path, digest) is None
    found = directory.find_run(tmp_path, digest, statuses=("done", "diverged"))
    assert found.id == run.id


def test_provenance_of_every_session_is_kept(tmp_path):
    run = directory.create(tmp_path, "paper/some", CONFIG)
    with pytest.raises(DataFormatError, match=r"provenance\.json"):
        run.sessions()
    assert run.write_provenance({"seed": 1}) == {"seed": 1}
    run.write_provenance({"seed": 2})
    written = run.write_provenance({"seed": 3})
    assert run.sessions() == [{"seed": 1}, {"seed": 2}, {"seed": 3}]
    assert files.read_json(run.path / "provenance.json") == written
    files.write_json(run.path / "provenance.json", {"earlier": [3]})
    with pytest.raises(DataFormatError, match="earlier must be"):
        run.sessions()


# Claiming a run


def test_claim_a_new_run(tmp_path):
    with directory.claim(tmp_path, loaded()) as run:
        assert (run.path / "lock").exists()
        assert run.read_config()["name"] == "paper/some:sgd"
    assert not (run.path / "lock").exists()
    with pytest.raises(ConfigError, match="fork needs"):
        directory.claim(tmp_path, loaded(), fork=True).__enter__()


def test_claim_to_resume(tmp_path):
    with directory.claim(tmp_path, loaded()) as run:
        pass
    longer = dataclasses.replace(CONFIG, steps=900)
    with directory.claim(tmp_path, loaded(longer), resume=run.id) as again:
        assert again.path == run.path
    assert configs.from_json(again.read_config()) == longer
    other = dataclasses.replace(longer, seed=7)
    with pytest.raises(ConfigError, match="seed: 0 -> 7"):
        directory.claim(tmp_path, loaded(other), resume=run.id).__enter__()
    assert configs.from_json(again.read_config()) == longer
    with (
        again.hold_lock(),
        pytest.raises(RunBusy),
        directory.claim(tmp_path, loaded(longer), resume=run.id),
    ):
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    steps: int = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedConfig:
    resumable: ClassVar[tuple[str, ...]] = ("train.steps",)

    train: Trained = Trained()


def test_a_resume_that_is_refused_changes_nothing(tmp_path):
    with directory.claim(tmp_path, loaded(TrainedConfig())) as run:
        for name in ("20", "100", ".saving-900"):
            (run.path / "checkpoints" / name).mkdir(parents=True)
    before = (run.path / "config.json").read_bytes()
    shorter = loaded(TrainedConfig(train=Trained(steps=99)))
    with pytest.raises(ConfigError, match="at least the 100 that the run has taken"):
        directory.claim(tmp_path, shorter, resume=run.id).__enter__()
    assert (run.path / "config.json").read_bytes() == before
    assert not (run.path / "lock").exists()
    enough = loaded(TrainedConfig(train=Trained(steps=100)))
    with directory.claim(tmp_path, enough, resume=run.id):
        assert run.read_config()["values"] == {"train": {"steps": 100}}


@pytest.mark.parametrize("step", ["set_status", "_copy"])
def test_a_folder_that_is_not_complete_is_no_run(tmp_path, monkeypatch, step):
    with directory.claim(tmp_path, loaded()) as run:
        (run.path / "checkpoints/1").mkdir(parents=True)
    owner = directory if step == "_copy" else directory.RunDirectory
    monkeypatch.setattr(owner, step, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        directory.claim(tmp_path, loaded(), resume=run.id, fork=True).__enter__()
    assert [each.id for each in directory.list_runs(tmp_path)] == [run.id]


def test_claim_to_fork(tmp_path):
    with directory.claim(tmp_path, loaded()) as run:
        run.metrics().write({"step": 1})
        (run.path / "checkpoints/1").mkdir(parents=True)
        for name in ("checkpoints/1/x", "trace-0.npz", "workers/1/trace-0.npz"):
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_text("state")
    other = dataclasses.replace(CONFIG, seed=7)
    with directory.claim(tmp_path, loaded(other), resume=run.id, fork=True) as child:
        assert child.path != run.path
        assert child.parent == run.id
        for name in ("checkpoints/1/x", "trace-0.npz", "workers/1/trace-0.npz"):
            assert (child.path / name).read_text() == "state"
        assert child.records() == [{"step": 1}]
        with run.hold_lock():
            pass
    assert run.parent is None
    with directory.claim(tmp_path, loaded(other), resume=child.id) as again:
        assert again.parent == run.id
