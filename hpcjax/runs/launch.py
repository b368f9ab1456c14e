"""Running a config in several processes of this machine, restarting lost ones."""

import logging
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hpcjax.core import environment
from hpcjax.core.errors import (
    ConfigError,
    HpcjaxError,
    Interrupted,
    Preempted,
    ProcessLost,
    stopped_by,
)
from hpcjax.runs import directory, discover, execute
from hpcjax.runs.signals import StopSignals
from hpcjax.train.watchdog import PROGRESS, blame, blame_stopped

logger = logging.getLogger(__name__)
_POLL, _GRACE = 0.1, 5.0
# Exit statuses of processes that were told to stop: after saving, because another had
# stopped, or before they could handle the signal.
_STOPPED = {
    Preempted.exit_code,
    Interrupted.exit_code,
    ProcessLost.exit_code,
    -signal.SIGTERM,
    -signal.SIGABRT,
    1,
}
_COORDINATOR = "127.0.0.1"


def launch(  # noqa: PLR0913 - those of `run`, and two
    name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    processes: int,
    restart: int = 0,
    root: pathlib.Path | None = None,
    resume: str | None = None,
    fork: bool = False,
    devices: int | None = None,
    log: Sequence[str] = (),
    trust: bool = False,
    quiet: bool = False,
    tags: Sequence[str] = (),
) -> execute.RunResult:
    """Runs a config in several processes of this machine.

    If one of them dies or hangs, the others cannot continue and are ended.

    Args:
      name: `paper/config[:variant]`, or the path of a run's `config.json`.
      overrides: values as on the command line.
      processes: number of processes.
      restart: how often to restart from the last checkpoint if a process is lost.
      root: folder that holds `runs/`; default the working directory.
      resume: id of an interrupted run to continue.
      fork: with `resume`, start a child run instead.
      devices: of the data axis, over all processes; default one for each.
      log: services for which records are copied, see `run`.
      trust: with `resume`, also load a checkpoint without a manifest.
      quiet: no progress line.
      tags: words by which the run is found again.

    Returns:
      The run's id, folder and dataset.

    Raises:
      ConfigError: a name, key or value that cannot be used, or devices that the
        processes cannot share.
      ProcessLost: a process died or hung; the message says which.
      Preempted: a signal came (Interrupted for Ctrl-C); the run has saved.
      HpcjaxError: a process failed; its exit status is the error's.
    """
    root = (root or pathlib.Path.cwd()).resolve()
    total = processes if devices is None else devices
    if processes < 1 or restart < 0 or total % processes:
        raise ConfigError(
            f"processes must be at least 1 and divide devices, restart at least 0: got "
            f"processes={processes}, devices={total}, restart={restart}"
        )
    loaded = discover.load(name, overrides or {}, root)
    execute.check_log(loaded, log)
    if execute.starts_processes(loaded):
        raise ConfigError(f"{loaded.title} starts processes of its own: give none")
    loaded.check_devices(total)
    if trust and resume is None:
        raise ConfigError("trust needs the id of a run to resume from")
    flags = ["--devices", str(total), "--root", str(root)]
    flags += [part for name in log for part in ("--log", name)]
    flags += [part for name in tags for part in ("--tag", name)]
    flags += ["--quiet"] if quiet else []
    once = ["--trust"] if trust else []
    with directory.claim(root, loaded, resume=resume, fork=fork) as folder:
        # The folder is made and checked here; the first process will hold it.
        pass
    with StopSignals() as signals, signals.defer():
        for left in range(restart, -1, -1):
            crew = _Crew(folder, [*flags, *once], processes, total // processes)
            once = []
            try:
                crew.watch(signals)
            except ProcessLost as error:
                if not left or signals.received:
                    raise type(error)(f"{error}; to go on: {crew.again()}") from None
                logger.warning("%s; beginning anew, %d more times", error, left - 1)
            else:
                break
    return execute.RunResult(
        id=folder.id, directory=folder.path, dataset=execute.read_result(folder)
    )


class _Crew:
    """The processes of one attempt."""

    def __init__(
        self,
        folder: directory.RunDirectory,
        flags: Sequence[str],
        processes: int,
        devices: int,
    ) -> None:
        self._folder = folder
        address = f"{_COORDINATOR}:{_free_port()}"
        command = [sys.executable, "-m", "hpcjax", "run", "--distributed", *flags]
        command += [f"runs/{folder.id}/config.json", "--resume", folder.id]
        self._command, local = command, environment.simulated(devices)
        self._environments = [
            environment.child(**local, **environment.member(address, processes, index))
            for index in range(processes)
        ]
        self._processes: list[subprocess.Popen] = []

    def _start(self, index: int) -> subprocess.Popen:
        command, env = self._command, self._environments[index]
        if index == 0:
            return subprocess.Popen(command, env=env, start_new_session=True)
        path = self._folder.path / f"process-{index}.txt"
        with path.open("a") as file:
            return subprocess.Popen(
                command, env=env, stdout=file, stderr=file, start_new_session=True
            )

    def watch(self, signals: StopSignals) -> None:
        """Starts all processes and waits for their end; passes a signal on to them."""
        told, stopped = False, ""
        try:
            for index in range(len(self._environments)):
                self._processes.append(self._start(index))
            while None in self._statuses() and not any(self._statuses()):
                if signals.received and not told:
                    self._send_signal(signal.SIGTERM)
                    told = True
                time.sleep(_POLL)
            # Before who has ended is silent for long, too.
            stopped = blame_stopped(self._folder.path / PROGRESS)
            self._wait(_GRACE)
        finally:
            # A process that still runs waits for one that has ended.
            ended = self._statuses()
            self._send_signal(signal.SIGKILL)
            self._wait(_GRACE)
        if any(ended):
            raise self._cause(ended, signals, stopped)

    def _statuses(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while None in self._statuses() and time.monotonic() < limit:
            time.sleep(_POLL)

    def _send_signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _cause(
        self, ended: list[int | None], signals: StopSignals, stopped: str
    ) -> HpcjaxError:
        """Returns the error of the process that failed first.

        A process whose neighbour has died ends by itself, with status 1 or by SIGABRT,
        so that these statuses are taken for a cause only if there are no others.
        """
        failed = {index: status for index, status in enumerate(ended) if status}
        if signals.received and set(failed.values()) <= _STOPPED:
            kind = stopped_by(signals.received)
            return kind(f"stopped; to go on: {self.again()}")
        index = min(failed, key=lambda index: (_followed(failed[index]), index))
        status = failed[index]
        if status in (Preempted.exit_code, Interrupted.exit_code):
            kind = stopped_by(signals.received)
            return kind(f"all processes have saved; to go on: {self.again()}")
        if status == ProcessLost.exit_code:
            return ProcessLost(blame(self._folder.path / PROGRESS))
        # JAX aborts the processes that miss another's heartbeat, in a checkpoint
        # long before the watchdog would end it.
        if status == -signal.SIGABRT and stopped:
            return ProcessLost(stopped)
        if status < 0:
            name = signal.Signals(-status).name
            return ProcessLost(f"process {index} was killed by {name}")
        error = HpcjaxError(
            f"process {index} ended with {status}; {self._last_words(index)}"
        )
        error.exit_code = status
        return error

    def again(self) -> str:
        """Returns the command that continues the run."""
        return f"{self._folder.again} --processes {len(self._environments)}"

    def _last_words(self, index: int) -> str:
        path = self._folder.path / f"process-{index}.txt"
        if not path.exists():
            return "it has said why"
        lines = path.read_text().splitlines()
        return f"it said: {lines[-1] if lines else 'nothing'}"


def _followed(status: int) -> int:
    """Returns a rank, higher if a status is likelier a consequence of another."""
    return {-signal.SIGABRT: 1, 1: 2}.get(status, 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_COORDINATOR, 0))
        return probe.getsockname()[1]
