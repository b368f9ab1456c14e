"""Memory of training a pruned network, and the parallel layout that it allows.

Sizes are in bytes, of n parameters that may be pruned, of which a share `sparsity` is,
and of `others` that are not. Times are in seconds.
"""

import dataclasses
from typing import Literal, NamedTuple

from hpcjax.collectives import dense_words
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import MessageCost

Account = Literal["paper", "jax"]
Precision = Literal["mixed", "single"]
Index = Literal["int32", "bitmap"]
Mode = Literal["dense", "rematerialize"]
Optimizer = Literal["adam", "momentum", "sgd"]
ACCOUNTS = ("paper", "jax")
PRECISIONS = ("mixed", "single")
INDICES = ("int32", "bitmap")
MODES = ("dense", "rematerialize")
# Bytes of an optimizer's float32 state for each parameter.
OPTIMIZERS = {"adam": 8, "momentum": 4, "sgd": 0}


class StateBytes(NamedTuple):
    """Bytes of the state of training.

    Attributes:
      weights: what models compute with, θ16 (θ32 in single precision).
      master: float32 weights of mixed precision, θ32.
      optimizer: the optimizer's state.
      positions: of kept values.
      gradients: of the weights, ∇θ16; they live from backward pass to update.
      wide_gradients: ∇θ32, which the paper counts; XLA fuses the cast into the update.
      temporary: the copy of kept values that is made before it is expanded.
    """

    weights: float
    master: float
    optimizer: float
    positions: float = 0.0
    gradients: float = 0.0
    wide_gradients: float = 0.0
    temporary: float = 0.0

    @property
    def persistent(self) -> float:
        """What is held between steps."""
        return self.weights + self.master + self.optimizer + self.positions

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def plus(self, other: "StateBytes") -> "StateBytes":
        """Returns the sum, part by part."""
        return StateBytes(*map(sum, zip(self, other, strict=True)))


def dense_memory(
    size: float,
    *,
    optimizer: Optimizer = "adam",
    account: Account = "paper",
    precision: Precision = "mixed",
) -> StateBytes:
    """Returns the memory of dense training of `size` parameters.

    In mixed precision with Adam 20 bytes a parameter in the paper's account, where
    float32 gradients are held, and 14, or 16 with gradients, in JAX's.

    Args:
      size: number of parameters.
      optimizer: "adam" has 8 bytes of state a parameter, "momentum" 4 and "sgd" none.
      account: "paper" counts what the paper does, "jax" what a JAX program holds.
      precision: "mixed" has 16-bit weights and gradients beside float32 weights,
        "single" float32 ones alone.

    Raises:
      ConfigError: a negative size, or an unknown choice.

    References:
      Singh and Bhatele, Exploiting Sparsity in Pruned Neural Networks to Optimize Large
      Model Training, IPDPS 2023, §III.

    Examples:
      >>> dense_memory(1000).total, dense_memory(1000, account="jax").persistent
      (20000.0, 14000.0)
    """
    _check(optimizer, account, precision)
    checks.require_finite(0, size=size)
    mixed = precision == "mixed"
    width = 2 if mixed else 4
    return StateBytes(
        weights=width * size,
        master=4 * size if mixed else 0,
        optimizer=OPTIMIZERS[optimizer] * size,
        gradients=width * size,
        wide_gradients=4 * size if mixed and account == "paper" else 0,
    )


def offload_memory(size: float, tile: float) -> StateBytes:
    """Returns the device memory of training with `state=tiled state.space=host`.

    4 φ + 16 tile bytes in mixed precision with Adam: beside 16-bit weights and
    gradients, of one tile float32 parameters, two moments and the gradient. The host
    has 12 φ.

    Args:
      size: φ, number of parameters.
      tile: number of those whose state is on the device.

    Raises:
      ConfigError: a negative size.

    References:
      Singh and Bhatele, AxoNN, IPDPS 2022.

    Examples:
      >>> offload_memory(1000, 10).total, dense_memory(1000, account="jax").total
      (4160.0, 16000.0)
    """
    checks.require_finite(0, size=size, tile=tile)
    held = min(size, tile)
    return StateBytes(
        weights=2.0 * size,
        master=4 * held,
        optimizer=OPTIMIZERS["adam"] * held,
        gradients=2 * size,
        wide_gradients=4 * held,
    )


