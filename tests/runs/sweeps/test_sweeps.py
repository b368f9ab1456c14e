"""Sweeps over the curves paper, whose runs take no time: workers are real processes."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from hpcjax.core import ConfigError, DataFormatError, HpcjaxError, RunBusy
from hpcjax.runs import cli, directory, results, sweeps
from hpcjax.runs.sweeps import worker
from tests.runs import papers
from tests.runs.sweeps.trials import abandon, run, run_ids, sweep_of, take_all


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


def expected(lr, wd, steps=4):
    return np.log10(lr / 0.1) ** 2 + wd + 1 / steps


def test_a_grid_is_a_dataset_with_the_axes_as_dimensions(root):
    result = run(sweep_of(), root)
    dataset = result.dataset
    assert dict(dataset["value"].sizes) == {"lr": 3, "wd": 2}
    assert dataset.attrs["units"] == "wd=K"  # with it the field's help begins
    for lr in (0.01, 0.1, 1.0):
        for wd in (0.25, 0.5):
            cell = dataset.sel(lr=lr, wd=wd)
            assert cell["value"].item() == pytest.approx(expected(lr, wd))
            assert cell["status"].item() == "done"
            history = cell["val_loss"].sel(eval_step=1).item()
            assert history == pytest.approx(expected(lr, wd, steps=1))
            assert cell["run"].item() in run_ids(root)
    assert (result.best["lr"].item(), result.best["wd"].item()) == (0.1, 0.25)
    written = results.read(result.directory / "result.nc")
    assert written.equals(dataset) or written["value"].equals(dataset["value"])


def test_texts_and_seeds_are_axes_too(root):
    varied = {"ends": "well,diverged,broken", "seed": "0,1", "speed": "2"}
    result = run(sweep_of(varied=varied), root)
    status = result.dataset["status"]
    assert status.sel(ends="well").values.tolist() == ["done"] * 2
    assert status.sel(ends="diverged").values.tolist() == ["diverged"] * 2
    assert status.sel(ends="broken").values.tolist() == ["failed"] * 2
    value = result.dataset["value"]
    assert np.isinf(value.sel(ends="diverged")).all()
    assert np.isnan(value.sel(ends="broken")).all()
    assert "a fault" in result.dataset["error"].sel(ends="broken", seed=0).item()
    assert result.successes == 2


def test_the_best_is_over_seeds_and_not_the_luck_of_one():
    values = {0.1: [0.1, 0.9], 0.2: [0.3, 0.3], 0.3: [0.05, np.nan], 0.4: [0.2, np.inf]}
    grid = np.array([*values.values()])
    texts = np.full(grid.shape, "", object)
    dataset = xr.Dataset(
        dict.fromkeys(("status", "run", "error"), (("lr", "seed"), texts)),
        coords={"lr": [*values], "seed": [0, 1]},
        attrs={"axes": "lr seed", "by": "val_loss"},
    ).assign(value=(("lr", "seed"), grid))
    result = sweeps.SweepResult(name="s", directory=pathlib.Path("s"), dataset=dataset)
    ranking = sweeps.ranking(dataset)
    assert ranking["lr"].tolist() == [0.2, 0.2, 0.1, 0.1, 0.4, 0.4, 0.3, 0.3]
    assert ranking["mean"].tolist()[:5] == [0.3, 0.3, 0.5, 0.5, np.inf]
    assert ranking["mean"].isna().tolist()[-2:] == [True, True]
    assert result.best["lr"].item() == 0.2
    assert result.best["value"].values.tolist() == [0.3, 0.3]
    shown = Console(width=200)
    with shown.capture() as capture:
        shown.print(sweeps.summary(result))
    first, *_ = re.findall(r"^0\..*$", capture.get(), re.M)
    assert first.split() == ["0.2", "0.3", "0.3", "to", "0.3", "2"]
    for alone, where in ((dataset.isel(lr=[1]), 0.2), (dataset.isel(seed=0), 0.3)):
        best = dataclasses.replace(result, dataset=alone).best
        assert best["lr"].item() == where
    broken = dataclasses.replace(result, dataset=dataset.isel(lr=[2, 3]))
    with pytest.raises(ConfigError, match="no point of sweep s has a finite value"):
        broken.best  # noqa: B018


@pytest.mark.quick("halton")
@pytest.mark.parametrize("sampler", ["random", "halton", "tpe", "gp"])
def test_samplers_visit_as_many_points_as_asked(root, sampler):
    varied = {"lr": "log(1e-3,10)", "wd": "0.25,0.5"}
    sweep = sweep_of(varied=varied, sampler=sampler, trials=7, seed=1)
    dataset = run(sweep, root).dataset
    assert dataset["value"].dims == ("trial",)
    assert dataset["value"].values == pytest.approx(
        expected(dataset["lr"].values, dataset["wd"].values)
    )
    assert len(set(dataset["lr"].values)) == 7
    assert ((dataset["lr"] >= 1e-3) & (dataset["lr"] <= 10)).all()


@pytest.mark.slow
def test_tpe_learns(root):
    """On a parabola in log(lr): its later points lie nearer to the minimum."""
    varied, values = {"lr": "log(1e-4,100)"}, {}
    for sampler in ("random", "tpe"):
        sweep = sweep_of(varied=varied, sampler=sampler, trials=36, seed=0)
        values[sampler] = run(sweep, root).dataset["value"].values - expected(0.1, 0)
    assert np.median(values["tpe"][12:]) < 0.5 * np.median(values["random"][12:])


@pytest.mark.slow
def test_what_has_ended_is_not_run_again(root):
    first = run(sweep_of(), root)
    before = run_ids(root)
    assert len(before) == 6
    second = run(sweep_of(), root)
    assert (second.name, run_ids(root)) == (first.name, before)
    again = run(first.name, root)
    assert again.dataset["value"].equals(first.dataset["value"])


def test_more_trials_of_the_same_sweep_may_follow(root):
    varied = {"lr": "log(1e-3,10)"}
    few = run(sweep_of(varied=varied, sampler="halton", trials=3), root, name="s")
    more = run(sweep_of(varied=varied, sampler="halton", trials=5), root, name="s")
    assert more.dataset["lr"].values[:3].tolist() == few.dataset["lr"].values.tolist()
    assert len(run_ids(root)) == 5
    with pytest.raises(ConfigError, match="has 5 trials: got 4"):
        run(sweep_of(varied=varied, sampler="halton", trials=4), root, name="s")


def test_a_name_stands_for_one_sweep(root):
    run(sweep_of(), root, name="mine")
    other = sweep_of(varied={"lr": "0.01,0.1", "wd": "0.25,0.5"})
    with pytest.raises(ConfigError, match="sweep mine is another one: axes"):
        run(other, root, name="mine")
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        run("mime", root)


@pytest.mark.parametrize(
    ("varied", "words"),
    [
        ({"lrr": "0.1,0.2"}, "did you mean 'lr'"),
        ({"lr": "0.1,abc"}, "lr must be float"),
        ({"ends": "well,badly"}, "ends must be"),
        ({"lr": "0.1,0.2", "wdd": "1"}, "did you mean 'wd'"),
        ({"train.steps": "uniform(1,2)"}, "train.steps must be int"),
    ],
)
def test_axes_that_the_config_does_not_have_are_refused(root, varied, words):
    sampler = {"sampler": "random", "trials": 2} if "(" in str(varied) else {}
    with pytest.raises(ConfigError, match=words):
        run(sweep_of(varied=varied, **sampler), root)
    assert not (root / "sweeps").exists()


def test_an_unknown_metric_is_told(root):
    result = run(sweep_of(by="val_los"), root)
    assert result.successes == 0
    assert "no 'val_los'" in result.dataset["error"].values.ravel()[0]


def test_a_damaged_description_is_told(root):
    result = run(sweep_of(), root)
    (result.directory / "sweep.json").write_text('{"config": 3}')
    with pytest.raises(DataFormatError, match=r"sweep\.json cannot be read"):
        run(result.name, root)


def test_a_worker_that_dies_loses_nothing(root):
    """A trial that is running and that nobody holds is taken again."""
    study = sweeps.create_study("s", sweep_of(), root)
    for _ in range(2):
        abandon(study)
        assert study.has_lost()
    worker.work("s", root)
    assert {each.status for each in study.trials()} == {"done"}
    assert len(study.trials()) == len(run_ids(root)) == 6


@pytest.mark.slow
def test_a_trial_that_kills_its_process_is_given_up(root):
    experiment = root / "experiments/curves/experiment.py"
    deadly = "    if cfg.lr == 0.1:\n        import os\n        os._exit(3)\n"
    text = experiment.read_text().replace(
        "def run(cfg, ctx):\n", f"def run(cfg, ctx):\n{deadly}"
    )
    experiment.write_text(text)
    sweep = sweep_of(varied={"lr": "0.01,0.1,1.0"})
    result = sweeps.run_sweep(sweep, root=root, quiet=True)
    assert result.dataset["status"].values.tolist() == ["done", "failed", "done"]
    assert "died 3 times" in result.dataset["error"].sel(lr=0.1).item()


def test_workers_that_cannot_start_end_the_sweep(root, monkeypatch):
    monkeypatch.setenv("PYTHONSTARTUP", "")
    launcher = sweeps.make_launcher("local")

    def broken(name, root, index):
        (root / "sweeps" / name / "sweep.json").write_text("no sweep")
        return launcher(name, root, index)

    with pytest.raises(HpcjaxError, match="worker 0 ended with 3"):
        sweeps.run_sweep(sweep_of(), root=root, launcher=broken, quiet=True)


@pytest.mark.slow
@pytest.mark.faults(17)
@pytest.mark.processes
def test_ten_workers_run_no_trial_twice(root):
    seeds = ",".join(map(str, range(200)))
    sweep = sweep_of(varied={"seed": seeds})
    study = sweeps.create_study("s", sweep, root)
    with study.take() as held:  # which none of them may take
        processes = [start(root, "s") for _ in range(10)]
        for process in processes:
            assert process.wait(timeout=240) == 0
    assert study.trials()[held.cell].status == "running"
    statuses = [each.status for each in study.trials()]
    assert statuses.count("done") == 199
    runs = [each.run for each in study.trials() if each.run]
    assert len(set(runs)) == len(runs) == len(run_ids(root))


def start(root, name):
    return subprocess.Popen(
        [sys.executable, "-m", "hpcjax.runs.sweeps.worker", name, str(root)],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        stderr=subprocess.DEVNULL,
    )


SLOW = "    import time\n    time.sleep(0.4)\n"


@pytest.mark.slow
@pytest.mark.faults(17)
@pytest.mark.processes
@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_a_sweep_goes_on_after_a_kill(root, victim):
    experiment = root / "experiments/curves/experiment.py"
    text = experiment.read_text().replace(
        "def run(cfg, ctx):\n", f"def run(cfg, ctx):\n{SLOW}"
    )
    experiment.write_text(text)
    code = "import sys; from hpcjax.runs.cli import main; sys.exit(main())"
    command = ["sweep", "curves/plain", "seed=0,1,2,3,4,5", "--parallel", "2"]
    driver = subprocess.Popen(
        [sys.executable, "-c", code, *command, "--name", "s", "--root", str(root)],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 120
    while not run_ids(root) and time.monotonic() < limit:
        assert driver.poll() is None, driver.communicate()[1]
        time.sleep(0.05)
    if victim == "driver":
        driver.kill()
        driver.communicate()
    else:
        held = next(root.glob("sweeps/s/trials/*/lock"))
        os.kill(json.loads(held.read_text())["pid"], signal.SIGKILL)
        assert driver.wait(timeout=120) == 0, driver.communicate()[1]
    result = sweeps.run_sweep("s", root=root, quiet=True)
    assert result.dataset["status"].values.tolist() == ["done"] * 6
    done = [r for r in directory.list_runs(root) if r.status == "done"]
    assert len(done) == 6


@pytest.mark.slow
def test_the_command(root, capsys):
    args = ["sweep", "curves/plain", "lr=0.1,1.0", "wd=0.5", "--plot", "--quiet"]
    assert cli.main([*args, "--root", str(root), "--name", "s"]) == 0
    out = capsys.readouterr().out
    assert "the best of 2 trials by val_loss" in out
    assert "2 done" in out
    assert (root / "sweeps/s/response.png").read_bytes()[1:4] == b"PNG"
    assert cli.main(["sweep", "s", "--root", str(root), "--quiet"]) == 0
    assert cli.main(["sweep", "curves/plain", "--root", str(root)]) == 2
    assert "nothing is varied" in capsys.readouterr().err
    bad = ["sweep", "curves/plain", "lr=0.1,0.2", "--root", str(root)]
    assert cli.main([*bad, "--launcher", "rai"]) == 2
    assert "did you mean 'ray'" in capsys.readouterr().err


@pytest.mark.slow
def test_cells_are_found_by_place_not_by_value(root):
    """Two texts of one number, no number at all, and a result with the axis's name."""
    path = root / "experiments/curves/experiment.py"
    text = path.read_text().replace(
        'return results.history(metrics.read(), "measured")',
        'return results.history(metrics.read(), "measured")'
        ".assign_coords(lr=('z', [7.0, 8.0]))",
    )
    path.write_text(text)
    varied = {"lr": "0.1,0.10,nan", "wd": "0.5,0.25"}
    dataset = run(sweep_of(varied=varied), root).dataset
    assert dict(dataset["value"].sizes) == {"lr": 3, "wd": 2}
    assert dataset["lr"].values == pytest.approx([0.1, 0.1, np.nan], nan_ok=True)
    assert dataset["wd"].values.tolist() == [0.5, 0.25]  # as listed
    same = [expected(0.1, 0.5), expected(0.1, 0.25)]
    assert dataset["value"].values[:2] == pytest.approx(np.array([same, same]))
    assert dataset["result_lr"].values.tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        b"[]",
        b"",
        b"{}",
        b'{"cell": 1, "point": {"lr": "1", "wd": "1"}}',
        b'{"cell": 0, "point": {"lr": "1"}}',
        b'{"cell": 0, "point": 3}',
        b'{"cell": 0, "point": {"lr": "1", "wd": "1"}, "status": "over"}',
    ],
)
def test_a_damaged_trial_is_told(root, capsys, content):
    study = sweeps.create_study("s", sweep_of(), root)
    abandon(study)
    (study.folder / "trials/0000/trial.json").write_bytes(content)
    assert cli.main(["sweep", "s", "--root", str(root)]) == 3
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "trials/0000/trial.json is damaged: " in told


