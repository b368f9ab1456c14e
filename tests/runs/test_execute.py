"""One run: the files it leaves, and how each end is told."""

import contextlib
import errno
import json
import pathlib
import sys
import types

import pytest
import xarray as xr

from hpcjax.core import (
    ConfigError,
    DataMissing,
    DiskFull,
    Diverged,
    files,
    provenance,
)
from hpcjax.runs import _verify, cli, directory, discover, execute, lock
from hpcjax.runs import config as configs
from tests.runs import papers

FILES = {
    "config.json",
    "provenance.json",
    "metrics.jsonl",
    "result.nc",
    "checksums.json",
    "log.txt",
    "status",
}


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


def only_run(root):
    (run,) = directory.list_runs(root)
    return run


def test_a_run_leaves_its_files(root):
    done = execute.run("curves/plain:fast", {"lr": "0.2"}, root=root, quiet=True)
    assert done.directory == root / "runs" / done.id
    assert {path.name for path in done.directory.iterdir()} == FILES
    folder = directory.open_run(root, done.id)
    assert folder.status == "done"
    assert folder.read_config()["values"]["lr"] == 0.2
    assert folder.read_config()["name"] == "curves/plain:fast"
    assert [r["step"] for r in folder.records()] == [1, 1, 2, 2, 3, 3, 4, 4]
    xr.testing.assert_identical(
        execute.load_result(done.id, root=root).drop_attrs(),
        done.dataset.drop_attrs(),
    )


@pytest.mark.faults(24)
def test_a_result_carries_where_it_came_from(root):
    done = execute.run("curves/plain", {"seed": "5"}, root=root, quiet=True)
    attrs = execute.load_result(done.id, root=root).attrs
    assert attrs["source"] == "measured"
    origin = json.loads(attrs["provenance"])
    assert origin == json.loads((done.directory / "provenance.json").read_text())
    assert origin["seed"] == 5
    assert origin["devices"] == {"cpu": 8}
    assert origin["versions"]["jax"]
    assert len(origin["config_digest"]) == 16
    assert directory.find_run(root, origin["config_digest"]).id == done.id


@pytest.mark.parametrize(
    ("ends", "error", "status"),
    [
        ("diverged", Diverged, "diverged"),
        ("missing", DataMissing, "failed"),
        ("broken", RuntimeError, "failed"),
        ("stopped", KeyboardInterrupt, "preempted"),
    ],
)
def test_each_end_is_told_and_leaves_readable_files(root, ends, error, status):
    with pytest.raises(error):
        execute.run("curves/plain", {"ends": ends}, root=root, quiet=True)
    run = only_run(root)
    assert run.status == status
    assert [r["step"] for r in run.records()] == [1, 1, 2, 2]
    assert json.loads((run.path / "provenance.json").read_text())["versions"]
    assert not (run.path / "lock").exists()
    # Tables use a run that has diverged as it is.
    assert run.changed() == ({} if status == "diverged" else None)
    with pytest.raises(ConfigError, match=f"has no result: it is {status}"):
        execute.load_result(run.id, root=root)


@pytest.mark.parametrize(
    ("ends", "code"), [("diverged", 4), ("missing", 3), ("stopped", 130)]
)
def test_each_end_has_its_exit_status(root, ends, code):
    args = ["run", "curves/plain", "--root", str(root), "--quiet", f"ends={ends}"]
    assert cli.main(args) == code


@pytest.mark.parametrize("ends", ["well", "diverged"])
def test_versions_are_of_all_that_the_run_imported(root, monkeypatch, ends):
    honest = directory.RunDirectory.metrics

    def metrics(self):
        monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
        return honest(self)

    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.setattr(directory.RunDirectory, "metrics", metrics)
    with contextlib.suppress(Diverged):
        execute.run("curves/plain", {"ends": ends}, root=root, quiet=True)
    (session,) = only_run(root).sessions()
    assert session["versions"]["scikit-learn"]
    assert only_run(root).changed() == {}


