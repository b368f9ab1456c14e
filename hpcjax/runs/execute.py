"""Running a config: from its name to the result on disk."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcjax.core import compat, compile_cache, drift, provenance
from hpcjax.core.errors import ConfigError, Diverged, Preempted, ProcessLost
from hpcjax.runs import code, directory, discover, outlines, results
from hpcjax.runs import config as configs
from hpcjax.runs import tags as tagging
from hpcjax.runs.progress import Progress
from hpcjax.runs.run_directory import Follower
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
      dataset: the result of its experiment.
      leads: False in all processes but the first.
    """

    id: str
    directory: pathlib.Path
    dataset: "xr.Dataset"
    leads: bool = True


def run(  # noqa: PLR0913 - an argument for each option
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
    profile: bool = False,
    quiet: bool = False,
    tags: Sequence[str] = (),
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
      distributed: whether this is one of several processes, see `sharding.connect`. All
        make the same call, and the first one writes.
      log: services for which records are copied to the run's folder: `tensorboard`,
        `wandb`, `mlflow`.
      trust: with `resume`, also load a checkpoint without a manifest, which cannot be
        verified.
      profile: trace five training steps with JAX's profiler, below the run's folder
        `profile`; their times are longer for it.
      quiet: show no progress line.
      tags: words by which `hpcjax list --runs --tag` finds the run; a run that is
        resumed keeps those that it has.

    Returns:
      The run's id, folder and dataset.

    Raises:
      ConfigError: a name, key or value that cannot be used.
      RunBusy: another process holds the run to resume.
      Preempted: a signal asked it to stop (Interrupted for Ctrl-C); the run directory
        is consistent, and `resume` continues from the last step.
      WriterFailed: a service did not accept a record; `resume` continues likewise.

    Examples:
      `runs.run("jorge/digits:sgd", {"train.steps": "200"})`
    """
    root = root or pathlib.Path.cwd()
    loaded = discover.load(name, overrides or {}, root)
    if devices is not None or not distributed:
        loaded.check_devices(devices or 1)
    check_log(loaded, log)
    tagging.check_tags(tags)
    if trust and resume is None:
        raise ConfigError("trust needs the id of a run to resume from")
    if profile and (loaded.steps is None or starts_processes(loaded) or distributed):
        raise ConfigError(
            f"a profile is of a training in this process alone: {loaded.title} does "
            f"not train, or in several processes; got distributed={distributed}"
        )
    if starts_processes(loaded) and (trust or distributed):
        raise ConfigError(
            f"{loaded.title} starts processes of its own, which trust no checkpoint "
            f"and are not distributed: got trust={trust}, distributed={distributed}"
        )
    how = _How(
        root=root,
        devices=devices,
        quiet=quiet,
        log=tuple(log),
        trust=trust,
        profile=profile,
        tags=tuple(tags),
    )
    claim = functools.partial(directory.claim, root, loaded, resume=resume, fork=fork)
    if distributed:
        return _run_jointly(loaded, how, claim)
    compat.start_devices()  # before there is a folder of a run that cannot be
    with claim() as folder, folder.logging():
        return _execute(loaded, folder, how)


def check_log(loaded: discover.Loaded, log: Sequence[str]) -> None:
    """Raises ConfigError unless a config's records can be copied for the services."""
    check_writers(log)
    if log and loaded.steps is None:
        raise ConfigError(f"{loaded.title} does not train: it has no records to log")
    if log and starts_processes(loaded):
        raise ConfigError(
            f"{loaded.title} starts processes of its own, whose records cannot be "
            f"logged: got log={[*log]}"
        )


def starts_processes(loaded: discover.Loaded) -> bool:
    """Returns whether a config trains in processes that the run starts by itself."""
    return loaded.steps is not None and getattr(loaded.config, "processes", 1) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """How a config is run, besides what the config itself says; see `run`."""

    root: pathlib.Path
    devices: int | None = None
    quiet: bool = False
    log: tuple[str, ...] = ()
    trust: bool = False
    profile: bool = False
    tags: tuple[str, ...] = ()
    place: str = ""
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
            folder: directory.RunDirectory = Follower(pathlib.Path(place))
            how = dataclasses.replace(how, quiet=True, log=(), tags=())
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
    place: str = "",
    after: str | None = None,
) -> directory.RunDirectory:
    """Returns a run of a config that has finished or diverged.

    An existing run of the same code is used again, an interrupted one is resumed, and
    only if there is neither a new one is started; with `after`, the id of a run, all
    three are forks of that one.
    """
    root = root or pathlib.Path.cwd()
    loaded = discover.load(name, overrides or {}, root)
    find = functools.partial(
        directory.find_run,
        root,
        configs.digest(loaded.config),
        devices=devices,
        code=code.of_run(loaded.config),
        parent=after,
    )
    ended = None if fresh else find(("done", "diverged"))
    if ended is not None:
        log.info("run %s is of this config and this code, and used again", ended.id)
        return ended
    cut = None if fresh else find(("running", "preempted"), free=True)
    resume, fork = (after, after is not None) if cut is None else (cut.id, False)
    with (
        directory.claim(root, loaded, resume=resume, fork=fork) as folder,
        folder.logging(),
    ):
        try:
            how = _How(
                root=root,
                devices=devices,
                quiet=quiet,
                place=place,
                among_others=True,
            )
            _execute(loaded, folder, how)
        except Diverged as error:
            log.warning("%s with %s diverged: %s", name, overrides, error)
    return folder