@pytest.mark.parametrize("options", [{}, {"sampler": "tpe", "trials": 6}])
def test_a_trial_whose_file_was_removed_is_taken_again(root, options):
    study = sweeps.create_study("s", sweep_of(**options), root)
    assert take_all(study) == [*range(6)]
    (study.folder / "trials/0002/trial.json").unlink()
    assert take_all(sweeps.open_study("s", root)) == [2, 0, 1, 3, 4, 5]


def test_a_run_that_is_busy_is_waited_for(root, monkeypatch):
    """Another sweep or table is at the same run just now."""
    monkeypatch.setattr(worker, "_BUSY", 0.0)
    honest, asked = worker.execute.ensure, []

    def busy_once(*args, **kwargs):
        asked.append(args)
        if len(asked) == 1:
            raise RunBusy("held")
        return honest(*args, **kwargs)

    monkeypatch.setattr(worker.execute, "ensure", busy_once)
    result = run(sweep_of(varied={"lr": "0.1,1.0"}), root)
    assert result.successes == 2


def test_a_worker_of_another_host_is_dead_when_it_is_silent(root):
    study = sweeps.create_study("s", sweep_of(), root)
    with study.take():
        held = study.folder / "trials/0000/lock"
        held.write_text(
            json.dumps({**json.loads(held.read_text()), "host": "elsewhere"})
        )
        assert not study.has_lost()
        assert study.held_by() == ["elsewhere"]
        os.utime(held, (0, 0))
        assert study.has_lost()


