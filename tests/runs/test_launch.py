"""The processes of a run, as far as they can be told without JAX."""

import os
import subprocess
import sys

import pytest

from hpcjax.core.errors import ProcessLost
from hpcjax.runs import directory, launch
from hpcjax.runs.signals import StopSignals

pytestmark = pytest.mark.processes


def test_who_has_started_is_stopped_when_another_cannot(tmp_path, monkeypatch):
    honest, started = subprocess.Popen, []

    def popen(command, **options):
        if started:
            raise OSError("no more processes")
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(honest(command, **options))
        return started[0]

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    crew = launch._Crew(directory.RunDirectory(tmp_path), [], 3, 1)
    try:
        with pytest.raises(OSError, match="no more processes"):
            crew.watch(StopSignals())
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        (9.0, "process 1 shows no sign of life, last at 8"),
        (0.0, "process 0 was killed by SIGABRT"),
    ],
)
def test_who_missed_a_heartbeat_is_not_to_blame(tmp_path, monkeypatch, silent, words):
    """JAX aborts whoever waits for a process that was stopped, in a checkpoint, too."""
    progress = tmp_path / "progress"
    progress.mkdir()
    for index, touched in enumerate((1000.0 + silent, 1000.0)):
        (progress / str(index)).write_text("8\n")
        os.utime(progress / str(index), (touched, touched))
    crew = launch._Crew(directory.RunDirectory(tmp_path), [], 2, 1)
    bodies = ["import os; os.abort()", "import time; time.sleep(600)"]
    monkeypatch.setattr(
        crew,
        "_start",
        lambda index: subprocess.Popen([sys.executable, "-c", bodies[index]]),
    )

    def outlive(_):
        """The other lives on for a while after the first has ended."""
        os.utime(progress / "1", (2000.0, 2000.0))

    monkeypatch.setattr(crew, "_wait", outlive)
    with pytest.raises(ProcessLost, match=words):
        crew.watch(StopSignals())