def test_a_root_outside_of_git_is_told_once_and_known_by_its_files(root, caplog):
    with caplog.at_level("INFO"):
        for _ in range(2):
            execute.run("curves/plain", root=root, quiet=True)
    told = f"{root} is in no git repository"
    assert sum(told in message for message in caplog.messages) == 1
    first, second = (
        run.sessions()[0]["root_files"] for run in directory.list_runs(root)
    )
    assert first == second
    assert len(first) == 32


def test_a_bad_override_makes_no_directory(root):
    with pytest.raises(ConfigError, match="did you mean 'speed'"):
        execute.run("curves/plain", {"sped": "1"}, root=root)
    assert not (root / "runs").exists()


@pytest.mark.faults(3)
def test_resuming_may_change_what_the_config_lists(root):
    done = execute.run("curves/plain", root=root, quiet=True)
    again = execute.run(
        "curves/plain", {"train.steps": "6"}, root=root, resume=done.id, quiet=True
    )
    assert again.id == done.id
    assert only_run(root).read_config()["values"]["train"]["steps"] == 6
    first, second = only_run(root).sessions()
    assert first["config_digest"] != second["config_digest"]
    attrs = execute.load_result(done.id, root=root).attrs
    assert json.loads(attrs["provenance"])["earlier"] == [first]
    with pytest.raises(ConfigError, match=r"lr: 0\.1 -> 0\.3"):
        execute.run("curves/plain", {"lr": "0.3"}, root=root, resume=done.id)


class Killed(BaseException):
    """What a kill does to a process: nothing of it goes on."""


@pytest.mark.faults(3)
@pytest.mark.parametrize("place", ["unseal", "set_status", "write_config", "claimed"])
def test_a_kill_as_a_done_run_is_resumed_leaves_no_end_of_another_config(
    root, monkeypatch, place
):
    done = execute.run("curves/plain", root=root, quiet=True)
    old = discover.load("curves/plain", {}, root)
    longer = discover.load("curves/plain", {"train.steps": "6"}, root)

    def kill(*_, **__):
        raise Killed

    if place != "claimed":
        monkeypatch.setattr(directory.RunDirectory, place, kill)
    with pytest.raises(Killed), directory.claim(root, longer, resume=done.id):
        kill()
    monkeypatch.undo()
    run = only_run(root)
    assert run.changed() in ({}, None)
    written = configs.from_json(run.read_config(), type(old.config))
    finished = run.status == "done"
    assert written == (longer if place == "claimed" else old).config
    assert finished == (place in ("unseal", "set_status"))
    for loaded in (old, longer):
        found = directory.find_run(root, configs.digest(loaded.config))
        assert (found is not None) == (finished and loaded is old)
    assert _verify.exit_status(_verify.verify(done.id, root=root)) == 0


@pytest.mark.faults(3)
def test_a_fork_names_its_parent(root):
    done = execute.run("curves/plain", root=root, quiet=True)
    child = execute.run(
        "curves/plain", {"lr": "0.3"}, root=root, resume=done.id, fork=True, quiet=True
    )
    origin = json.loads((child.directory / "provenance.json").read_text())
    assert origin["parent"] == done.id
    assert directory.open_run(root, done.id).read_config()["values"]["lr"] == 0.1


def fill_the_disk(monkeypatch):
    def to_netcdf(self, path, **_):
        pathlib.Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_netcdf", to_netcdf)


@pytest.mark.faults(18)
def test_a_full_disk_at_the_result_ends_the_run_as_failed(root, monkeypatch):
    fill_the_disk(monkeypatch)
    with pytest.raises(DiskFull, match=r"result\.nc: \d+ bytes free"):
        execute.run("curves/plain", root=root, quiet=True)
    run = only_run(root)
    assert run.status == "failed"
    assert len(run.records()) == 8
    assert not list(run.path.glob("*result.nc*"))
    assert cli.main(["run", "curves/plain", "--root", str(root), "--quiet"]) == 6