def test_fixed_keys_leave_the_config_files_own_sweep(root):
    file = root / "configs/curves/plain.py"
    file.write_text(file.read_text() + '\nsweep = {"lr": (0.1, 0.2), "seed": (0, 1)}\n')
    found, _ = sweeps.find("curves/plain", {"lr": "5"}, root)
    assert [str(axis) for axis in found.axes] == ["seed=0,1"]
    assert found.overrides == {"lr": "5"}


@pytest.mark.slow
def test_a_sweep_of_failures_fails(root):
    args = ["sweep", "curves/plain", "ends=broken,missing", "--quiet"]
    assert cli.main([*args, "--root", str(root)]) == 8


def test_the_config_files_own_sweep(root):
    file = root / "configs/curves/plain.py"
    file.write_text(file.read_text() + '\nsweep = {"lr": (0.1, 0.2), "seed": (0, 1)}\n')
    found, name = sweeps.find("curves/plain:fast", {}, root)
    assert [str(axis) for axis in found.axes] == ["lr=0.1,0.2", "seed=0,1"]
    assert name == found.default_name
    assert sweeps.find("curves/plain:fast", {}, root, name="s")[1] == "s"


@pytest.mark.slow
def test_pictures_of_every_kind_of_axis(root):
    for number, (varied, options) in enumerate(
        [
            ({"lr": "0.01,0.1,1.0"}, {}),
            ({"lr": "0.01,1.0", "ends": "well,broken", "wd": "0.25,0.5"}, {}),
            (
                {"lr": "log(1e-3,1)", "wd": "0.25,0.5"},
                {"sampler": "random", "trials": 4},
            ),
        ]
    ):
        result = run(sweep_of(varied=varied, **options), root, name=f"s{number}")
        figure = sweeps.draw(result.dataset)
        labels = [panel.get_xlabel() for panel in figure.axes if panel.get_xlabel()]
        assert set(varied) <= set(labels)
        named = [text.get_text() for each in figure.legends for text in each.texts]
        assert ("no finite value" in named) == ("ends" in varied)
