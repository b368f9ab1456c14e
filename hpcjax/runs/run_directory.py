"""The directory of a run: its files and its lock.

`runs/<date>-<config>-<6 hex>/` contains `config.json`, `provenance.json`,
`metrics.jsonl`, `checkpoints/`, `result.nc`, `log.txt` and `status`, `tags.txt` if it
has tags, and `lock` while a process writes to it. All files except the records and the
log are replaced atomically.
A run that is done or has diverged has `checksums.json` over what it is judged by.
"""

import contextlib
import logging
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.runs import config as configs
from hpcjax.runs import lock
from hpcjax.runs.metrics import Metrics, NullRecorder
from hpcjax.train.recorder import Recorder

if TYPE_CHECKING:
    import xarray as xr

Status = Literal["running", "done", "failed", "preempted", "diverged"]

WORKERS = "workers"  # the folder of those that are processes, but for the first
CHECKSUMS = "checksums.json"
_SEALED = (
    *("config.json", "provenance.json", "metrics.jsonl", "result.nc", "trace-*.npz"),
    *(f"{WORKERS}/*/metrics.jsonl", f"{WORKERS}/*/trace-*.npz"),
)


class RunDirectory:
    """One run's folder.

    Make one with `create`, `open_run` or `claim`; only a process that holds its lock
    may write to it.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config_name(self) -> str:
        """The path of the run's config, which can be given for a config's name."""
        return f"runs/{self.id}/config.json"

    @property
    def again(self) -> str:
        """The command that resumes the run."""
        return f"hpcjax run {self.config_name} --resume {self.id}"

    @property
    def parent(self) -> str | None:
        """Id of the run that this one was forked from."""
        return self.read_config().get("parent")

    def read_config(self) -> dict[str, Any]:
        """Returns `config.json`: `name`, `class`, `values`, and `parent` of a fork.

        Raises:
          DataFormatError: it is not there, or not JSON of this form.
        """
        return _read_object(self.path / "config.json")

    def write_config(self, name: str, config: Any, parent: str | None = None) -> None:
        """Writes `config.json`, which `hpcjax run` accepts in place of a name."""
        data = {"name": name, **configs.to_json(config)}
        if parent is not None:
            data["parent"] = parent
        files.write_json(self.path / "config.json", data)

    def write_provenance(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the provenance of this session: commit, versions, devices, seed.

        A run that was resumed has several sessions; `earlier` holds those before.

        Returns:
          The new content of the file.
        """
        path = self.path / "provenance.json"
        held = dict(provenance)
        if path.exists():
            held["earlier"] = self.sessions()
        files.write_json(path, held)
        return held

    def rewrite_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Replaces what `write_provenance` has written and returned."""
        files.write_json(self.path / "provenance.json", provenance)

    def sessions(self) -> list[dict[str, Any]]:
        """Returns the provenance of every session of the run, oldest first.

        Raises:
          DataFormatError: `provenance.json` is not there, or not of its form.
        """
        path = self.path / "provenance.json"
        newest = _read_object(path)
        earlier = newest.pop("earlier", [])
        if not isinstance(earlier, list) or {*map(type, earlier)} - {dict}:
            raise DataFormatError(f"{path}: earlier must be a list of objects")
        return [*earlier, newest]

    def steps_taken(self) -> int:
        """Returns the step of the newest checkpoint, from which it would be resumed."""
        names = [path.name for path in (self.path / "checkpoints").glob("*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    @property
    def status(self) -> Status:
        """The status of the run; that of a killed one stays `running`.

        Raises:
          DataFormatError: the file is missing or holds another word.
        """
        path = self.path / "status"
        word = path.read_text().strip() if path.exists() else ""
        for status in get_args(Status):
            if word == status:
                return status
        raise DataFormatError(
            f"{path}: expected one of {get_args(Status)}: got {word!r}"
        )

    def seal(self) -> None:
        """Writes checksums of the files that will not change any more.

        Checkpoints have theirs; logs, copies for services and reports may change.
        """
        sums = {
            path.relative_to(self.path).as_posix(): files.checksum(path)
            for pattern in _SEALED
            for path in sorted(self.path.glob(pattern))
        }
        files.write_json(self.path / CHECKSUMS, sums)

    def unseal(self) -> None:
        """Removes the checksums, before a run goes on."""
        (self.path / CHECKSUMS).unlink(missing_ok=True)

    def changed(self) -> dict[str, str] | None:
        """Returns which files were changed since `seal`, and how; None if not sealed.

        Raises:
          DataFormatError: the checksums cannot be read.
        """
        if not (self.path / CHECKSUMS).exists():
            return None
        found = {}
        for name, kept in _read_object(self.path / CHECKSUMS).items():
            path = self.path / name
            if not path.is_file():
                found[name] = "missing, and was there when the run ended"
            elif files.checksum(path) != kept:
                found[name] = "changed since the run ended"
        return found

    @property
    def standing(self) -> str:
        """The status for users: `interrupted` if it is `running` without a process.

        Raises:
          DataFormatError: as for `status`.
        """
        cut = self.status == "running" and not lock.is_held(self.path)
        return "interrupted" if cut else self.status

    def set_status(self, status: str) -> None:
        """Writes the status.

        Raises:
          ConfigError: it is none of the five words.
        """
        if status not in get_args(Status):
            raise ConfigError(
                f"status must be one of {get_args(Status)}: got {status!r}"
            )
        files.write_atomic(self.path / "status", status + "\n")

    def metrics(self) -> Recorder:
        """Returns the run's records, to append to."""
        return Metrics(self.path / "metrics.jsonl")

    def records(self) -> list[dict[str, Any]]:
        """Returns the run's records in order."""
        return Metrics(self.path / "metrics.jsonl").read()

    def newest_records(self) -> list[dict[str, Any]]:
        """Returns the last of the run's records, without reading all of them."""
        return Metrics(self.path / "metrics.jsonl").read_newest()

    def write_result(self, dataset: "xr.Dataset", origin: Mapping[str, Any]) -> None:
        """Writes the result of the experiment."""
        from hpcjax.runs import results

        results.write(dataset, self.path / "result.nc", origin)

    @contextlib.contextmanager
    def logging(self, process: int = 0) -> Iterator[None]:
        """Appends log messages from INFO on to `log.txt`, or `log.<process>.txt`."""
        name = f"log.{process}.txt" if process else "log.txt"
        handler = logging.FileHandler(self.path / name, encoding="utf-8")
        form = logging.Formatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s")
        form.converter = time.gmtime
        handler.setFormatter(form)
        logger = logging.getLogger("hpcjax")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
            handler.close()

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator["RunDirectory"]:
        """Holds the run's lock.

        Raises:
          RunBusy: another process, or another part of this one, holds it.
        """
        with lock.hold(self.path):
            yield self


class Follower(RunDirectory):
    """The directory of a run for processes other than the first, which only read."""

    def seal(self) -> None:
        """Does nothing: the first process does it."""

    def unseal(self) -> None:
        """Does nothing."""

    def write_config(self, name: str, config: Any, parent: str | None = None) -> None:
        """Does nothing: the first process does it."""

    def write_provenance(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Writes nothing."""
        return dict(provenance)

    def rewrite_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Does nothing."""

    def set_status(self, status: str) -> None:
        """Does nothing."""

    def write_result(self, dataset: "xr.Dataset", origin: Mapping[str, Any]) -> None:
        """Does nothing."""

    def metrics(self) -> Recorder:
        """Returns a recorder that keeps nothing."""
        return NullRecorder()


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        return files.read_object(path)
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error}") from error