def test_a_full_disk_leaves_the_old_result(root, monkeypatch):
    done = execute.run("curves/plain", root=root, quiet=True)
    before = (done.directory / "result.nc").read_bytes()
    fill_the_disk(monkeypatch)
    with pytest.raises(DiskFull):
        execute.run("curves/plain", root=root, resume=done.id, quiet=True)
    assert (done.directory / "result.nc").read_bytes() == before
    assert sorted(p.name for p in done.directory.glob("*result.nc*")) == ["result.nc"]


def test_the_last_interrupted_run_of_a_config_can_be_meant(root):
    first = execute.run("curves/plain", root=root, resume="last", quiet=True)
    with pytest.raises(KeyboardInterrupt):
        execute.run("curves/plain", {"ends": "stopped"}, root=root, quiet=True)
    (cut,) = [r for r in directory.list_runs(root) if r.status == "preempted"]
    with pytest.raises(KeyboardInterrupt):
        execute.run(
            "curves/plain", {"ends": "stopped"}, root=root, resume="last", quiet=True
        )
    assert len(cut.sessions()) == 2  # it was this one that went on
    another = execute.run("curves/plain", root=root, resume="last", quiet=True)
    assert another.id != first.id  # one that has ended is not continued


def killed_at_once(root):
    """Leaves what a run leaves that is killed as it looks for its devices."""
    loaded = discover.load("curves/plain", {}, root)
    run = directory.create(root, loaded.title, loaded.config)
    files.write_json(run.path / "lock", {**lock.me(), "pid": 2**22 + 1})
    return run


@pytest.mark.parametrize("how", ["id", "last", "ensure"])
def test_a_run_killed_before_its_first_session_begins_in_its_folder(root, how):
    cut = killed_at_once(root)
    assert (cut.status, cut.standing) == ("running", "interrupted")
    with pytest.raises(ConfigError, match="has no result: it is interrupted"):
        execute.load_result(cut.id, root=root)
    if how == "ensure":
        execute.ensure("curves/plain", root=root, quiet=True)
    else:
        resume = cut.id if how == "id" else "last"
        execute.run("curves/plain", root=root, resume=resume, quiet=True)
    assert only_run(root).id == cut.id
    assert (cut.status, len(cut.sessions())) == ("done", 1)


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "preempted"), (OSError, "failed")]
)
def test_a_run_stopped_before_its_first_session_says_so(
    root, monkeypatch, error, status
):
    def collect(**_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(provenance, "collect", collect)
        with pytest.raises(error):
            execute.run("curves/plain", root=root, quiet=True)
    cut = only_run(root)
    assert cut.status == status
    execute.run("curves/plain", root=root, resume="last", quiet=True)
    assert (only_run(root).id, cut.status) == (cut.id, "done")
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "collect", collect)
        with pytest.raises(error):
            execute.run("curves/plain", root=root, resume=cut.id, quiet=True)
    assert cut.status == "done"  # as it was


def test_a_failed_run_is_the_last_one_too(root):
    """As is one whose neighbour died: it ends as failed."""
    with pytest.raises(RuntimeError):
        execute.run("curves/plain", {"ends": "broken"}, root=root, quiet=True)
    with pytest.raises(RuntimeError):
        execute.run(
            "curves/plain", {"ends": "broken"}, root=root, resume="last", quiet=True
        )
    assert len(only_run(root).sessions()) == 2


def test_a_trusted_state_is_no_clean_run(root):
    done = execute.run("curves/plain", root=root, quiet=True)
    path = done.directory / "provenance.json"
    origin = json.loads(path.read_text())
    found = directory.find_run(root, origin["config_digest"])
    assert found.id == done.id
    path.write_text(json.dumps({**origin, "trusted": True}))
    assert directory.find_run(root, origin["config_digest"]) is None
