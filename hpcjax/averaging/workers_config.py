"""How workers average their models, as parts of a config; imports no JAX."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.averaging.late_config import LateConfig, Run
from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Size

if TYPE_CHECKING:
    import optax

    from hpcjax.averaging import Averaging
    from hpcjax.core.method import Method, Optimization, RunShape
    from hpcjax.hostcomm import Transport


@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragingConfig(Config, abc.ABC):
    """What all workers have that train models of their own.

    Attributes:
      workers: how many. Between devices these are shared out among the workers, and
        those of one worker average their gradients; None: one worker for each device,
        or for every two where gradients are exchanged in a way of their own. Between
        processes each worker is one, and their number must be given.
      between: "devices" of a mesh, where all take part in one program and nobody can
        be late by itself, or "processes" of this machine, which do not wait for others
        longer than the method does.
      late: who is late. Between devices that is simulated, by methods that let others
        go on, and no seconds are spent; between processes a worker sleeps so long.
        None: between devices nobody, between processes who is.
    """

    claims: ClassVar[tuple[str, ...]] = ("parameters",)
    may_be_late: ClassVar[bool] = False

    workers: Size | None = None
    between: Literal["devices", "processes"] = "devices"
    late: LateConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "workers must be given for processes: at least 2"
        many = self.between == "devices" or (self.workers or 0) > 1
        checks.require(many, rule, workers=self.workers)
        rule = "on a mesh this method waits for all: late needs between=processes"
        waits = self.between == "devices" and not self.may_be_late
        checks.require(not (self.late and waits), rule, late=self.late)

    @property
    def plays_delays(self) -> bool:
        """Whether delays that nobody spends decide what is trained."""
        return self.between == "devices" and self.late is not None

    def count(self, devices: int, *, shared: bool) -> int:
        """Returns how many workers so many devices are.

        Args:
          devices: of the run.
          shared: whether a worker's devices have an exchange of their own.

        Raises:
          ConfigError: the workers do not divide the devices, or each has one device
            alone, which has nobody to exchange gradients with.
        """
        default = max(1, devices // 2) if shared else devices
        workers = default if self.workers is None else self.workers
        rule = f"averaging.workers must divide the {devices} devices"
        checks.require(devices % workers == 0, rule, workers=workers)
        if shared and devices > 1:
            rule = (
                f"an exchange averages gradients among the devices of a worker: with "
                f"{devices} devices averaging.workers must be at most {devices // 2}, "
                "or exchange none"
            )
            checks.require(workers < devices, rule, workers=workers)
        return workers

    @abc.abstractmethod
    def build(
        self, optimizer: "Optimization", mean: Any, setup: "RunShape"
    ) -> "Method":
        """Returns the method of a run on a mesh.

        Args:
          optimizer: of each worker's own model.
          mean: `mean(axes)` returns the link that averages the gradients of the devices
            of one worker.
          setup: whose devices are those of one worker.
        """

    @abc.abstractmethod
    def make(
        self,
        over: "Transport | str",
        tx: "optax.GradientTransformation",
        *,
        workers: int,
        steps: int,
        seed: int = 0,
    ) -> "Averaging":
        """Returns one worker's optimizer.

        Args:
          over: the transport of a host, or the name of a mesh axis.
          tx: makes updates of a worker's own gradients.
          workers: how many there are.
          steps: of the run.
          seed: of the run; the same for all.
        """

    def build_on_hosts(
        self,
        optimizer: "Optimization",
        transport: "Transport",
        setup: "RunShape",
    ) -> "Method":
        """Returns the method of a run between processes, for one of them.

        Updates that are not finite are left out by each worker for itself.

        Args:
          optimizer: of each worker's own model.
          transport: ours.
          setup: of the run.

        Raises:
          ConfigError: an optimizer with a backward pass of its own.
        """
        from hpcjax.averaging._hosts import leave_out_nonfinite, train_on_hosts

        rule = "between processes an optimizer must do with gradients: not K-FAC"
        checks.require(optimizer.gradients is None, rule, optimizer=optimizer.tx)
        run = Run(transport.size, setup.steps, setup.seed())
        worker = self.make(
            transport,
            leave_out_nonfinite(optimizer.tx),
            workers=run.workers,
            steps=run.steps,
            seed=run.seed,
        )
        delays = []
        if self.late is not None:
            delays = self.late.step_seconds(run)[:, transport.rank].tolist()
        return train_on_hosts(worker, transport, delays=delays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig(AveragingConfig):
    """Workers that take steps of their own, on a mesh and on hosts.

    Attributes:
      warm_start: first steps, in which all average their gradients instead.
    """

    warm_start: Count = 0

    def build(
        self, optimizer: "Optimization", mean: Any, setup: "RunShape"
    ) -> "Method":
        """Returns the method of a run on a mesh."""
        from hpcjax.averaging import inner_transform, train_apart
        from hpcjax.core.method import WORKER_AXIS

        worker = self.make(
            WORKER_AXIS,
            inner_transform(optimizer, mean),
            workers=setup.workers,
            steps=setup.steps,
            seed=setup.seed(),
        )
        return train_apart(worker, optimizer, workers=setup.workers)

    def make(
        self,
        over: "Transport | str",
        tx: "optax.GradientTransformation",
        *,
        workers: int,
        steps: int,
        seed: int = 0,
    ) -> "Averaging":
        """Returns one worker's optimizer."""
        from hpcjax.averaging import warm_start

        run = Run(workers, steps - self.warm_start, seed)
        then = self._worker(over, tx, run)
        return warm_start(over, tx, then, steps=self.warm_start)

    @abc.abstractmethod
    def _worker(self, over: Any, tx: Any, run: Run) -> "Averaging":
        """Returns a worker for the steps after the warm start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSgdConfig(WorkerConfig):
    """The mean of all models after every so many steps.

    Attributes:
      period: H, steps from one mean to the next.
    """

    period: Size = 1

    def _worker(self, over: Any, tx: Any, run: Run) -> "Averaging":
        from hpcjax.averaging import local_sgd

        del run
        return local_sgd(over, tx, period=self.period)
