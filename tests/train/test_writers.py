"""Copies of records: what each service holds is read back from its files."""

import errno
import math
import os
import pathlib
import subprocess
import sys
from typing import get_args

import pytest

from hpcjax.core import ConfigError, DiskFull
from hpcjax.train import writers
from tests.train import services, tiny

REPOSITORY = pathlib.Path(__file__).parents[2]
NAMES = get_args(writers.WriterName)
CONFIG = {"name": "paper/some", "values": {"lr": 0.25, "train": {"steps": 9}}}
RUN = "2026-01-31-paper-some-0123ab"
each_service = pytest.mark.parametrize("name", NAMES)


def records(first, last):
    for step in range(first, last + 1):
        yield {"step": step, "seconds": step / 4, "loss": 1 / step}
        if step % 2 == 0:
            yield {"step": step, "val_loss": 2 / step}


def open_writers(names, folder, own):
    return writers.open_writers(names, folder, RUN, CONFIG, lambda: list(own))


def session(name, folder, own, start, end):
    """Trains from step `start` to `end`, as the loop would write it."""
    with open_writers([name], folder, own) as (writer,):
        own.rewind(start)
        seconds = writer.rewind(start)
        for record in records(start + 1, end):
            own.write(record)
            writer.write(record)
    return seconds


def read(name, folder, own):
    """Returns what the service holds, and what it has to hold."""
    held, config = services.READERS[name](folder)
    return held, services.expected(name, own), config


@pytest.mark.quick("tensorboard", "mlflow")
@each_service
def test_every_number_is_read_back_and_the_config(name, tmp_path):
    own = tiny.Records()
    assert session(name, tmp_path, own, 0, 6) == 0.0
    held, wanted, config = read(name, tmp_path, own)
    assert held == wanted
    assert len(held) == 6 * 2 + 3
    assert "0.25" in config
    assert [path.name for path in tmp_path.iterdir()] == [name]


@each_service
def test_numbers_that_are_not_finite_are_copied_and_text_is_not(name, tmp_path):
    own = tiny.Records()
    with open_writers([name], tmp_path, own) as (writer,):
        writer.rewind(0)
        for step, value in enumerate((math.nan, math.inf, -math.inf), 1):
            own.write({"step": step, "loss": value, "note": "text", "whole": 2})
            writer.write(own[-1])
    held, wanted, _ = read(name, tmp_path, own)
    assert held == wanted
    assert len(held) == 6


@each_service
def test_a_run_that_goes_on_has_every_step_once(name, tmp_path):
    own = tiny.Records()
    session(name, tmp_path, own, 0, 7)
    own.write({"step": 7, "lost_seconds": 3.0})
    assert session(name, tmp_path, own, 4, 9) == 1.0
    held, wanted, _ = read(name, tmp_path, own)
    assert held == wanted
    assert (9, "loss") in held
    assert (7, "lost_seconds") not in held


@each_service
def test_a_copy_that_begins_late_is_whole(name, tmp_path):
    own = tiny.Records(records(1, 600))
    session(name, tmp_path, own, 600, 602)
    held, wanted, _ = read(name, tmp_path, own)
    assert held == wanted


@each_service
def test_rewinding_twice_in_one_session(name, tmp_path):
    own = tiny.Records(records(1, 3))
    with open_writers([name], tmp_path, own) as (writer,):
        writer.rewind(3)
        writer.rewind(2)
    own.rewind(2)
    held, wanted, _ = read(name, tmp_path, own)
    assert held == wanted


def test_all_at_once_and_a_name_given_twice(tmp_path):
    own = tiny.Records()
    with open_writers([*NAMES, "mlflow"], tmp_path, own) as made:
        assert [writer.name for writer in made] == list(NAMES)
        for writer in made:
            writer.rewind(0)
        for record in records(1, 2):
            own.write(record)
            for writer in made:
                writer.write(record)
    for name in NAMES:
        held, wanted, _ = read(name, tmp_path, own)
        assert held == wanted


def test_an_unknown_writer():
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        writers.check_writers(["tensorbord"])


@each_service
def test_a_package_that_is_missing(name, monkeypatch):
    module = {"tensorboard": "tensorboardX"}.get(name, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'hpcjax\[{name}\]'"):
        writers.check_writers([name])


# Failing services


class Broken(Exception):
    pass


def breaking(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@each_service
def test_a_service_that_fails_is_told_and_the_others_are_completed(
    name, tmp_path, monkeypatch
):
    own, others = tiny.Records(), [other for other in NAMES if other != name]

    def train():
        with open_writers([name, *others], tmp_path, own) as made:
            for writer in made:
                writer.rewind(0)
            for record in records(1, 1):
                own.write(record)
                for writer in made:
                    writer.write(record)
            monkeypatch.setattr(made[0], "_write", breaking(Broken("down")))
            made[0].write({"step": 2, "loss": 0.5})

    with pytest.raises(writers.WriterFailed, match=f"{name} failed at step 2 ") as told:
        train()
    assert "Broken: down" in str(told.value)
    assert f"run {RUN} can be resumed" in str(told.value)
    for other in NAMES:
        held, wanted, _ = read(other, tmp_path, own)
        assert held == wanted


def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    with open_writers(["tensorboard"], tmp_path, tiny.Records()) as (writer,):
        writer.rewind(0)
        full = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(writer._file, "write_event", breaking(full))
            with pytest.raises(DiskFull, match="tensorboard"):
                writer.write({"step": 1, "loss": 1.0})


def test_a_copy_that_cannot_be_completed_does_not_hide_why_the_run_ended(
    tmp_path, monkeypatch, caplog
):
    def end_with(error):
        with open_writers(NAMES[:1], tmp_path, tiny.Records()) as (writer,):
            writer.rewind(0)
            monkeypatch.setattr(writer, "_close", breaking(Broken("down")))
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        end_with(KeyboardInterrupt())
    assert "tensorboard failed at the end (Broken: down)" in caplog.text
    with pytest.raises(writers.WriterFailed, match="at the end"):
        end_with(None)


KILLED = """
import pathlib, psutil, sys, time
from hpcjax.train import writers

with writers.open_writers(
    ["wandb"], pathlib.Path(sys.argv[1]), "a-run", {}, lambda: []
) as (writer,):
    writer.rewind(0)
    for child in psutil.Process().children():
        child.kill()
        child.wait()
    for step in range(1, 100_000):
        writer.write({"step": step, "loss": 1.0})
"""


def run_python(code, folder):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=folder,
        env={**kept, "HOME": str(folder / "home"), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.processes
def test_wandb_whose_process_is_killed_is_told(tmp_path):
    done = run_python(KILLED, tmp_path)
    assert done.returncode == 1  # Python's: no command caught it
    assert "WriterFailed: wandb failed at step " in done.stderr


FOLDERS = """
import pathlib, sys
from hpcjax.train import writers

folder = pathlib.Path(sys.argv[1]) / "run"
names = ["tensorboard", "wandb", "mlflow"]
with writers.open_writers(names, folder, "a-run", {}, lambda: []) as made:
    for writer in made:
        writer.rewind(0)
        writer.write({"step": 1, "loss": 1.0})
print("jax" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_nothing_is_written_elsewhere_and_nothing_is_said(tmp_path):
    done = run_python(FOLDERS, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(NAMES)
