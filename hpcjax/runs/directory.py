"""The directory of a run: its files, its lock, and finding it again.

`runs/<date>-<config>-<6 hex>/` contains `config.json`, `provenance.json`,
`metrics.jsonl`, `checkpoints/`, `result.nc`, `log.txt` and `status`, `tags.txt` if it
has tags, and `lock` while a process writes to it. All files except the records and the
log are replaced atomically.
A run that is done or has diverged has `checksums.json` over what it is judged by.
"""

import contextlib
import datetime
import itertools
import logging
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, nearest
from hpcjax.runs import config as configs
from hpcjax.runs import discover, lock
from hpcjax.runs.metrics import Metrics, NullRecorder
from hpcjax.train.recorder import Recorder

if TYPE_CHECKING:
    import xarray as xr

Status = Literal["running", "done", "failed", "preempted", "diverged"]
log = logging.getLogger(__name__)

WORKERS = "workers"  # the folder of those that are processes, but for the first
CHECKSUMS = "checksums.json"
_SEALED = (
    *("config.json", "provenance.json", "metrics.jsonl", "result.nc", "trace-*.npz"),
    *(f"{WORKERS}/*/metrics.jsonl", f"{WORKERS}/*/trace-*.npz"),
)
_COPIED = ("checkpoints", "metrics.jsonl", WORKERS, "trace-*.npz")


