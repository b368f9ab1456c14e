"""The training experiment, which combines any data, model, optimizer and exchange.

The configs of papers are values of `TrainingConfig`; a paper has an experiment of its
own only for what cannot be expressed by it. Importing this module imports no JAX.
"""

import contextlib
import dataclasses
import inspect
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from hpcjax import core, data, sharding, train
from hpcjax.core import checks, parts
from hpcjax.core.config import Config, Seed, fields_of
from hpcjax.core.errors import ConfigError
from hpcjax.core.parts import Part
from hpcjax.data import DigitsConfig
from hpcjax.models import MlpConfig
from hpcjax.optim import PartialBackwardConfig, SgdConfig
from hpcjax.train.config import TrainConfig

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.hostcomm import Transport
    from hpcjax.runs.context import Context
    from hpcjax.runs.outlines import Labels

log = logging.getLogger(__name__)

DatasetPart = Annotated[Any, Part("dataset")]
InputPart = Annotated[Any, Part("input", optional=True)]
ModelPart = Annotated[Any, Part("model")]
OptimizerPart = Annotated[Any, Part("optimizer")]
ExchangePart = Annotated[Any, Part("exchange", optional=True)]
AveragingPart = Annotated[Any, Part("averaging", optional=True)]
BackwardPart = Annotated[Any, Part("backward", optional=True)]
StatePart = Annotated[Any, Part("state", optional=True)]
SparsityPart = Annotated[Any, Part("sparsity", optional=True)]
SharingPart = Annotated[Any, Part("sharing", optional=True)]
ParallelPart = Annotated[Any, Part("parallel", optional=True)]
CodecPart = Annotated[Any, Part("codec", optional=True)]

# What at most one part of a run may do.
CLAIMS = {
    "gradients": "have a backward pass of their own",
    "mean": "average the gradients",
    "parameters": "hold the parameters in a form of their own",
}