def sparse_memory(
    size: float,
    sparsity: float,
    *,
    others: float = 0,
    optimizer: Optimizer = "adam",
    account: Account = "paper",
    precision: Precision = "mixed",
    index: Index = "int32",
    mode: Mode = "dense",
) -> StateBytes:
    """Returns the memory of compressed training, see `optim.sparse_state`.

    With k = (1 − sparsity) n kept values, Adam and mixed precision: 2 n + 24 k in the
    paper's account; in JAX's 2 n + 16 k between steps, 2 k for gradients and 2 k while
    the weights are made.

    Args:
      size: n, number of parameters that are pruned.
      sparsity: share of them that is zero.
      others: number of parameters that are not pruned, as in dense training.
      optimizer: see `dense_memory`.
      account: see `dense_memory`.
      precision: see `dense_memory`; in single precision the paper's account has no
        temporary copy.
      index: "int32" has 4 k bytes of positions, "bitmap" n / 8.
      mode: "rematerialize" holds 16-bit weights of kept values alone.

    Raises:
      ConfigError: a negative size, a sparsity outside [0, 1], or an unknown choice.

    References:
      Singh and Bhatele, IPDPS 2023, §III.

    Examples:
      >>> sparse_memory(1000, 0.5).total
      14000.0
      >>> sparse_memory(1000, 0.5, account="jax").persistent
      10000.0
    """
    _check(optimizer, account, precision)
    checks.require_choice("index", index, INDICES)
    checks.require_choice("mode", mode, MODES)
    checks.require_finite(0, size=size, others=others)
    checks.require(0 <= sparsity <= 1, "sparsity must be in [0, 1]", sparsity=sparsity)
    kept = (1 - sparsity) * size
    mixed = precision == "mixed"
    ours = dense_memory(kept, optimizer=optimizer, account=account, precision=precision)
    width = 2 if mixed else 4
    single_copy = 0 if account == "paper" else width * kept
    ours = ours._replace(
        weights=width * (kept if mode == "rematerialize" else size),
        positions=4 * kept if index == "int32" else size / 8,
        temporary=width * kept if mixed else single_copy,
    )
    rest = dense_memory(
        others, optimizer=optimizer, account=account, precision=precision
    )
    return ours.plus(rest)


