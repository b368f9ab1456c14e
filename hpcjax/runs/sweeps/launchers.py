"""Starting a sweep's workers: here, on a Ray cluster, or as Slurm jobs.

A launcher is a function `(name, root, index) -> Job` that starts one worker. Workers
find their trials in the sweep's folder, so machines need nothing but that folder, the
package and the data in common.
"""

import functools
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import yaml

from hpcjax.core import environment
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import overrides

_REACH = 10.0  # seconds


@runtime_checkable
class Job(Protocol):
    """A worker that has been started, as submitit returns it."""

    def done(self) -> bool:
        """Returns whether it has ended."""
        ...

    def result(self) -> int:
        """Returns the exit status of one that has ended.

        Negative for a signal. Any error says that its process, or its node, is gone.
        """
        ...

    def cancel(self) -> None:
        """Asks it to save and end; asked again, it ends at once."""
        ...


Launcher = Callable[[str, pathlib.Path, int], Job]


def make_launcher(text: str) -> Launcher:
    """Returns a launcher from its name and options, `slurm:slurm_partition=gpu`.

    Args:
      text: `local` starts processes, `ray` tasks on the cluster that `RAY_ADDRESS` or
        the option `address` names, with options of `ray.remote`; `slurm` jobs through
        submitit, with options of its executor (`cluster=local` tries it out here).

    Raises:
      ConfigError: no such launcher, its package is not installed, an option that it
        does not know, or a cluster that is not there.
    """
    name, _, rest = text.partition(":")
    if name not in _MAKERS:
        raise ConfigError(f"unknown launcher {name!r}{nearest(name, _MAKERS)}")
    given = overrides.pairs(rest.split(",")) if rest else {}
    try:
        options = {key: yaml.safe_load(value) for key, value in given.items()}
    except yaml.YAMLError as error:
        raise ConfigError(
            f"launcher {text!r} has options that cannot be read"
        ) from error
    return _MAKERS[name](options)


class _Process:
    """A worker that is a process of this machine."""

    def __init__(self, name: str, root: pathlib.Path, index: int) -> None:
        logs = root / "sweeps" / name / "workers"
        logs.mkdir(exist_ok=True)
        with (logs / f"{index}.log").open("a") as file:
            # A session of its own: Ctrl-C reaches it through the driver alone.
            self._process = subprocess.Popen(
                _command(name, root),
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=environment.child(),
            )
        self._stop = iter([self._process.terminate])

    def done(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> int:
        return self._process.wait()

    def cancel(self) -> None:
        next(self._stop, self._process.kill)()


def _command(name: str, root: str | pathlib.Path) -> list[str]:
    return [sys.executable, "-m", "hpcjax.runs.sweeps.worker", name, str(root)]


def _local(options: dict[str, Any]) -> Launcher:
    if options:
        raise ConfigError(f"launcher local has no options: got {sorted(options)}")
    return _Process


def _ray(options: dict[str, Any]) -> Launcher:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "launcher ray needs ray: pip install 'hpcjax[ray]'"
        ) from error
    address = str(options.pop("address", os.environ.get("RAY_ADDRESS")) or "") or None
    settings: dict[str, Any] = {"num_cpus": 1, "max_retries": 0, **options}
    try:
        remote = ray.remote(**settings)(_work)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"ray does not take these options: {error}") from error
    try:
        if not ray.is_initialized():
            _check_listens(address or "")
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address!r}: {error}") from error

    def launch(name: str, root: pathlib.Path, index: int) -> Job:
        return _RayTask(remote.remote(name, str(root), environment.portable()))

    return launch


def _check_listens(address: str) -> None:
    """Raises OSError if nobody listens; Ray would try for a quarter of an hour."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


def _work(name: str, root: str, env: Mapping[str, str]) -> int:
    """Runs a worker as a child of the process that Ray or submitit started."""
    # Variables set on its machine, such as the visible devices, take precedence.
    own = {**env, **os.environ, "PYTHONPATH": env["PYTHONPATH"]}
    with subprocess.Popen(_command(name, root), env=own) as process:
        try:
            return process.wait()
        except BaseException:  # cancelled: it still has to save
            process.terminate()
            process.wait()
            raise


class _RayTask:
    """A worker that is a task of Ray."""

    def __init__(self, reference: Any) -> None:
        self._reference, self._force = reference, False

    def done(self) -> bool:
        import ray

        return bool(ray.wait([self._reference], timeout=0)[0])

    def result(self) -> int:
        import ray

        return ray.get(self._reference)

    def cancel(self) -> None:
        import ray

        ray.cancel(self._reference, force=self._force)
        self._force = True


def _slurm(options: dict[str, Any]) -> Launcher:
    try:
        import submitit
    except ImportError as error:
        raise ConfigError(
            "launcher slurm needs submitit: pip install 'hpcjax[slurm]'"
        ) from error
    cluster = options.pop("cluster", None)

    @functools.cache
    def executor(folder: pathlib.Path) -> Any:
        # submitit asserts types, and raises RuntimeError on a machine without Slurm.
        wrong = (AssertionError, NameError, RuntimeError, TypeError, ValueError)
        try:
            made = submitit.AutoExecutor(folder, cluster=cluster)
            made.update_parameters(**options)
        except wrong as error:
            raise ConfigError(f"submitit does not take these: {error}") from error
        return made

    # Checks the options at once; it writes nothing.
    executor(pathlib.Path())

    def launch(name: str, root: pathlib.Path, index: int) -> Job:
        folder = root / "sweeps" / name / "jobs"
        return executor(folder).submit(_work, name, str(root), environment.portable())

    return launch


_MAKERS = {"local": _local, "ray": _ray, "slurm": _slurm}
