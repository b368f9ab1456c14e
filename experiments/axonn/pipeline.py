"""A training step in stages, beside the formulas for what it sends, holds and idles."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hpcjax import cost, runs, sharding
from hpcjax.core import checks
from hpcjax.models import CausalLmConfig
from hpcjax.runs import program
from hpcjax.sharding import PipelineConfig

LATENCY = 0.5  # of a message, where a forward pass takes 1 and a backward pass 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A language model on several devices, or on one, for comparison."""

    smoke: ClassVar[Mapping[str, str]] = {
        "devices": "1",
        "parallel": "none",
        "model.depth": "2",
        "model.width": "16",
        "dataset.context": "4",
        "train.batch_size": "8",
        "taken": "1",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "what is passed on is known of language models"
        fits = isinstance(self.model, CausalLmConfig)
        checks.require(fits, rule, model=self.model)
        # Of narrower ones a CPU sends float32.
        rule = "formulas are of what is passed on in float32"
        checks.require(self.compute == "float32", rule, compute=self.compute)

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and of a pipeline the formulas'."""
        found = {**super().figures, "stack": ": bytes of the parameters of blocks"}
        if isinstance(self.parallel, PipelineConfig):
            found |= {
                "input": ": bytes of a micro-batch between two stages",
                "permuted": ": bytes that a device passes on, ticks * input * ways",
                "both_ways": ": the same, with two ways of any number of stages",
                "idle": ": share of the compiled ticks, over (p - 1) / (m + p - 1)",
                "held": ": analytical: inputs that a stage is planned to keep at most",
                "makespan": ": analytical: the schedule's, over (m + p - 1)(t_f + t_b)",
                "late": ": likewise with latency c, over the same and 2 (p - 1) c",
            }
        return found


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the step, and takes it where it is to be taken."""
    import jax

    from hpcjax.core import trees

    found = dict(program.read(cfg, ctx))
    model = cfg.model.make((cfg.dataset.context,), 2)  # blocks know no vocabulary
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    found["stack"] = trees.num_bytes(shapes["blocks"])
    if isinstance(cfg.parallel, PipelineConfig):
        found |= by_formulas(cfg, cfg.parallel, cfg.devices or ctx.mesh.size)
        found["idle"] = count_idle(cfg, cfg.parallel, found)
    return found


def count_idle(cfg: Config, spread: PipelineConfig, found: Mapping[str, Any]) -> float:
    """Returns the share of a device's compiled ticks without an op, over the formula's.

    Ticks are turns of the loop that passes something on.
    """
    at = cfg.axes.index("stage"), program.KINDS.index("collective-permute")
    stages, count = spread.stages, spread.micro_batches
    ticks = found["sent"][at][program.PARTS.index(program.LOOP)] / found["block"][at]
    ops = count * (3 if spread.schedule == "zero_bubble_h1" else 2)
    return (1 - ops / ticks) * (count + stages - 1) / (stages - 1)


def by_formulas(cfg: Config, spread: PipelineConfig, devices: int) -> dict[str, float]:
    """Returns what the schedule says of a step on so many devices."""
    stages, count = spread.stages, spread.micro_batches
    schedule = getattr(sharding, spread.schedule)(stages, count)
    table = sharding.tick_table(schedule)
    copies = devices // (stages * spread.tensor)
    rows = cfg.train.batch_size // (copies * count)
    size = 4 * rows * cfg.dataset.context * cfg.model.width
    # Of two stages, one exchange goes both ways.
    ways = min(stages - 1, 2)
    line, late = (
        cost.simulate(schedule, cost.StageCosts(t_f=1, t_b=2, t_p2p=p2p)).makespan
        for p2p in (0, LATENCY)
    )
    formula = 3 * (count + stages - 1)
    return {
        "input": size,
        "permuted": table.op.shape[1] * ways * size,
        "both_ways": table.op.shape[1] * 2 * size,
        "held": table.saved_buffers,
        "makespan": line / formula,
        "late": late / (formula + 2 * (stages - 1) * LATENCY),
    }
