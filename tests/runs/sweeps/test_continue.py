"""Sweeps that go on: after a kill at the worst place, a failure, with other options."""

import subprocess
import sys

import pytest

from hpcjax.runs import cli, sweeps
from hpcjax.runs.sweeps import study as studies
from hpcjax.runs.sweeps import worker
from tests.runs import papers
from tests.runs.sweeps.trials import Ended, in_process, run, run_ids, sweep_of

pytest.importorskip("optuna")


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


class Killed(BaseException):
    pass


def killed(*args, **kwargs):
    raise Killed


def abandon(trial):
    """Has a trial belong to a process that has died."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    trial.held.set_user_attr("owner", {**studies.lock.me(), "pid": gone.pid})


def take_all(study):
    taken = []
    while (trial := study.take()) is not None:
        taken.append(tuple(trial.point.values()))
    return taken


@pytest.mark.faults(17)
def test_a_kill_between_entering_a_point_again_and_closing_it(root, monkeypatch):
    study = sweeps.create_study("s", sweep_of(), root)
    abandon(study.take())
    with monkeypatch.context() as patch:
        patch.setattr(study._optuna, "tell", killed)
        with pytest.raises(Killed):
            study.take()
    taken = take_all(sweeps.open_study("s", root))
    assert len(taken) == len(set(taken)) == 6
    assert not study.has_lost()


@pytest.mark.faults(17)
@pytest.mark.parametrize("lines", [0, 1])
def test_a_kill_while_a_point_is_taken_does_not_change_it(root, monkeypatch, lines):
    """Its parameters are a line of the journal each."""
    import optuna

    honest, written = optuna.Trial._suggest, []

    def suggest(self, name, distribution):
        if len(written) == lines:
            raise Killed
        written.append(name)
        return honest(self, name, distribution)

    varied = {"lr": "log(1e-3,1)", "wd": "uniform(0,1)"}
    sweep = sweep_of(varied=varied, sampler="halton", trials=3)
    study = sweeps.create_study("s", sweep, root)
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "_suggest", suggest)
        with pytest.raises(Killed):
            study.take()
    assert study.has_lost()
    taken = take_all(sweeps.open_study("s", root))
    assert sorted(taken) == sorted(tuple(each.values()) for each in sweep.points)


def test_a_trial_that_dies_while_it_is_told_is_not_done(root, monkeypatch):
    study = sweeps.create_study("s", sweep_of(), root)
    trial = study.take()
    monkeypatch.setattr(study._optuna, "tell", killed)
    with pytest.raises(Killed):
        study.tell(trial, 0.5, "a-run")
    assert study.outcomes()[0].status == "running"


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
    states = [trial.state.name for trial in sweeps.open_study("s", root)._trials()]
    assert states.count("FAIL") == failed.sum()
    assert states.count("COMPLETE") == failed.size


def test_what_fails_again_says_so_and_may_be_tried_once_more(root, mend):
    sweep = sweep_of(varied={"lr": "0.1", "wd": "0.25,0.5"})
    for expected in (2, 4, 6):
        result = run(sweep, root, name="s", retry_failed=True)
        assert "no such node" in result.dataset["error"].values[0]
        assert result.dataset["status"].values.tolist() == ["failed"] * 2
        assert len(sweeps.open_study("s", root)._trials()) == expected


def test_a_trial_that_was_given_up_has_all_attempts_again(root):
    study = sweeps.create_study("s", sweep_of(varied={"lr": "0.1,1.0"}), root)
    for _ in range(studies.ATTEMPTS * 2):
        abandon(study.take())
    assert take_all(study) == []
    assert [each.status for each in study.outcomes()] == ["failed"] * 2
    study.retry_failed()
    abandon(study.take())
    worker.work("s", root)
    assert [each.status for each in study.outcomes()] == ["done"] * 2


def test_retrying_twice_enters_a_point_once(root):
    study = sweeps.create_study("s", sweep_of(varied={"lr": "0.1,1.0"}), root)
    study.fail(study.take(), "a fault")
    study.retry_failed()
    study.retry_failed()
    assert sorted(take_all(study)) == [("0.1",), ("1.0",)]


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
        def status(self):
            return None

        def stop(self):
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


def test_a_kill_while_failed_trials_are_entered_again(root, monkeypatch):
    study = sweeps.create_study("s", sweep_of(varied={"lr": "0.1,1.0"}), root)
    for _ in range(2):
        study.fail(study.take(), "a fault")
    honest, entered = study._optuna.enqueue_trial, []

    def enter(*args, **kwargs):
        if entered:
            raise Killed
        entered.append(honest(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(study._optuna, "enqueue_trial", enter)
        with pytest.raises(Killed):
            study.retry_failed()
    result = run("s", root, retry_failed=True, launcher=in_process)
    assert result.successes == 2
    assert len(study._trials()) == 4
