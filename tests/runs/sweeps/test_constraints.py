"""The sampler gp, and constraints of any sweep, on a bowl whose least is forbidden."""

import contextlib
import dataclasses

import numpy as np
import pytest
from rich.console import Console

from hpcjax.core import ConfigError, HpcjaxError
from hpcjax.runs import cli, sweeps
from hpcjax.runs.sweeps import adaptive, axes, worker
from tests.runs import roots
from tests.runs.sweeps.trials import in_process, run, run_ids, sweep_of

EXPERIMENT = '''
import dataclasses
from typing import Literal

from hpcjax.core.errors import Diverged

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A bowl.

    Attributes:
      x: least at 0.7.
      y: least at 10.
      kind: adds to the value.
      fails: x above which it diverges.
      seed: of nothing.
    """
    x: float = 0.0
    y: float = 1.0
    kind: Literal["a", "b"] = "a"
    fails: float = 9.0
    seed: int = 0

def run(cfg, ctx):
    import math
    from hpcjax import runs
    if cfg.x > cfg.fails:
        raise Diverged("too far")
    value = (cfg.x - 0.7) ** 2 + math.log10(cfg.y / 10) ** 2 + 0.1
    value += 0.5 * (cfg.kind == "b")
    more = {"cost": ("step", [9.0, cfg.x]), "map": (("a", "b"), [[1.0]])}
    more["own"] = ("place", [1.0] * round(10 * cfg.x))
    return runs.measured({"val_loss": value, **more})
'''
CONFIG = '''
"""Bowls; no time at all.

Expect: the least at 0.7 and 10.
"""
from experiments.bowl.experiment import Config

base = Config()
smoke = {}
'''
VARIED = {"x": "uniform(0,1)", "y": "log(1,100)", "kind": "a,b"}
BOUND = sweeps.parse_constraint("cost<=0.5")


@pytest.fixture
def root(tmp_path):
    roots.write(tmp_path, "experiments/bowl/experiment.py", EXPERIMENT)
    roots.write(tmp_path, "configs/bowl/plain.py", CONFIG)
    return tmp_path


def sweep(**options):
    options = {"varied": VARIED, "sampler": "gp", "trials": 12, **options}
    return sweep_of("bowl/plain", **options)


def test_the_best_is_at_the_bound(root):
    """The bowl's least within it is 0.14, at x = 0.5."""
    result = run(sweep(subject_to=BOUND), root)
    dataset = result.dataset
    assert result.best["value"].item() < 0.18
    assert result.best["x"].item() <= 0.5
    kept = dataset["x"].values <= 0.5
    np.testing.assert_array_equal(dataset["feasible"] == 1, kept)
    assert result.successes == kept.sum()
    assert len(set(dataset["x"].values)) == 12


def test_a_seed_gives_the_same_points_and_more_trials_go_on(root):
    first = run(sweep(trials=6, subject_to=BOUND), root, name="s").dataset
    again = run(sweep(trials=7, subject_to=BOUND), root, name="s").dataset
    other = run(sweep(trials=7, subject_to=BOUND), root, name="t").dataset
    assert again["x"].values[:6].tolist() == first["x"].values.tolist()
    assert other["x"].values.tolist() == again["x"].values.tolist()
    assert len(run_ids(root)) == 7
    with pytest.raises(ConfigError, match="another one: subject_to"):
        run(sweep(trials=7), root, name="s")


def test_results_of_different_lengths_are_joined(root):
    varied = {"x": "0.2,0.4"}
    dataset = run(sweep(varied=varied, sampler="grid", trials=None), root).dataset
    np.testing.assert_array_equal(np.isnan(dataset["own"]).sum("place"), [2, 0])


def test_lists_are_visited_once_and_diverged_trials_are_the_worst(root):
    varied = {"x": "0.2,0.4,0.6,0.8", "kind": "a,b", "fails": "0.7"}
    dataset = run(sweep(varied=varied, trials=8, subject_to=BOUND), root).dataset
    points = zip(dataset["x"].values, dataset["kind"].values, strict=True)
    assert len(set(points)) == 8
    assert (dataset["status"] == "diverged").sum() == 2
    feasible = dataset["feasible"].values == 1
    assert (dataset["x"].values[feasible] <= 0.4).all()


def test_trials_that_run_are_not_asked_again(root):
    """As workers in parallel find them, of which none has told yet or some have."""
    varied = {"x": "0.2,0.4,0.6", "kind": "a,b"}
    study = sweeps.create_study("s", sweep(varied=varied, trials=6), root)
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(study.take()) for _ in range(5)]
        for trial in taken:
            told = {"value": trial.cell + 1.0, "constraint": 0.1}
            study.write(dataclasses.replace(trial, status="done", **told))
        taken.append(held.enter_context(study.take()))
        assert held.enter_context(study.take()) is None
    assert len({tuple(trial.point.values()) for trial in taken}) == 6


