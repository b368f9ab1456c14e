"""Training a Transformer with inverses as old as PipeFisher's, on one device.

What is trained is what a pipeline with K-FAC in its bubbles would compute; what a step
would take there is simulated.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, Literal

from experiments.pipefisher import experiment
from hpcjax import train
from hpcjax.core.errors import ConfigError
from hpcjax.data.config import CharTextConfig, MaskedTextConfig
from hpcjax.models.config import BertConfig, CausalLmConfig
from hpcjax.optim.config import LambConfig
from hpcjax.optim.kfac.config import SKIP
from hpcjax.runs.config import TrainingConfig

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

# The order in which a block uses its matrices, as `perf.transformer_block` lists them.
FORWARDS = (
    *("attention/query", "attention/key", "attention/value", "attention/output"),
    *("mlp/up", "mlp/down"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeFisherConfig:
    """K-FAC with late inverses in front of LAMB.

    Attributes:
      base: takes the preconditioned gradient.
      skip: regexes of what keeps its gradient: all outside the stack of blocks.
      damping: γ.
      pipeline: whose bubbles the work is put into; its stages share the blocks out.
      fresh: inverts at every step instead, as if that took no time.
    """

    base: LambConfig = LambConfig()
    skip: tuple[str, ...] = SKIP
    damping: float = 1e-3
    pipeline: experiment.Config = experiment.Config(stages=2, blocks=1)
    fresh: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """One training run.

    Attributes:
      dataset: what is learned.
      model: what learns it.
      optimizer: LAMB, or K-FAC in front of it.
    """

    dataset: CharTextConfig | MaskedTextConfig = CharTextConfig()
    model: CausalLmConfig | BertConfig = CausalLmConfig()
    optimizer: LambConfig | PipeFisherConfig = LambConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.optimizer, PipeFisherConfig):
            pipeline, depth = self.optimizer.pipeline, self.model.depth
            if pipeline.stages * pipeline.blocks != depth:
                raise ConfigError(
                    "stages times blocks of optimizer.pipeline must be model.depth: "
                    f"got {pipeline.stages}, {pipeline.blocks} and {depth}"
                )


def task(cfg: Config, data_root: pathlib.Path, devices: int = 1) -> "train.Task":
    """Puts data, model and optimizer together."""
    import optax

    from hpcjax.optim import kfac

    del devices
    dataset = cfg.dataset.load(data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    chosen, curvature = cfg.optimizer, None
    if isinstance(chosen, PipeFisherConfig):
        plan = kfac.plan(model, skip=chosen.skip)
        curvature = kfac.Curvature(plan)
        late = kfac.scale_by_pipefisher(
            plan,
            visible(chosen, [block.path for block in plan.blocks]),
            rows=[(0, stage) for stage in range(chosen.pipeline.stages)],
            damping=chosen.damping,
            data_axis=curvature.data_axis,
        )
        optimizer = optax.chain(late, chosen.base.make(cfg.train.steps))
    else:
        optimizer = chosen.make(cfg.train.steps)
    return train.supervised(model, optimizer, dataset, curvature=curvature)


def visible(
    chosen: PipeFisherConfig, paths: list[str]
) -> dict[int, list[tuple[int, int, Literal["A", "B"]]]]:
    """Returns when which inverse is first used, its layers numbered as in `paths`."""
    place = {name: paths.index(f"blocks/{name}") for name in FORWARDS}
    refresh: Any = experiment.simulate(chosen.pipeline).visible
    if chosen.fresh:
        refresh = {0: [factor for factors in refresh.values() for factor in factors]}
    found = {}
    for step, factors in refresh.items():
        found[step] = []
        for stage, layer, side in factors:
            block, within = divmod(layer, len(FORWARDS))
            own = block * len(FORWARDS) + place[FORWARDS[within]]
            found[step].append((stage, own, side))
    return found


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains.

    Returns:
      The history, and `step_time`: what a step would take in the pipeline, over what
      it takes there without K-FAC.
    """
    history = ctx.train(task(cfg, ctx.data_root), cfg.train, seed=cfg.seed)
    added = 0.0
    if isinstance(cfg.optimizer, PipeFisherConfig):
        pipeline = cfg.optimizer.pipeline
        figures = experiment.figures(pipeline, experiment.simulate(pipeline))
        added = figures["t_step"].item() / figures["t_pipe"].item() - 1
    return history.assign(step_time=1.0 + added)
