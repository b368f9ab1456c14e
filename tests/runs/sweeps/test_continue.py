"""Sweeps that go on: after a kill at the worst place, a failure, with other options."""

import dataclasses
import socket
import sys

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import cli, sweeps
from hpcjax.runs.sweeps import study as studies
from hpcjax.runs.sweeps import worker
from tests.runs import papers
from tests.runs.sweeps.trials import (
    Ended,
    abandon,
    run,
    run_ids,
    sweep_of,
    take_all,
)


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


class Killed(BaseException):
    pass


def killed(*args, **kwargs):
    raise Killed


@pytest.mark.faults(17)
@pytest.mark.parametrize("place", ["write", "hold"])
@pytest.mark.parametrize("sampler", ["halton", "tpe", "gp"])
def test_a_kill_while_a_trial_is_taken_does_not_lose_it(
    root, monkeypatch, place, sampler
):
    varied = {"lr": "log(1e-3,1)", "wd": "uniform(0,1)"}
    sweep = sweep_of(varied=varied, sampler=sampler, trials=3)
    study = sweeps.create_study("s", sweep, root)
    with monkeypatch.context() as patch:
        where = {"write": studies.files, "hold": studies.lock}[place]
        patch.setattr(where, {"write": "write_json"}.get(place, place), killed)
        with pytest.raises(Killed), study.take():
            pass
    assert study.has_lost() == (place == "hold")
    assert sorted(take_all(sweeps.open_study("s", root))) == [0, 1, 2]


@pytest.mark.faults(17)
def test_a_trial_that_dies_while_its_end_is_written_is_taken_again(root, monkeypatch):
    study = sweeps.create_study("s", sweep_of(), root)
    with study.take() as trial, monkeypatch.context() as patch:
        patch.setattr(studies.files.pathlib.Path, "replace", killed)
        with pytest.raises(Killed):
            study.write(dataclasses.replace(trial, status="done", value=0.5))
    assert study.trials()[0].status == "running"
    assert study.has_lost()


@pytest.fixture
def mend(monkeypatch):
    """Has every trial of rate 0.1 fail, until this is called."""
    honest = worker.execute.ensure

    def ensure(config, texts, **options):
        if texts["lr"] == "0.1":
            raise RuntimeError("no such node")
        return honest(config, texts, **options)

    monkeypatch.setattr(worker.execute, "ensure", ensure)
    return lambda: monkeypatch.setattr(worker.execute, "ensure", honest)


@pytest.mark.quick("grid")
@pytest.mark.parametrize("sampler", ["grid", "tpe", "gp"])
def test_failed_trials_are_tried_again_only_when_asked(root, mend, sampler):
    options = {} if sampler == "grid" else {"sampler": sampler, "trials": 6}
    rates = "0.01,0.1" if sampler != "gp" else "0.01,0.1,1.0"
    sweep = sweep_of(varied={"lr": rates, "wd": "0.25,0.5"}, **options)
    first = run(sweep, root, name="s").dataset
    failed = (first["status"] == "failed").values
    assert failed.any()
    assert not failed.all()
    mend()
    again = run("s", root).dataset
    assert (again["status"] == first["status"]).all()
    mended = run("s", root, retry_failed=True).dataset
    assert (mended["status"] == "done").all()
    assert (mended["error"] == "").all()
    assert (mended["lr"] == first["lr"]).all()
    assert (mended["run"].values[~failed] == first["run"].values[~failed]).all()


def test_what_fails_again_says_so_and_may_be_tried_once_more(root, mend):
    sweep = sweep_of(varied={"lr": "0.1", "wd": "0.25,0.5"})
    for _ in range(2):
        result = run(sweep, root, name="s", retry_failed=True)
        assert "no such node" in result.dataset["error"].values[0]
        assert result.dataset["status"].values.tolist() == ["failed"] * 2
    mend()
    result = run(sweep, root, name="s", retry_failed=True)
    assert result.dataset["status"].values.tolist() == ["done"] * 2


def test_a_trial_that_was_given_up_has_all_attempts_again(root):
    study = sweeps.create_study("s", sweep_of(varied={"lr": "0.1,1.0"}), root)
    for _ in range(studies.ATTEMPTS * 2):
        abandon(study)
    assert abandon(study) is None
    assert [each.status for each in study.trials()] == ["failed"] * 2
    assert "died 3 times" in study.trials()[0].error
    study.retry_failed()
    for _ in range(studies.ATTEMPTS - 1):
        abandon(study)
    worker.work("s", root)
    assert [each.status for each in study.trials()] == ["done"] * 2


