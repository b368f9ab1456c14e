"""The processes of a run, as far as they can be told without JAX."""

import subprocess
import sys

import pytest

from hpcjax.runs import directory, launch
from hpcjax.runs.signals import StopSignals


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
