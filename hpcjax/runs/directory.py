"""Directories of runs: made, found again, claimed by who runs a config."""

import contextlib
import datetime
import itertools
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, nearest
from hpcjax.runs import config as configs
from hpcjax.runs import discover, lock
from hpcjax.runs.run_directory import WORKERS, RunDirectory, Status

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

_COPIED = ("checkpoints", "metrics.jsonl", WORKERS, "trace-*.npz")


def data_root(root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of data sets: `HPCJAX_DATA`, else `<root>/.cache/data`."""
    named = os.environ.get("HPCJAX_DATA")
    return pathlib.Path(named).expanduser() if named else root / ".cache" / "data"


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
    parent: str | None = None,
) -> RunDirectory | None:
    """Returns the newest run all of whose steps were of a config, if there is one.

    Runs that were resumed after a change of their config do not count, as their first
    steps were of another config, and forked runs only if that parent is asked for; nor
    do runs whose files cannot be read, or were changed since they ended. A run that was
    killed before it wrote its provenance has taken no step, and counts.

    Args:
      root: folder that holds `runs/`.
      digest: of the config.
      statuses: the allowed statuses; a run that is `"done"` must have a result.
      devices: the number of devices in all its sessions; None for any number.
      code: the digest of the code of all its sessions; None for any code.
      free: whether runs that a living process holds are excluded.
      parent: id of the run from which it is to be forked; None for of none.
    """
    for run in reversed(list_runs(root)):
        with contextlib.suppress(DataFormatError, RecursionError):
            if run.status not in statuses or run.parent != parent:
                continue
            if not _is_of(run, digest, devices, code):
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
    if configs.digest_json(run.read_config()) != digest:
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
        than it has taken, `fork` without `resume`, or from a run whose data are not
        what the config goes on from. The run is not changed.
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
        _check_before(old, loaded.config)
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


def _check_before(old: RunDirectory, config: Any) -> None:
    """Lets a data set that goes on from a run refuse one of other data."""
    check = getattr(getattr(config, "dataset", None), "check_before", None)
    if check is None:
        return
    own = configs.to_json(config)["values"]["dataset"]
    theirs = old.read_config()["values"].get("dataset") or {}
    check({name: theirs.get(name) for name in own if theirs.get(name) != own[name]})


def _copy(old: RunDirectory, child: RunDirectory) -> None:
    for source in itertools.chain(*map(old.path.glob, _COPIED)):
        target = child.path / source.name
        with files.disk_errors(target):
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copyfile(source, target)
