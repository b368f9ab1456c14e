"""What a block with experts sends in a step, and what its model learns."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import core, cost, data, perf, runs, sharding, train
from hpcjax.core import config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig, ExpertsConfig, TransformerOptions
from hpcjax.optim import SgdConfig
from hpcjax.runs.training import with_stacks

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh
    from jax.stages import Compiled, Lowered

FLOAT = 4
COL, EXPERT = ("col",), ("expert",)
_EXPERTS = TransformerOptions(experts=ExpertsConfig(count=4, top_k=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A mixture of experts on a number of devices.

    Attributes:
      devices: of one run.
      tensor: with equal tokens, and parts of features.
      expert: that share out the experts.
      drop_duplicates: whether those with equal tokens share out what they send.
      model: the network, of whose blocks each has experts.
      broken: "scattered", slopes of what is gathered from devices with equal tokens are
        reduced and scattered, as those of a plain gather.
      dataset: text.
      rows: sequences of a batch.
      steps: of SGD with momentum.
      lr: its learning rate.
      seed: of parameters and batches.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "devices": "2",
        "tensor": "1",
        "expert": "2",
        "model.width": "16",
        "dataset.context": "4",
        "rows": "4",
        "steps": "1",
    }

    devices: config.Size = 8
    tensor: config.Size = 2
    expert: config.Size = 2
    drop_duplicates: bool = True
    model: CausalLmConfig = CausalLmConfig(
        depth=3, width=64, heads=4, options=_EXPERTS, remat="collectives"
    )
    broken: Literal["no", "scattered"] = "no"
    dataset: CharTextConfig = CharTextConfig(context=8)
    rows: config.Size = 16
    steps: config.Size = 100
    lr: config.Positive = 0.05
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        experts = self.model.options.experts
        known = ("none", "full", "collectives")
        core.checks.require_choice("model.remat", self.model.remat, known)
        core.checks.require(
            experts is not None
            and (experts.every, experts.capacity_factor) == (1, None)
            and self.expert > 1,
            "each block must have experts, which devices share out, without a limit",
            experts=experts,
            expert=self.expert,
        )


FIGURES = (
    *("all_to_all", "gathers", "lowered", "compiled", "words", "formula"),
    *("loss", "distance"),
)


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    return runs.outline(dict.fromkeys(FIGURES, ""))


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compiles a step, reads what it sends, and trains with it and on one device.

    Returns:
      Of a block and a device in one step: `all_to_all`, bytes; `gathers` among devices
      with equal tokens; `lowered` and `compiled`, all-reduces over `col` and
      all-to-alls over `expert`, in what JAX asks for and in what XLA makes of
      it; `words` sent over both by rings, and by the `formula`. `loss` of the last
      step, and its relative `distance` from that of one device.
    """
    dataset = cfg.dataset.load(ctx.data_root)
    task = _compose(cfg, dataset, cfg.devices)
    mesh = task.mesh(cfg.devices)
    with _scatter() if cfg.broken == "scattered" else contextlib.nullcontext():
        lowered = _lower(cfg, task, mesh)
        compiled = lowered.compile()
    words = _formula(cfg)
    asked, made = (_count_collectives(each, mesh) for each in (lowered, compiled))
    loss = _train(cfg, task, mesh, compiled)
    alone = _compose(cfg, dataset, 1)
    other = _train(
        cfg, alone, alone.mesh(1), _lower(cfg, alone, alone.mesh(1)).compile()
    )
    return runs.simulated(
        {
            "all_to_all": _bytes(compiled, mesh)[EXPERT, "all-to-all"],
            "gathers": made[COL, "all-gather"],
            "lowered": _of_both(asked),
            "compiled": _of_both(made),
            "words": _sent(compiled, mesh),
            "formula": sum(words.values()),
            "loss": loss,
            "distance": abs(loss - other) / other,
        }
    )