@pytest.mark.parametrize("kept", [[0.5, 0.9], [], [3.0], [1.0]])
@pytest.mark.parametrize("bound", [1.0, 0.0, -2.0])
def test_what_is_not_known_of_a_constraint_breaks_it(kept, bound):
    column, limit = adaptive._column([*kept, np.inf], 0, bound)
    assert column[-1] > limit
    assert column[-1] >= column.max()


def test_a_diverged_trial_is_as_bad_as_the_worst():
    column, _ = adaptive._column([1e-3, 4e-3, np.inf], 1)
    expected = np.log([1e-3, 4e-3, 4e-3])
    np.testing.assert_allclose(column, [*expected, expected.mean()])


@pytest.mark.slow
def test_workers_are_processes(root):
    result = sweeps.run_sweep(
        sweep(subject_to=BOUND), root=root, parallel=2, quiet=True
    )
    assert result.dataset["status"].values.tolist() == ["done"] * 12
    assert result.best["value"].item() < 0.25


def test_any_sampler_has_its_best_within_the_bound(root):
    varied = {"x": "0.2,0.7", "seed": "0,1"}
    options = {"sampler": "grid", "trials": None, "varied": varied}
    result = run(sweep(**options, subject_to=BOUND), root)
    assert result.best["x"].item() == 0.2
    assert sweeps.ranking(result.dataset)["mean"].isna().tolist()[2:] == [True] * 2
    shown = Console(width=200)
    with shown.capture() as capture:
        shown.print(sweeps.summary(result))
    assert "2 keep cost<=0.5" in capture.get()
    strict = sweeps.parse_constraint("cost<=0.1")
    none = run(sweep(**options, subject_to=strict), root)
    with pytest.raises(ConfigError, match=r"finite value and keeps cost<=0\.1"):
        none.best  # noqa: B018


@pytest.mark.parametrize(
    ("name", "hint"), [("costs", "did you mean 'cost'"), ("map", "no such scalar")]
)
def test_a_constraint_that_no_result_has_ends_the_sweep(root, name, hint):
    bound = sweeps.Constraint(name=name, bound=1.0)
    with pytest.raises(worker.NoConstraint, match=hint):
        run(sweep(subject_to=bound), root)
    assert len(run_ids(root)) == 1


@pytest.mark.slow
def test_processes_tell_a_constraint_that_no_result_has(root):
    bound = sweeps.Constraint(name="costs", bound=1.0)
    with pytest.raises(HpcjaxError, match="did you mean 'cost'"):
        sweeps.run_sweep(sweep(subject_to=bound), root=root, quiet=True)


def test_the_flag(root, monkeypatch):
    monkeypatch.setattr(sweeps, "make_launcher", lambda text: in_process)
    args = ["sweep", "bowl/plain", "x=0.2,0.7", "--subject-to", "cost<=0.5"]
    assert cli.main([*args, "--quiet", "--root", str(root)]) == 0
    args[-1] = "cost<=0.1"
    assert cli.main([*args, "--quiet", "--root", str(root)]) == 8
    args[-1] = "cost=3"
    assert cli.main([*args, "--quiet", "--root", str(root)]) == 2


@pytest.mark.parametrize("text", ["cost", "cost<3", "cost<=a", "cost<=inf", "a b<=3"])
def test_what_is_no_constraint(text):
    with pytest.raises(ConfigError, match="written such as seconds<=20"):
        sweeps.parse_constraint(text)


def test_more_trials_than_points_are_refused():
    varied, _ = axes.parse({"x": "1,2,3", "y": "int(1,4)"})
    axes.check_sampler(varied, "gp", 12)
    with pytest.raises(ConfigError, match="of 12 it can make no 13 trials"):
        axes.check_sampler(varied, "gp", 13)


@pytest.mark.parametrize("text", ["uniform(2,5)", "log(1e-3,10)", "int(1,9)", "a,b,c"])
def test_a_value_lies_at_its_share(text):
    (axis,), _ = axes.parse({"k": text})
    for share in np.linspace(0, 0.999, 13):
        value = axis.at(share)
        again = axis.at(axis.share(value))
        assert again == (value if isinstance(value, str) else pytest.approx(value))


def test_names_of_sweeps_without_a_constraint_are_those_from_before():
    plain = sweep_of(varied={"lr": "0.1,0.2"}).default_name
    assert plain == "curves-plain-81dab5"
    bound = sweep_of(varied={"lr": "0.1,0.2"}, subject_to=BOUND).default_name
    assert bound != plain
