"""Copies of a run's records for TensorBoard, Weights & Biases and MLflow; no JAX.

Whenever a run starts or is resumed, the copy is made anew from the run's own records.
It is therefore complete after any interruption, even if an earlier session wrote none,
and no service has to delete steps, which only TensorBoard can.

Everything is written below the run's folder, and telemetry of the services is switched
off. Records leave the machine only if the user sets `WANDB_MODE`.
"""

import abc
import contextlib
import importlib
import json
import logging
import numbers
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, HpcjaxError, nearest
from hpcjax.train.recorder import training_seconds

log = logging.getLogger(__name__)

WriterName = Literal["tensorboard", "wandb", "mlflow"]
Record = Mapping[str, Any]
# Read by the packages when they are imported or first used; a user's own value wins.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Without it MLflow needs a database.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "WANDB_ERROR_REPORTING": "false",
}
_FLUSH_SECONDS = 2.0


class WriterFailed(HpcjaxError):
    """A service did not accept a record; the run's own records have it."""

    exit_code = 9


class Writer(abc.ABC):
    """A recorder that copies a run's records to a service.

    `rewind` begins a session and `close` ends it. Only numbers are copied.

    Args:
      folder: the run's folder.
      run: the run's id.
      config: the run's config.
      history: returns the run's own records.
    """

    name: ClassVar[WriterName]
    module: ClassVar[str]

    def __init__(
        self,
        folder: pathlib.Path,
        run: str,
        config: Mapping[str, Any],
        history: Callable[[], Iterable[Record]],
    ) -> None:
        self.folder, self.run, self.config = folder / self.name, run, config
        self._history = history
        self._opened = False

    def write(self, record: Record) -> None:
        """Copies one record.

        Raises:
          WriterFailed: the service did not accept it.
          DiskFull: there is no space for it.
        """
        values = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, numbers.Real)
        }
        with self._wrap_errors(f"step {record['step']}"):
            self._write(record["step"], values)

    def rewind(self, step: int) -> float:
        """Makes the copy anew from the run's own records up to `step`.

        Returns:
          The training seconds until then.
        """
        self.close(good=False)
        kept = [record for record in self._history() if record["step"] <= step]
        with self._wrap_errors("the beginning"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
            self._opened = True
        for record in kept:
            self.write(record)
        return training_seconds(kept)

    def close(self, good: bool) -> None:
        """Completes the copy; `good` tells whether training has finished."""
        if self._opened:
            self._opened = False
            with self._wrap_errors("the end"):
                self._close(good)

    @abc.abstractmethod
    def _open(self) -> None:
        """Begins an empty copy in place of one that is there."""

    @abc.abstractmethod
    def _write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abc.abstractmethod
    def _close(self, good: bool) -> None: ...

    @contextlib.contextmanager
    def _wrap_errors(self, where: str) -> Iterator[None]:
        """Turns errors of the service into `WriterFailed`, with the place."""
        try:
            with files.disk_errors(self.folder):
                yield
        except HpcjaxError:
            raise
        except Exception as error:
            raise WriterFailed(
                f"{self.name} failed at {where} ({type(error).__name__}: {error}); "
                f"metrics.jsonl has every record: run {self.run} can be resumed, with "
                f"or without --log {self.name}"
            ) from error


class TensorBoard(Writer):
    """Event files, for `tensorboard --logdir runs`."""

    name = "tensorboard"
    module = "tensorboardX"

    def _open(self) -> None:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        for old in self.folder.glob("events.out.tfevents.*"):
            old.unlink()
        # Not `SummaryWriter`, whose thread does not report errors.
        self._file = event_file_writer.EventsWriter(str(self.folder / "events"))
        # `Any`, because protobuf makes the names of the module at run time.
        protocol: Any = event_pb2
        self._event, self._scalar = protocol.Event, summary.scalar
        # Makes a TensorBoard that has read the old file discard its events.
        start = protocol.SessionLog(status=protocol.SessionLog.START)
        self._put(0, session_log=start)
        text = f"```\n{json.dumps(self.config, indent=2)}\n```"
        self._put(0, summary=summary.text("config", text))
        self._flushed = 0.0

    def _put(self, step: int, **content: Any) -> None:
        event = self._event(step=step, wall_time=time.time(), **content)
        self._file.write_event(event)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._put(step, summary=self._scalar(name, value))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def _close(self, good: bool) -> None:
        del good  # event files do not say how a run ended
        self._file.close()


class Wandb(Writer):
    """An offline run, for `wandb sync runs/<id>/wandb/offline-run-*`.

    With `WANDB_MODE=online`, records are sent to a server, which cannot delete them.
    Steps that the server has are not sent again; a resumed run repeats them exactly.
    """

    name = "wandb"
    module = "wandb"

    def _open(self) -> None:
        import wandb

        for old in self.folder.glob(f"offline-run-*-{self.run}"):
            shutil.rmtree(old)
        # Folders that wandb would otherwise put into the home folder.
        places = {f"WANDB_{kind}_DIR": str(self.folder) for kind in ("CACHE", "DATA")}
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(
            mode=mode,
            root_dir=str(self.folder.parent),
            run_id=self.run,
            project=os.environ.get("WANDB_PROJECT", "hpcjax"),
            resume="allow",
            reinit="create_new",
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        with _environment(places):
            self._service = wandb.init(settings=settings, config=dict(self.config))
        self._next = self._service.step

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:
            self._service.log(dict(values), step=step)

    def _close(self, good: bool) -> None:
        self._service.finish(exit_code=0 if good else 1)


class MLflow(Writer):
    """A file store, for `mlflow ui --backend-store-uri runs/<id>/mlflow`.

    MLflow needs `MLFLOW_ALLOW_FILE_STORE=true` for that. The copies of earlier sessions
    become deleted runs of the store.
    """

    name = "mlflow"
    module = "mlflow"

    def _open(self) -> None:
        import mlflow

        place = self.folder.resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=place)
        name = str(self.config.get("name", self.run))
        known = self._client.get_experiment_by_name(name)
        experiment = (
            known.experiment_id if known else self._client.create_experiment(name)
        )
        for old in self._client.search_runs([experiment]):
            self._client.delete_run(old.info.run_id)
        created = self._client.create_run(experiment, run_name=self.run)
        self._id = created.info.run_id
        for key, value in files.flatten_json(self.config).items():
            text = value if isinstance(value, str) else json.dumps(value)
            self._client.log_param(self._id, key, text)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _close(self, good: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if good else "KILLED")


_WRITERS: dict[str, type[Writer]] = {
    writer.name: writer for writer in (TensorBoard, Wandb, MLflow)
}


def check_writers(names: Collection[str]) -> None:
    """Imports the packages of writers.

    Raises:
      ConfigError: a name is not a `WriterName`, or its package is not installed.
    """
    for name, setting in _SETTINGS.items():
        os.environ.setdefault(name, setting)
    for name in names:
        if name not in _WRITERS:
            allowed = get_args(WriterName)
            raise ConfigError(f"unknown writer {name!r}{nearest(name, allowed)}")
        try:
            importlib.import_module(_WRITERS[name].module)
        except ImportError as error:
            raise ConfigError(
                f"--log {name} needs {_WRITERS[name].module}: "
                f"pip install 'hpcjax[{name}]' ({error})"
            ) from error


@contextlib.contextmanager
def open_writers(
    names: Collection[str],
    folder: pathlib.Path,
    run: str,
    config: Mapping[str, Any],
    history: Callable[[], Iterable[Record]],
) -> Iterator[Sequence[Writer]]:
    """Opens the writers of a run, and closes each of them even if another fails.

    Args:
      names: of the writers, see `check_writers`.
      folder: the run's; each writes into a folder of its name below it.
      run: the run's id.
      config: the run's config.
      history: returns the run's own records.

    Raises:
      ConfigError: an unknown name, or a missing package.
      WriterFailed: a copy could not be completed. If the `with` block raised, that
        error is raised, and this one logged.
    """
    check_writers(names)
    makers = (_WRITERS[name] for name in dict.fromkeys(names))
    writers = [maker(folder, run, config, history) for maker in makers]
    try:
        yield writers
    except BaseException:
        for error in _close_all(writers, good=False):
            log.error("%s", error)
        raise
    for error in _close_all(writers, good=True):
        raise error


def _close_all(writers: Iterable[Writer], good: bool) -> list[HpcjaxError]:
    errors = []
    for writer in writers:
        try:
            writer.close(good)
        except HpcjaxError as error:
            errors.append(error)
    return errors


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({k: v for k, v in values.items() if before[k] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