def _formula(cfg: Config) -> dict[str, float]:
    """Returns the words of the formula; an expert has a place for each token."""
    layout = sharding.Layout.of(cfg.devices, cfg.tensor, cfg.expert)
    tokens = cfg.rows * cfg.dataset.context // (layout.data * layout.expert)
    options: Any = {"drop_duplicates": cfg.drop_duplicates, "remat": cfg.model.remat}
    experts: Any = cfg.model.options.experts
    slots = tokens * experts.count
    return cost.ted_volume(tokens, cfg.model.width, slots, layout, **options)


def _compose(cfg: Config, dataset: "data.Dataset", devices: int) -> "train.Task":
    """Returns the task of training on the layout, or on one device."""
    parallel = sharding.TedConfig(
        tensor=cfg.tensor, expert=cfg.expert, drop_duplicates=cfg.drop_duplicates
    )
    model = cfg.model.make(dataset.inputs, dataset.outputs, core.Policy())
    method = train.compose(
        model,
        dataset,
        SgdConfig(lr=cfg.lr, momentum=0.9),
        parallel=with_stacks(parallel, cfg.model.stacks) if devices > 1 else None,
        batch_size=cfg.rows,
        steps=cfg.steps,
        devices=devices,
    )
    return train.supervised(model, method, dataset)


def _lower(cfg: Config, task: "train.Task", mesh: "Mesh") -> "Lowered":
    state = train.state_shapes(task, mesh)
    shapes = train.batch_shapes(task, cfg.rows, mesh)
    return train.train_step(task, mesh, state).lower(state, shapes)


def _train(cfg: Config, task: "train.Task", mesh: "Mesh", step: "Compiled") -> float:
    """Returns the loss of the last step."""
    state, source = train.init_state(task, cfg.seed, mesh), task.dataset.train
    loss = float("nan")
    for number in range(cfg.steps):
        places = (np.arange(cfg.rows) + cfg.rows * number) % len(source)
        batch = sharding.place_batch(source.gather(places), mesh)
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])
    return loss


@contextlib.contextmanager
def _scatter() -> Iterator[None]:
    """Breaks the gather: its slopes, equal on all devices, are summed over them."""
    import jax

    from hpcjax.core import shards

    right = shards.gather_equal

    @jax.custom_vjp
    def wrong(part: "jax.Array") -> "jax.Array":
        return right(part, ((-2, "col"),))

    def backward(_: None, slope: "jax.Array") -> "tuple[jax.Array]":
        return (shards.sum_parts(slope, ((-2, "col"),)),)

    wrong.defvjp(lambda part: (wrong(part), None), backward)
    shards.gather_equal = lambda part, cuts: wrong(part) if cuts else part
    try:
        yield
    finally:
        shards.gather_equal = right


def _in_blocks(
    program: "Compiled | Lowered", mesh: "Mesh"
) -> "Iterator[tuple[Any, perf.Collective]]":
    """Yields the collectives of one block, which are those in loops, and their axes."""
    for each in perf.collectives(program):
        if each.times > 1 or not each.bounded:
            yield perf.axes_of(each, mesh), each


def _count_collectives(program: "Compiled | Lowered", mesh: "Mesh") -> Counter[Any]:
    """Counts arrays: XLA merges all-reduces, and parts the array of an all-to-all."""
    found: Counter[Any] = Counter()
    for axes, each in _in_blocks(program, mesh):
        merged = each.kind == "all-reduce"
        found[axes, each.kind] += each.operands if merged else 1
    return found


def _of_both(counts: Counter[Any]) -> int:
    return counts[COL, "all-reduce"] + counts[EXPERT, "all-to-all"]


def _bytes(program: "Compiled", mesh: "Mesh") -> Counter[Any]:
    found: Counter[Any] = Counter()
    for axes, each in _in_blocks(program, mesh):
        found[axes, each.kind] += each.bytes
    return found


def _sent(program: "Compiled", mesh: "Mesh") -> float:
    """Returns the words that a device sends for a block over `col` and `expert`.

    Not those of the router's means over the batch, two numbers for each expert.
    """
    total = 0.0
    for axes, each in _in_blocks(program, mesh):
        if axes == COL or (axes, each.kind) == (EXPERT, "all-to-all"):
            total += each.bytes * perf.sent_per_byte(each.kind, mesh.shape[axes[0]])
    return total / FLOAT