def break_even(
    *,
    optimizer: Optimizer = "adam",
    account: Account = "paper",
    precision: Precision = "mixed",
    index: Index = "int32",
) -> float:
    """Returns the sparsity above which compressed training needs less memory.

    In JAX's account that is with gradients, and without what lives within the update.

    Examples:
      >>> break_even(), round(break_even(account="jax"), 4)
      (0.25, 0.2222)
    """
    options = {"optimizer": optimizer, "account": account, "precision": precision}

    def bytes_of(memory: StateBytes) -> float:
        jax = account == "jax"
        return memory.persistent + memory.gradients if jax else memory.total

    dense = bytes_of(dense_memory(1, **options))
    full = bytes_of(sparse_memory(1, 0.0, index=index, **options))
    empty = bytes_of(sparse_memory(1, 1.0, index=index, **options))
    return (full - dense) / (full - empty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineJob:
    """Training of a transformer by pipelines with data parallelism.

    Attributes:
      size: number of parameters.
      layers: number of layers; no stage has less than one.
      devices: G, number of devices.
      device_bytes: memory of one.
      batch: B, examples in a step over all devices.
      micro_batch: examples in a micro-batch.
      message_bytes: what a stage sends to the next for a micro-batch.
      t_f: seconds of the whole model's forward pass of a micro-batch on one device.
      t_b: those of its backward pass.
      neighbours: link between the stages of a pipeline.
      replicas: link that the sums over pipelines use.
      workspace: bytes of a device that are no state and no activations.
      gather_s: seconds in which a device compresses the gradients of the whole model;
        once for each micro-batch.
    """

    size: float
    layers: int
    devices: int
    device_bytes: float
    batch: int
    micro_batch: int = 1
    message_bytes: float
    t_f: float
    t_b: float
    neighbours: MessageCost
    replicas: MessageCost
    workspace: float = 0.0
    gather_s: float = 0.0

    def __post_init__(self) -> None:
        checks.require_count(1, layers=self.layers, devices=self.devices)
        checks.require_count(1, batch=self.batch, micro_batch=self.micro_batch)
        checks.require_positive(size=self.size, device_bytes=self.device_bytes)
        checks.require_finite(0, t_f=self.t_f, t_b=self.t_b, gather_s=self.gather_s)
        checks.require_finite(
            0, message_bytes=self.message_bytes, workspace=self.workspace
        )


class ParallelPlan(NamedTuple):
    """A layout, and the predicted seconds of a step, part by part.

    Attributes:
      stages: G_inter, devices that share a model.
      replicas: G_data, pipelines that share a batch.
      compute: forward and backward passes of a device's micro-batches.
      bubble: idle time of the pipeline.
      transmission: messages between stages.
      collective: sums of gradients over pipelines.
      gather: compressing gradients.
    """

    stages: int
    replicas: int
    compute: float
    bubble: float
    transmission: float
    collective: float
    gather: float

    @property
    def seconds(self) -> float:
        """The step."""
        return sum(self[2:])


def bubble_seconds(stages: int, t_f: float, t_b: float) -> float:
    """Returns a device's idle time in a step, (t_f + t_b)(1 − 1/G_inter).

    Args:
      stages: G_inter.
      t_f: the whole model's forward pass of a micro-batch.
      t_b: its backward pass.

    Raises:
      ConfigError: no stage, or a time below zero.

    Examples:
      >>> bubble_seconds(8, 0.5, 0.5), bubble_seconds(2, 0.5, 0.5)
      (0.875, 0.5)
    """
    checks.require_count(1, stages=stages)
    checks.require_finite(0, t_f=t_f, t_b=t_b)
    return (t_f + t_b) * (1 - 1 / stages)


def transmission_seconds(
    link: MessageCost, message_bytes: float, micro_batches: float
) -> float:
    """Returns the time of four messages for each micro-batch of a device.

    Activations arrive and leave, gradients too. With B examples there are
    B G_inter / (mbs G) micro-batches.

    Raises:
      ConfigError: bytes or micro-batches below zero.

    Examples:
      >>> transmission_seconds(MessageCost.of_rate(1e9), 1e6, 16)
      0.064
    """
    checks.require_finite(0, message_bytes=message_bytes, micro_batches=micro_batches)
    messages = 4 * micro_batches
    return link.seconds(messages * message_bytes, messages)


def plan_pipeline(
    job: PipelineJob, sparsity: float | None = None, *, account: Account = "paper"
) -> ParallelPlan:
    """Returns the plan with the fewest stages whose devices hold their part.

    A device holds state / G_inter, the inputs of its layers for the micro-batches that
    are on their way (at most G_inter), and the workspace. Fewer stages mean less idle
    time and fewer messages, but larger sums over more pipelines.

    Args:
      job: model, devices and links.
      sparsity: of compressed training, whose sums have the kept gradients alone; None
        for dense training.
      account: of the state's memory, see `dense_memory`.

    Raises:
      ConfigError: no number of stages fits.

    References:
      Singh and Bhatele, IPDPS 2023, §IV.
    """
    state = dense_memory(job.size, account=account)
    if sparsity is not None:
        state = sparse_memory(job.size, sparsity, account=account)
    inputs = job.layers * job.message_bytes
    for stages in range(1, min(job.devices, job.layers) + 1):
        held = state.total / stages + inputs + job.workspace
        pipelines = job.devices // stages
        whole = job.batch % (pipelines * job.micro_batch) == 0
        if job.devices % stages == 0 and whole and held <= job.device_bytes:
            return time_pipeline(job, stages, sparsity)
    raise ConfigError(
        f"no number of stages up to {min(job.devices, job.layers)} fits: state "
        f"{state.total:.3g} bytes, device {job.device_bytes:.3g}"
    )


def time_pipeline(
    job: PipelineJob, stages: int, sparsity: float | None = None
) -> ParallelPlan:
    """Returns the predicted step of a job with so many stages; see `plan_pipeline`."""
    replicas = job.devices // stages
    micro_batches = job.batch / (job.micro_batch * replicas)
    kept = job.size if sparsity is None else (1 - sparsity) * job.size
    sent = dense_words(2 * kept / stages, replicas)
    link = job.replicas
    gather = 0.0 if sparsity is None else micro_batches * job.gather_s / stages
    return ParallelPlan(
        stages,
        replicas,
        compute=micro_batches * (job.t_f + job.t_b) / stages,
        bubble=bubble_seconds(stages, job.t_f, job.t_b),
        transmission=0.0
        if stages == 1
        else transmission_seconds(job.neighbours, job.message_bytes, micro_batches),
        collective=link.seconds(sent, 2 * (replicas - 1)),
        gather=gather,
    )


def _check(optimizer: str, account: str, precision: str) -> None:
    checks.require_choice("optimizer", optimizer, tuple(OPTIMIZERS))
    checks.require_choice("account", account, ACCOUNTS)
    checks.require_choice("precision", precision, PRECISIONS)