def test_what_another_worker_left_comes_after_what_is_new(root):
    study = sweeps.create_study("s", sweep_of(varied={"lr": "0.1,1.0"}), root)
    for status in ("waiting", "failed"):
        with study.take() as trial:
            study.write(dataclasses.replace(trial, status=status))
    study.retry_failed()
    assert take_all(study) == [0, 1]
    assert study.has_lost()


@pytest.mark.slow
def test_the_flag(root):
    args = ["sweep", "curves/plain", "ends=broken,missing", "--name", "s", "--quiet"]
    assert cli.main([*args, "--root", str(root)]) == 8
    assert len(run_ids(root)) == 2
    again = ["sweep", "s", "--quiet", "--root", str(root)]
    assert cli.main([*again]) == 8
    assert len(run_ids(root)) == 2
    assert cli.main([*again, "--retry-failed"]) == 8
    assert len(run_ids(root)) == 4


def halton(root, trials=3):
    sweep = sweep_of(varied={"lr": "log(1e-3,10)"}, sampler="halton", trials=trials)
    return run(sweep, root, name="s")


@pytest.mark.slow
def test_trials_of_a_sweep_that_is_there_may_grow(root, capsys):
    halton(root)
    args = ["sweep", "s", "--quiet", "--root", str(root), "--trials"]
    assert cli.main([*args, "5"]) == 0
    assert "the best of 5 trials" in capsys.readouterr().out
    assert len(run_ids(root)) == 5
    assert cli.main([*args, "4"]) == 2
    assert "sweep s has 5 trials: got 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--sampler", "random"], "sampler: halton -> random"),
        (["--seed", "1"], "seed: 0 -> 1"),
        (["--by", "val_error"], "by: val_loss -> val_error"),
        (["--name", "t"], "leave out --name t"),
        (["lr=0.1,0.2", "wd=1"], "leave out lr=0.1,0.2 wd=1"),
    ],
)
def test_options_that_a_sweep_cannot_change_are_refused(root, args, words, capsys):
    halton(root)
    command = ["sweep", "s", *args, "--quiet", "--root", str(root)]
    assert cli.main(command) == 2
    assert words in capsys.readouterr().err
    assert len(run_ids(root)) == 3
    assert not (root / "sweeps/t").exists()


@pytest.mark.slow
def test_options_that_a_sweep_has_anyway_are_fine(root):
    halton(root)
    same = ["--sampler", "halton", "--seed", "0", "--by", "val_loss", "--name", "s"]
    command = ["sweep", "s", *same, "--trials", "3", "--quiet", "--root", str(root)]
    assert cli.main(command) == 0


def test_a_grid_has_no_number_of_trials_to_change(root, capsys):
    run(sweep_of(), root, name="s")
    for trials in ("3", "9"):
        args = ["sweep", "s", "--trials", trials, "--quiet", "--root", str(root)]
        assert cli.main(args) == 2
        assert "a grid has its own number" in capsys.readouterr().err


def test_workers_that_have_started_are_stopped_when_another_cannot(root):
    stopped = []

    class Job(Ended):
        def cancel(self):
            stopped.append(self)

    def launcher(name, root, index):
        if index == 2:
            raise OSError("no more processes")
        return Job()

    with pytest.raises(OSError, match="no more processes"):
        run(sweep_of(), root, parallel=3, launcher=launcher)
    assert len(stopped) == 2


@pytest.mark.parametrize(
    ("own", "got"),
    [
        ("{'lr': 0.1}", "lr: 0.1"),
        ("{'seed': (0, 1), 'ends': 'well'}", "ends: 'well'"),
        ("{'lr': ()}", "lr: ()"),
        ("('lr',)", "('lr',)"),
    ],
)
def test_a_config_files_sweep_that_is_none(root, own, got, capsys):
    file = root / "configs/curves/plain.py"
    file.write_text(f"{file.read_text()}\nsweep = {own}\n")
    assert cli.main(["sweep", "curves/plain", "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert "list the values of each key, such as {'lr': (0.1, 0.3)}: got" in error
    assert error.endswith(f"got {got}\n")
    assert not (root / "sweeps").exists()


def test_tpe_alone_needs_its_package(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    sweep = sweep_of(varied={"lr": "0.1,1.0"})
    assert run(sweep, root).successes == 2
    with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[sweep\]'"):
        run(dataclasses.replace(sweep, sampler="tpe", trials=2), root)


def test_a_trial_that_waits_in_the_hands_of_another_worker_is_left_to_it(root):
    study = sweeps.create_study("s", sweep_of(varied={"lr": "0.1,1.0"}), root)
    with study.take() as first:
        study.write(dataclasses.replace(first, status="waiting"))
        assert study.held_by() == [socket.gethostname()]
        with study.take() as second, study.take() as third:
            assert (second.cell, third) == (1, None)
    with study.take() as again:
        assert again.cell == 0