# The parts that may claim something, in the order in which they are named.
CLAIMANTS = (
    *("optimizer", "exchange", "averaging", "backward", "state", "sparsity"),
    "parallel",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """A training run, composed of parts; `hpcjax list --parts` lists them.

    Attributes:
      dataset: the data set.
      input: how its batches are read; none for ahead of the step, by one thread. They
        are the same ones in any way.
      model: the network.
      optimizer: turns averaged gradients into updates.
      exchange: how devices average gradients; none for their exact mean.
      averaging: workers that train separate models and average these; none if all
        devices train one model.
      backward: which part of the backward pass each worker takes; none for all of it.
      state: the form of parameters and optimizer state; none for dense arrays.
      sparsity: which weights are pruned in training, and how; none for all weights.
      sharing: which layers share their weights; none if each has its own.
      parallel: how the devices share out the model; none if each has all of it.
      codec: how what these devices send to sum activations, or from stage to stage, is
        compressed; none for not.
      compute: precision of products, a dtype.
      param: dtype of parameters. In bfloat16 they take half the memory, and so do what
        devices exchange of them; updates are computed in float32 and then rounded, so
        that those below 2⁻⁹ of a parameter are lost.
      output: dtype of logits; losses are float32 whatever it is.
      train: length, batch size and intervals.
      seed: of parameters, data order and draws.
    """

    resumable: ClassVar[tuple[str, ...]] = (
        "train.steps",
        "train.checkpoint_every",
        "train.keep",
        "train.stall_seconds",
        "parallel",
        "input",
    )

    dataset: DatasetPart = DigitsConfig()
    input: InputPart = None
    model: ModelPart = MlpConfig()
    optimizer: OptimizerPart = SgdConfig()
    exchange: ExchangePart = None
    averaging: AveragingPart = None
    backward: BackwardPart = None
    state: StatePart = None
    sparsity: SparsityPart = None
    sharing: SharingPart = None
    parallel: ParallelPart = None
    codec: CodecPart = None
    compute: Literal["float32", "bfloat16"] = "float32"
    param: Literal["float32", "bfloat16"] = "float32"
    output: Literal["float32", "bfloat16"] = "float32"
    train: TrainConfig = TrainConfig()
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_claims()
        self._check_parallel()
        self._check_statistics()
        self._check_codec()
        self._check_objective()
        self._check_data()
        self._check_processes()

    def _check_claims(self) -> None:
        """Raises ConfigError if two parts do what only one may."""
        for claim, what in CLAIMS.items():
            both = [
                _name_claimant(field, getattr(self, field))
                for field in CLAIMANTS
                if claim in _claims_of(getattr(self, field))
            ]
            if len(both) > 1:
                other = both[-1].partition("=")[0].partition(".")[0]
                raise ConfigError(
                    f"{' and '.join(both)} both {what}: choose one, such as by "
                    f"{other}=none"
                )

    def _check_parallel(self) -> None:
        """Raises ConfigError if a device's part of a parameter is not enough."""
        space = getattr(self.model, "space", ())
        checks.require(
            not space, "model.space is what parallel=spatial sets", space=space
        )
        if hasattr(self.parallel, "cut_model"):
            self.parallel.cut_model(self.model, self.dataset.objective)
        if "parameters" not in _claims_of(self.parallel) or not getattr(
            self.optimizer, "whole", False
        ):
            return
        raise ConfigError(
            f"optimizer={_name(self.optimizer)} works with whole matrices, of which "
            f"parallel={_name(self.parallel)} gives each device a part: choose another "
            "one, such as optimizer=sgd, adamw or lamb, or parallel=none"
        )

    def _check_statistics(self) -> None:
        """Raises ConfigError if devices would wait forever for others' statistics."""
        axis = getattr(self.model, "sync_axis", None)
        whole = not isinstance(self.backward, PartialBackwardConfig)
        rule = "model.sync_axis must be none where devices' backward passes differ"
        checks.require(axis is None or whole, rule, sync_axis=axis)

    def _check_codec(self) -> None:
        """Raises ConfigError for a codec where devices sum no whole activations."""
        summed = getattr(self.parallel, "summed", 1) > 1
        if self.codec is None or summed or self._stages:
            return
        raise ConfigError(
            f"codec={_name(self.codec)} compresses what devices send to sum whole "
            "activations: it goes with parallel=tensor3d, parallel.row=1 and "
            "parallel.col above 1, or with parallel=ted and parallel.tensor above 1; "
            "or what stages send each other: with parallel=pipeline, parallel.stages "
            f"above 1: got {self.parallel!r}"
        )

    def _check_data(self) -> None:
        """Raises ConfigError if examples cannot be read so, or are too small."""
        drawn = getattr(self.dataset, "draws", False)
        rule = (
            f"input={_name(self.input)} must know which examples are read, which "
            f"dataset={_name(self.dataset)} draws: take input=read_ahead or none"
        )
        foresees = getattr(self.input, "foresees", False)
        checks.require(not (drawn and foresees), rule, input=_name(self.input))
        if isinstance(self.dataset, data.MixedSizesConfig):
            sizes = (self.dataset.base_size, *self.dataset.sizes)
            stride = getattr(self.model, "stride", 1)
            rule = f"dataset.sizes must be at least {stride} px, the model's stride"
            checks.require(min(sizes) >= stride, rule, sizes=sizes)
        if getattr(self.dataset, "whole_batches", False):
            self._check_parts()

    def _check_parts(self) -> None:
        """Raises ConfigError if devices would not have all parts in every pass."""
        parts, size = self.dataset.partitions, self.train.batch_size
        rule = (
            "a batch is all parts of the graph: take train.batch_size="
            f"{parts}, dataset.partitions"
        )
        checks.require(size == parts, rule, batch_size=size)
        rule = "all parts of a graph are of one pass: train.accumulate must be 1"
        checks.require(
            self.train.accumulate == 1, rule, accumulate=self.train.accumulate
        )
        rule = "parts of a graph exchange rows in every pass, of one model"
        plain = self.averaging is None and self.backward is None
        given = {"averaging": self.averaging, "backward": self.backward}
        checks.require(plain, rule, **given)

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """The figures of a history, as far as all trainings have it, and of the parts.

        Parts say in `figures` what they add, the data set in its objective's metrics.
        """
        asked = self.dataset.objective
        scores = " ".join(f"val_{name}" for name in (*asked.metrics, *asked.held_out))
        found = {
            "compile_seconds": ": of the step, for all shapes of batches",
            "shapes": ": how many these are, counted again in each session",
            "seconds": "step: of training, until the end of each step",
            "loss": "step: of the batch, before the step",
            "eval_seconds": "eval_step: of training, until each validation",
            scores: "eval_step: of the validation set",
        }
        for part in fields_of(self).values():
            if part is not self.codec or not self._stages:  # whose stages count nothing
                found |= getattr(part, "figures", {})
        return found

    @property
    def _stages(self) -> int:
        """How many stages of a pipeline send each other activations; 0 without one."""
        return getattr(self.parallel, "sends", 0)

    def labels(self) -> "Labels":
        """Returns the numbers of the steps, and of those that a validation follows."""
        steps, every = self.train.steps, self.train.eval_every or self.train.steps
        ends = sorted({*range(every, steps + 1, every), steps})
        return {"step": range(1, steps + 1), "eval_step": ends}

    @property
    def processes(self) -> int:
        """How many processes train, each a worker with a model of its own."""
        return self.averaging.workers if _between_processes(self.averaging) else 1

    def alone(self) -> Self:
        """Returns what one of these processes computes by itself."""
        if not _between_processes(self.averaging):
            return self
        rows = self.train.batch_size // self.processes
        own = dataclasses.replace(self.train, batch_size=rows)
        return dataclasses.replace(self, averaging=None, train=own)

    def _check_processes(self) -> None:
        """Raises ConfigError for a run between processes that could not be resumed."""
        if not _between_processes(self.averaging):
            return
        rule = (
            "train.keep must be at least 2 with averaging.between=processes: workers "
            "save apart, and the newest step may not be the same for all"
        )
        checks.require(self.train.keep > 1, rule, keep=self.train.keep)
        batch, workers = self.train.batch_size, self.averaging.workers
        rule = f"train.batch_size must divide by the {workers} workers"
        checks.require(batch % workers == 0, rule, batch_size=batch)

    def check_devices(self, devices: int) -> None:
        """Raises ConfigError if so many devices, of each process, cannot train this.

        What only the composed task knows is checked when it is composed.
        """
        if hasattr(self.parallel, "check_run"):
            size, passes = self.train.batch_size, self.train.accumulate
            self.parallel.check_run(devices, size, passes)
        else:
            self.train.rows(devices * self.processes)

    def _check_objective(self) -> None:
        """Raises ConfigError if the model is not one for the data set."""
        if _fit(self.model, self.dataset):
            asked = getattr(self.dataset, "objective", None)
            if asked is not None and hasattr(self.model, "check_objective"):
                self.model.check_objective(asked)
            return
        fitting = [
            f"model={name}"
            for name, cls in parts.classes("model").items()
            if inspect.ismethod(getattr(cls, "takes", None)) and _fit(cls, self.dataset)
        ]
        fitting += [
            f"dataset={name}"
            for name, cls in parts.classes("dataset").items()
            if isinstance(getattr(cls, "objective", None), core.Objective)
            and _fit(self.model, cls)
        ]
        raise ConfigError(
            f"dataset={_name(self.dataset)} is {self.dataset.objective.name}, which "
            f"model={_name(self.model)} does not learn: take one of "
            f"{', '.join(fitting) or 'none that is known'}"
        )


def task(
    cfg: TrainingConfig,
    data_root: pathlib.Path,
    devices: int = 1,
    transport: "Transport | None" = None,
) -> "train.Task":
    """Composes the task of a run from its parts, for a number of devices.

    Args:
      cfg: the run.
      data_root: folder below which data sets lie.
      devices: of the run, or of each process.
      transport: this process's among the workers, where these are processes; None is
        then one of them alone, with its part of the batch and nobody to send to.

    Returns:
      The task. If no part draws by the seed, and it is asked for again for a config
      that differs by the seed alone, it is the same one, with its programs.

    Raises:
      ConfigError: the parts do not fit each other or the devices.
      DataMissing: the data set is not here.
    """
    given = (dataclasses.replace(cfg, seed=0), data_root.absolute(), devices)
    if transport is None and _newest and _newest[0] == given:
        return _newest[1]
    _newest.clear()  # what is not wanted any more makes room first
    seed = core.RunSeed(cfg.seed)
    made = _compose(cfg, data_root, devices, transport, seed)
    if not seed.close() and transport is None:
        _newest.extend((given, made))
    return made


_newest: list[Any] = []  # what was given and made, for runs of one seed after another


def _compose(
    cfg: TrainingConfig,
    data_root: pathlib.Path,
    devices: int,
    transport: "Transport | None",
    seed: "core.RunSeed",
) -> "train.Task":
    """Composes a task; see `task`."""
    if transport is None:
        cfg = cfg.alone()
    dataset = cfg.dataset.load(data_root)
    policy = core.Policy(param=cfg.param, compute=cfg.compute, output=cfg.output)
    network = cfg.model
    if hasattr(cfg.parallel, "cut_model"):
        network = cfg.parallel.cut_model(network, dataset.objective)
    given = dataset.given
    if dataset.owner is not None:  # parts lie on devices
        given |= {"devices": devices}
    model = network.make(dataset.inputs, dataset.outputs, policy, **given)
    stacks = getattr(cfg.model, "stacks", ())
    if cfg.sharing is not None:
        model = with_stacks(cfg.sharing, stacks).apply_to(model, seed())
    sparsity = with_stacks(cfg.sparsity, stacks)
    if hasattr(sparsity, "apply_to"):  # the network sees other weights than are trained
        model = sparsity.apply_to(model)
    if cfg.codec is not None:
        model = (
            cfg.codec.apply_between(model, cfg._stages, cfg.parallel.tensor)
            if cfg._stages
            else cfg.codec.apply_to(model, cfg.train.accumulate)
        )
    method = train.compose(
        model,
        dataset,
        with_stacks(cfg.optimizer, stacks),
        exchange=with_stacks(cfg.exchange, stacks),
        backward=with_stacks(cfg.backward, stacks),
        averaged=cfg.averaging,
        state=with_stacks(cfg.state, stacks),
        sparsity=sparsity,
        parallel=with_stacks(cfg.parallel, stacks),
        batch_size=cfg.train.batch_size,
        steps=cfg.train.steps,
        devices=devices,
        seed=seed,
        transport=transport,
    )
    _check_sync_axis(cfg.model, tuple(method.mesh_shape(devices)))
    made = train.supervised(model, method, dataset)
    return made.replace(read=_read(cfg.input, transport))


def _read(
    part: Any, transport: "Transport | None"
) -> "Callable[[data.Batches, int], data.Reader] | None":
    """Returns how batches are read; None for ahead of the step."""
    if part is None:
        return None

    # Workers that are processes are connected already.
    def connect() -> "contextlib.AbstractContextManager[Transport | None]":
        if transport is None:
            return sharding.host_transport()
        return contextlib.nullcontext(transport)

    return lambda batches, steps: part.make(batches, steps, connect)


def _check_sync_axis(model: Any, axes: tuple[str, ...]) -> None:
    """Raises ConfigError if a model averages its statistics over an unknown axis."""
    axis = getattr(model, "sync_axis", None)
    if axis not in (None, *axes):
        raise ConfigError(
            f"model.sync_axis must be none or an axis of the run's mesh, "
            f"{' or '.join(axes)}: got {axis!r}"
        )


def _claims_of(part: Any) -> tuple[str, ...]:
    """Returns what only this part of a run can do.

    A worker in a process of its own has plain gradients, of its devices' mean.
    """
    own = getattr(part, "claims", ())
    return tuple(CLAIMS) if _between_processes(part) else own


def _name_claimant(field: str, part: Any) -> str:
    """Returns the key that makes a part claim something."""
    if field == "averaging" and _between_processes(part):
        return "averaging.between=processes"
    return f"{field}={_name(part)}"


def _between_processes(averaging: Any) -> bool:
    return getattr(averaging, "between", "devices") == "processes"


def with_stacks(part: Any, stacks: tuple[str, ...]) -> Any:
    """Returns a part that treats the layers of the model's stacks separately.

    The field `stacked` of a part names the parameters that are stacks of layers. If it
    names none, it is set to those of the model, so that no stack is treated as one
    large matrix.
    """
    if part is None or not stacks:
        return part
    changed = {
        field.name: with_stacks(value, stacks)
        for field in dataclasses.fields(part)
        if dataclasses.is_dataclass(value := getattr(part, field.name))
    }
    if getattr(part, "stacked", None) == ():
        log.info("%s.stacked is %s, the model's", type(part).__name__, stacks)
        changed["stacked"] = stacks
    return dataclasses.replace(part, **changed)


def run(cfg: TrainingConfig, ctx: "Context") -> "xr.Dataset":
    """Runs the training.

    Returns:
      The history, with the facts of the method as scalars; see `train_in_processes` for
      workers that are processes.
    """
    if _between_processes(cfg.averaging):
        from hpcjax.runs.worker_processes import train_in_processes

        return train_in_processes(cfg, ctx, task)
    composed = task(cfg, ctx.data_root, ctx.mesh.size)
    before = getattr(cfg.dataset, "goes_on", "")
    if before and ctx.directory.parent is None:
        log.warning("no run before this one has learnt %s: fork one that has", before)
    played = getattr(cfg.averaging, "plays_delays", False)
    source = "simulated" if played else "measured"
    history = ctx.train(composed, cfg.train, seed=cfg.seed, source=source)
    counted = {
        name: float(ctx.trained.model_state[name])  # pyrefly: ignore[missing-attribute]
        for name in getattr(cfg.codec, "figures", ())
        if not cfg._stages
    }
    counted |= getattr(composed.dataset.train, "figures", dict)()
    return history.assign({**composed.method.facts, **counted})


def _fit(model: Any, dataset: Any) -> bool:
    """Says whether a model, or its class, learns a data set, as far as both say it."""
    takes, asked = getattr(model, "takes", None), getattr(dataset, "objective", None)
    return takes is None or asked is None or takes(asked)


def _name(part: Any) -> str:
    return parts.name_of(type(part)) or type(part).__name__