def data_root(root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of data sets: `HPCJAX_DATA`, else `<root>/.cache/data`."""
    named = os.environ.get("HPCJAX_DATA")
    return pathlib.Path(named).expanduser() if named else root / ".cache" / "data"


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


def create(
    root: pathlib.Path,
    config_name: str,
    config: Any,
    parent: RunDirectory | None = None,
) -> RunDirectory:
    """Makes the folder of a new run, with its config and the status `running`.

    Args:
      root: folder that holds `runs/`.
      config_name: `paper/config[:variant]`.
      config: the config to run.
      parent: the run that is forked; its checkpoints and records are copied.
    """
    name = config_name.replace("/", "-").replace(":", "-")
    files.check_name(name, "config name")
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = files.inside(root, "runs", f"{day}-{name}-{secrets.token_hex(3)}")
    files.make_folder(path.parent)
    with files.disk_errors(path):
        path.mkdir()
    folder = RunDirectory(path)
    folder.set_status("running")
    if parent is not None:
        _copy(parent, folder)
    # Written last, since a folder with a config counts as a run.
    folder.write_config(config_name, config, parent.id if parent else None)
    return folder


def open_run(root: pathlib.Path, run_id: str) -> RunDirectory:
    """Returns the folder of an existing run.

    Args:
      root: folder that holds `runs/`.
      run_id: the folder's name, or its last six digits where they are unique.

    Raises:
      ConfigError: no such run; names the nearest.
    """
    ids = [run.id for run in list_runs(root)]
    ending = [known for known in ids if known.endswith(f"-{run_id}")]
    if run_id not in ids and len(ending) == 1:
        run_id = ending[0]
    if run_id not in ids:
        raise ConfigError(
            f"no run {run_id!r} in {root / 'runs'}{nearest(run_id, ids[-20:])}"
        )
    return RunDirectory(files.inside(root, "runs", run_id))


def list_runs(root: pathlib.Path) -> list[RunDirectory]:
    """Returns every run below `root`, oldest first."""
    folders = [path.parent for path in (root / "runs").glob("*/config.json")]
    return [
        RunDirectory(path)
        for path in sorted(folders, key=lambda path: (path.name[:10], _age(path)))
    ]


def _age(path: pathlib.Path) -> float:
    return (path / "config.json").stat().st_mtime


def find_run(
    root: pathlib.Path,
    digest: str,
    statuses: Collection[Status] = ("done",),
    *,
    devices: int | None = None,
    code: str | None = None,
    free: bool = False,
) -> RunDirectory | None:
    """Returns the newest run all of whose steps were of a config, if there is one.

    Forked runs, and runs that were resumed after a change of their config, do not
    count, as their first steps were of another config; nor do runs whose files cannot
    be read, or were changed since they ended. A run that was killed before it wrote its
    provenance has taken no step, and counts.

    Args:
      root: folder that holds `runs/`.
      digest: of the config.
      statuses: the allowed statuses; a run that is `"done"` must have a result.
      devices: the number of devices in all its sessions; None for any number.
      code: the digest of the code of all its sessions; None for any code.
      free: whether runs that a living process holds are excluded.
    """
    for run in reversed(list_runs(root)):
        with contextlib.suppress(DataFormatError, RecursionError):
            if run.status not in statuses or not _is_of(run, digest, devices, code):
                continue
            if free and lock.is_held(run.path):
                continue
            if run.status != "done" or (run.path / "result.nc").exists():
                if changed := run.changed():
                    log.warning("run %s is not used: %s", run.id, changed)
                    continue
                return run
    return None


def _is_of(
    run: RunDirectory, digest: str, devices: int | None, code: str | None
) -> bool:
    """Returns whether all of a run was of a config, a number of devices and a code."""
    if run.parent is not None or configs.digest_json(run.read_config()) != digest:
        return False
    sessions = [] if _ended_before_start(run) else run.sessions()
    return all(
        session.get("config_digest") == digest
        and not session.get("trusted")
        and devices in (None, session.get("used_devices"))
        and code in (None, session.get("code"))
        for session in sessions
    )


def _ended_before_start(run: RunDirectory) -> bool:
    """Returns whether a run ended before it could write its provenance."""
    if (run.path / "provenance.json").exists():
        return False
    # Without a lock file it has just been created, and is about to start.
    killed = run.status == "running" and (run.path / "lock").exists()
    return killed or run.status in ("preempted", "failed")


@contextlib.contextmanager
def claim(
    root: pathlib.Path,
    loaded: discover.Loaded,
    *,
    resume: str | None = None,
    fork: bool = False,
) -> Iterator[RunDirectory]:
    """Holds the directory in which a config is to be run, a new or an existing one.

    Args:
      root: folder that holds `runs/`.
      loaded: the config to run.
      resume: id of a run to resume, whose config may differ from `loaded` in the keys
        that the config's class lists in `resumable`; or `last` for the newest
        interrupted run of this config, if there is one.
      fork: with `resume`, create a run that starts from a copy of that run's
        checkpoints and records, with any config.

    Raises:
      ConfigError: no such run, a config with which it cannot be resumed, fewer steps
        than it has taken, or `fork` without `resume`. The run is not changed.
      RunBusy: another process holds the run.
    """
    if resume == "last":
        digest = configs.digest(loaded.config)
        cut = ("running", "preempted", "failed")
        # Also a run that is held, for which `hold_lock` then raises RunBusy.
        last = find_run(root, digest, cut)
        resume = last.id if last else None
    if resume is None:
        if fork:
            raise ConfigError("fork needs the id of a run to resume from")
        with create(root, loaded.title, loaded.config).hold_lock() as folder:
            log.info("run %s in %s", folder.id, folder.path.parent)
            yield folder
        return
    with open_run(root, resume).hold_lock() as old:
        if not fork:
            _continue(old, loaded)
            log.info("run %s in %s goes on", old.id, old.path.parent)
            yield old
            return
        child = create(root, loaded.title, loaded.config, parent=old)
    with child.hold_lock():
        log.info("run %s in %s, forked from %s", child.id, child.path.parent, old.id)
        yield child


def _continue(folder: RunDirectory, loaded: discover.Loaded) -> None:
    """Checks that a run may be resumed with a config, and writes that config."""
    data = folder.read_config()
    configs.check_resumable(configs.from_json(data, type(loaded.config)), loaded.config)
    taken = folder.steps_taken()
    if loaded.steps is not None and loaded.steps < taken:
        raise ConfigError(
            f"steps must be at least the {taken} that the run has taken: "
            f"got {loaded.steps}"
        )
    folder.unseal()
    if configs.digest(loaded.config) != configs.digest_json(data):
        # A kill from here on must not leave an end that is of another config.
        folder.set_status("running")
    folder.write_config(loaded.title, loaded.config, data.get("parent"))


def _copy(old: RunDirectory, child: RunDirectory) -> None:
    for source in itertools.chain(*map(old.path.glob, _COPIED)):
        target = child.path / source.name
        with files.disk_errors(target):
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copyfile(source, target)
