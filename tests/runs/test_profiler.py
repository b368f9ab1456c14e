"""A trace of some steps: where it is, what it is of, and when there is none."""

import gzip
import json
import logging

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import cli, execute
from hpcjax.runs.profiler import Profiler, profiling
from tests.runs import papers

STEPS = {"train.steps": "12", "train.eval_every": "5", "model.widths": "[4]"}


@pytest.mark.slow
def test_a_run_with_its_profile(tmp_path, caplog):
    changes = {**STEPS, "model": "mlp", "train.checkpoint_every": "0"}
    with caplog.at_level(logging.WARNING):
        done = execute.run(
            "train/digits", changes, root=tmp_path, profile=True, quiet=True
        )
    assert f"--logdir {done.directory / 'profile'}" in caplog.text
    (path,) = (done.directory / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {each.get("name") for each in events}
    assert len(names) > 10


class Calls:
    """In place of the profiler, of which there is one for a process."""

    def __init__(self, monkeypatch):
        import jax

        self.made = []
        for name in ("start_trace", "stop_trace"):
            monkeypatch.setattr(
                jax.profiler, name, lambda *_, name=name, **__: self.made.append(name)
            )


def steps(*numbers):
    return [{"step": number, "seconds": 1.0, "loss": 1.0} for number in numbers]


def test_five_steps_behind_the_first_are_traced_once(tmp_path, monkeypatch):
    calls, profiler = Calls(monkeypatch), Profiler(tmp_path)
    for number, record in enumerate(steps(*range(7, 30))):
        profiler.write(record)
        profiler.write({"step": record["step"], "val_loss": 1.0})
        begun, ended = number >= 2, number >= 7
        assert calls.made == ["start_trace"] * begun + ["stop_trace"] * ended


def test_a_run_that_ends_early_ends_its_trace(tmp_path, monkeypatch, caplog):
    calls = Calls(monkeypatch)

    def stop():
        with profiling(tmp_path) as (profiler,):
            for record in steps(1, 2, 3, 4):
                profiler.write(record)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stop()
    assert calls.made == ["start_trace", "stop_trace"]
    with caplog.at_level(logging.WARNING), profiling(tmp_path) as (profiler,):
        profiler.write(steps(1)[0])
    assert "no trace: the run has not taken 3 steps" in caplog.text
    with profiling(None) as none:
        assert none == ()


def test_what_cannot_be_traced_is_refused(tmp_path):
    root = papers.make(tmp_path)
    with pytest.raises(ConfigError, match="a profile is of a training"):
        execute.run("lm/generate", root=root, profile=True)
    assert cli.main(["run", "train/digits", "--profile", "--processes", "2"]) == 2