def _execute(
    loaded: discover.Loaded, folder: directory.RunDirectory, how: _How
) -> RunResult:
    """Runs a config in a folder that this process holds."""
    origin = _begin(loaded, folder, how)
    with StopSignals() as signals:
        try:
            title = how.place + loaded.title
            with Progress(title, loaded.steps, quiet=how.quiet) as progress:
                context = make_context(how, folder, progress, signals)
                with drift.listening() as moved:
                    found = loaded.experiment.run(loaded.config, context)
                dataset = outlines.explain(loaded.config, found)
                if moved:
                    dataset = dataset.assign_attrs(drift=max(moved))
            _tell_versions(folder, origin)
            folder.write_result(dataset, origin)
        except Preempted as error:
            folder.set_status("preempted")
            raise type(error)(f"{error}; to go on: {folder.again}") from None
        except BaseException as error:
            status = _status(error)
            if status == "diverged":  # tables use it as it is
                _tell_versions(folder, origin)
                folder.seal()
            folder.set_status(status)
            raise
        folder.seal()
        folder.set_status("done")
        if how.among_others:
            # A signal that came too late to stop this run stops those that would
            # follow.
            signals.check()
    return RunResult(id=folder.id, directory=folder.path, dataset=dataset)


def _tell_versions(folder: directory.RunDirectory, origin: dict[str, Any]) -> None:
    """Writes versions of what the run has imported, which its beginning cannot know."""
    origin["versions"] = provenance.versions()
    folder.rewrite_provenance(origin)


@functools.cache
def _tell_unversioned(root: pathlib.Path) -> None:
    """Tells once that nothing but the user keeps what a root's runs were made by."""
    if not provenance.is_versioned(root):
        directory.log.info(
            "%s is in no git repository: its runs keep a digest of experiments/ and "
            "configs/, which tells that these have changed, and not how",
            root,
        )


def _begin(
    loaded: discover.Loaded, folder: directory.RunDirectory, how: _How
) -> dict[str, Any]:
    """Writes the provenance of this session; returns it with that of earlier ones."""
    seed = getattr(loaded.config, "seed", None)
    folder.unseal()
    try:
        tagging.add_tags(folder.path, how.tags)
        origin = provenance.collect(
            devices=True, seed=seed, parent=folder.parent, root=how.root
        )
        if origin["root_files"]:
            _tell_unversioned(how.root)
        origin["config_digest"] = configs.digest(loaded.config)
        origin["code"] = code.of_run(loaded.config)
        origin["used_devices"] = how.devices or 1
        # Marks runs that continued from a state which could not be verified.
        origin["trusted"] = how.trust
        origin = folder.write_provenance(origin)
        if {each.get("code") for each in origin.get("earlier", ())} - {origin["code"]}:
            log.warning(
                "run %s goes on with other code than before: no table will use it",
                folder.id,
            )
    except BaseException as error:
        # Only a run that is new or of a new config is `running` here; one that is
        # resumed as it was keeps its status.
        if folder.status == "running":
            folder.set_status(_status(error))
        raise
    folder.set_status("running")
    return origin


def make_context(
    how: _How,
    folder: directory.RunDirectory,
    progress: Progress,
    signals: StopSignals,
) -> "Context":
    """Returns the context of a run in `folder`."""
    from hpcjax import sharding
    from hpcjax.runs.context import Context

    compile_cache.keep_compiled()
    return Context(
        directory.data_root(how.root),
        sharding.data_mesh(how.devices or 1),
        folder,
        progress,
        signals,
        log=how.log,
        trust=how.trust,
        profile=how.profile,
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
    """Returns the result of a run's experiment."""
    path = folder.path / "result.nc"
    if not path.exists():
        raise ConfigError(f"run {folder.id} has no result: it is {folder.standing}")
    return results.read(path)
