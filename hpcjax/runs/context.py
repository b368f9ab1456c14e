"""The context in which an experiment runs: data, devices, directory."""

import contextlib
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpcjax.runs import results
from hpcjax.runs.directory import RunDirectory
from hpcjax.runs.profiler import profiling
from hpcjax.runs.progress import Progress
from hpcjax.runs.signals import StopSignals
from hpcjax.train.recorder import Recorder, TeeRecorder
from hpcjax.train.watchdog import PROGRESS, Watchdog
from hpcjax.train.writers import open_writers

if TYPE_CHECKING:
    import xarray as xr
    from jax.sharding import Mesh

    from hpcjax import train

_LOOK = 0.5  # seconds between looks at what other processes have written


class Context:
    """What an experiment receives besides its config.

    Attributes:
      data_root: folder below which data sets lie.
      mesh: devices, one axis "data".
      directory: the run's directory.
      trained: the last state of the last training; None before there was one.
    """

    def __init__(
        self,
        data_root: pathlib.Path,
        mesh: "Mesh",
        directory: RunDirectory,
        progress: Progress,
        signals: StopSignals,
        *,
        log: Sequence[str] = (),
        trust: bool = False,
        profile: bool = False,
    ) -> None:
        self.data_root = data_root
        self.mesh = mesh
        self.directory = directory
        self._progress = progress
        self._signals = signals
        self._log = log
        self._trust = trust
        self._profile = profile
        self._recorder: Recorder | None = None
        self.trained: train.TrainState | None = None

    def record(self, step: int, **figures: float) -> None:
        """Records figures of an experiment that does not train, and shows its progress.

        Args:
          step: 1, 2, …
          **figures: by name.
        """
        if self._recorder is None:
            self._recorder = TeeRecorder(self.directory.metrics(), self._progress)
            self._recorder.rewind(0)
        self._recorder.write({"step": step, **figures})

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Shows how far other processes are that write this run's records."""
        end = threading.Event()
        watching = threading.Thread(target=self._follow, args=(end,), daemon=True)
        watching.start()
        try:
            yield
        finally:
            end.set()
            watching.join()

    def _follow(self, end: threading.Event) -> None:
        ended = False
        while not ended:
            ended = end.wait(_LOOK)
            for record in self.directory.newest_records():
                self._progress.write(record)

    def say(self, text: str, end: str = "\n") -> None:
        """Prints a result for the user on standard output, such as a generated text.

        Args:
          text: the result, or a part of it.
          end: printed behind it; nothing where the next part is to follow at once.
        """
        self._progress.say(text, end)

    def train(
        self,
        task: "train.Task",
        config: "train.TrainConfig",
        *,
        seed: int,
        source: str,
    ) -> "xr.Dataset":
        """Trains, continuing from this run's newest verified checkpoint if it has one.

        Args:
          task: model, method, objective and data.
          config: length, batch size and intervals.
          seed: of parameters, data order and all draws.
          source: of the history's figures, see `runs.measured`.

        Returns:
          The history as `results.history` describes it.

        Raises:
          Preempted: a signal asked the run to stop; it has saved and can be resumed.
          WriterFailed: a service did not accept a record.
        """
        from hpcjax import train

        own, folder = self.directory, self.directory.path / "checkpoints"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals.defer())
            copies = stack.enter_context(
                open_writers(
                    self._log, own.path, own.id, own.read_config(), own.records
                )
            )
            traces = stack.enter_context(
                profiling(own.path / "profile" if self._profile else None)
            )
            checkpoints = stack.enter_context(
                train.Checkpoints(folder, keep=config.keep, trust=self._trust)
            )
            watchdog = None
            if config.stall_seconds:
                watchdog = stack.enter_context(self._watchdog(config.stall_seconds))
            self.trained = train.fit(
                task,
                config,
                seed=seed,
                mesh=task.mesh(self.mesh.size),
                recorder=TeeRecorder(own.metrics(), self._progress, *copies, *traces),
                checkpoints=checkpoints,
                stop=lambda: self._signals.received,
                watchdog=watchdog,
            )
        return results.history(self.directory.records(), source)

    def _watchdog(self, least: float) -> Watchdog:
        import jax

        folder = self.directory.path / PROGRESS
        return Watchdog(folder, jax.process_index(), least, jax.process_count())
