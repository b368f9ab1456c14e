"""One run from its config's name to its result on disk."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcjax.core import provenance
from hpcjax.core.errors import ConfigError, Diverged, Preempted, ProcessLost
from hpcjax.runs import config as configs
from hpcjax.runs import directory, discover, results
from hpcjax.runs.progress import Progress
from hpcjax.runs.signals import StopSignals
from hpcjax.train.writers import check_writers

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run.

    Attributes:
      id: its name below `runs/`.
      directory: its folder.
      dataset: what its experiment returned.
      leads: False in all but the first of several processes.
    """

    id: str
    directory: pathlib.Path
    dataset: "xr.Dataset"
    leads: bool = True


def run(
    name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    root: pathlib.Path | None = None,
    resume: str | None = None,
    fork: bool = False,
    devices: int | None = None,
    distributed: bool = False,
    log: Sequence[str] = (),
    trust: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Runs a config and writes its result.

    Args:
      name: `paper/config[:variant]`, or the path of a run's `config.json`.
      overrides: `{"optimizer.lr": "0.3"}`, values as on the command line.
      root: folder that holds `runs/`, and configs besides the bundled ones; default the
        working directory.
      resume: id of an interrupted run to continue; `last` is the newest one of this
        config, or a new run if there is none.
      fork: with `resume`, start a child run from that run's checkpoints instead, whose
        config may differ.
      devices: devices of the data axis; default one, or with `distributed` all.
      distributed: this is one of several processes, see `sharding.connect`; all call
        this function alike, and the first of them writes.
      log: services whose form the records are copied into, below the run's folder:
        `tensorboard`, `wandb`, `mlflow`.
      trust: with `resume`, also load a checkpoint without a manifest, of which nothing
        can be verified.
      quiet: no progress line.

    Returns:
      The run's id, folder and dataset.

    Raises:
      ConfigError: a name, key or value that cannot be used.
      RunBusy: another process holds the run to resume.
      Preempted: a signal asked it to stop (Interrupted for Ctrl-C); the run directory
        is consistent, and training goes on from its last step with `resume`.
      WriterFailed: a service did not take a record; `resume` goes on in the same way.

    Examples:
      `runs.run("jorge/digits:sgd", {"train.steps": "200"})`
    """
    root = root or pathlib.Path.cwd()
    loaded = discover.load(name, overrides or {}, root)
    check_log(loaded, log)
    if trust and resume is None:
        raise ConfigError("trust needs the id of a run to resume from")
    how = _How(root=root, devices=devices, quiet=quiet, log=tuple(log), trust=trust)
    claim = functools.partial(directory.claim, root, loaded, resume=resume, fork=fork)
    if distributed:
        return _run_jointly(loaded, how, claim)
    with claim() as folder, folder.logging():
        return _execute(loaded, folder, how)


def check_log(loaded: discover.Loaded, log: Sequence[str]) -> None:
    """Raises ConfigError unless a config's records can be copied for these services."""
    check_writers(log)
    if log and loaded.steps is None:
        raise ConfigError(f"{loaded.title} does not train: it has no records to log")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """How a config is run, but for what it says itself; see `run`."""

    root: pathlib.Path
    devices: int | None = None
    quiet: bool = False
    log: tuple[str, ...] = ()
    trust: bool = False
    among_others: bool = False


def _run_jointly(
    loaded: discover.Loaded,
    how: _How,
    claim: Callable[[], contextlib.AbstractContextManager[directory.RunDirectory]],
) -> RunResult:
    """Runs a config in several processes, of which the first holds the folder."""
    from hpcjax import sharding

    sharding.connect()
    import jax

    index = jax.process_index()
    how = dataclasses.replace(how, devices=how.devices or jax.device_count())
    with contextlib.ExitStack() as stack:
        if index:
            place = sharding.broadcast("")
            if not place:
                raise ProcessLost("process 0 could not begin the run, and says why")
            folder: directory.RunDirectory = directory.Follower(pathlib.Path(place))
            how = dataclasses.replace(how, quiet=True, log=())
        else:
            try:
                folder = stack.enter_context(claim())
            except BaseException:
                sharding.broadcast("")
                raise
            sharding.broadcast(str(folder.path.resolve()))
        stack.enter_context(folder.logging(index))
        result = _execute(loaded, folder, how)
        sharding.wait_for_all("end of the run")
    return dataclasses.replace(result, leads=index == 0)


def ensure(
    name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    root: pathlib.Path | None = None,
    devices: int = 1,
    fresh: bool = False,
    quiet: bool = False,
) -> directory.RunDirectory:
    """Returns a run of a config on so many devices that has ended well or diverged.

    One that is there is used again, one that was interrupted goes on, and only then is
    one begun.

    Args:
      name: `paper/config[:variant]`.
      overrides: values as on the command line.
      root: folder that holds `runs/`; default the working directory.
      devices: of the data axis.
      fresh: begin one in any case.
      quiet: no progress line.
    """
    root = root or pathlib.Path.cwd()
    loaded = discover.load(name, overrides or {}, root)
    find = functools.partial(
        directory.find_run, root, configs.digest(loaded.config), devices=devices
    )
    ended = None if fresh else find(("done", "diverged"))
    if ended is not None:
        return ended
    cut = None if fresh else find(("running", "preempted"), free=True)
    resume = None if cut is None else cut.id
    with directory.claim(root, loaded, resume=resume) as folder, folder.logging():
        try:
            how = _How(root=root, devices=devices, quiet=quiet, among_others=True)
            _execute(loaded, folder, how)
        except Diverged as error:
            log.warning("%s with %s diverged: %s", name, overrides, error)
    return folder


def _execute(
    loaded: discover.Loaded, folder: directory.RunDirectory, how: _How
) -> RunResult:
    origin = _begin(loaded, folder, how)
    with StopSignals() as signals:
        try:
            with Progress(loaded.title, loaded.steps, quiet=how.quiet) as progress:
                context = make_context(how, folder, progress, signals)
                dataset = loaded.experiment.run(loaded.config, context)
            folder.write_result(dataset, origin)
        except Preempted as error:
            folder.set_status("preempted")
            raise type(error)(f"{error}; to go on: {folder.again}") from None
        except BaseException as error:
            folder.set_status(_status(error))
            raise
        folder.set_status("done")
        if how.among_others:
            signals.check()  # the request was to stop, and more runs would follow
    return RunResult(id=folder.id, directory=folder.path, dataset=dataset)


def _begin(
    loaded: discover.Loaded, folder: directory.RunDirectory, how: _How
) -> dict[str, Any]:
    """Writes where what is run now comes from, and returns it with sessions before."""
    seed = getattr(loaded.config, "seed", None)
    try:
        origin = provenance.collect(devices=True, seed=seed, parent=folder.parent)
        origin["config_digest"] = configs.digest(loaded.config)
        origin["used_devices"] = how.devices or 1
        origin["trusted"] = how.trust  # a state that nobody could verify
        origin = folder.write_provenance(origin)
    except BaseException as error:
        if folder.status == "running":  # a new run: one that goes on is as it was
            folder.set_status(_status(error))
        raise
    folder.set_status("running")
    return origin


def _keep_compiled(root: pathlib.Path) -> None:
    """Keeps compiled programs below `root`, so that further seeds start at once."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(root / ".cache" / "jax"))


def make_context(
    how: _How,
    folder: directory.RunDirectory,
    progress: Progress,
    signals: StopSignals,
) -> "Context":
    """Returns the context of a run in `folder`."""
    from hpcjax import sharding
    from hpcjax.runs.context import Context

    _keep_compiled(how.root)
    return Context(
        directory.data_root(how.root),
        sharding.data_mesh(how.devices or 1),
        folder,
        progress,
        signals,
        log=how.log,
        trust=how.trust,
    )


def _status(error: BaseException) -> str:
    if isinstance(error, Diverged):
        return "diverged"
    return "preempted" if isinstance(error, KeyboardInterrupt) else "failed"


def load_result(run_id: str, *, root: pathlib.Path | None = None) -> Any:
    """Returns the dataset of a finished run by its id.

    Raises:
      ConfigError: no such run, or it has not finished.
    """
    return read_result(directory.open_run(root or pathlib.Path.cwd(), run_id))


def read_result(folder: directory.RunDirectory) -> "xr.Dataset":
    """Returns what a run's experiment returned.

    Raises:
      ConfigError: the run has not finished.
    """
    path = folder.path / "result.nc"
    if not path.exists():
        raise ConfigError(f"run {folder.id} has no result: it is {folder.standing}")
    return results.read(path)
