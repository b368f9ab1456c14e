"""PipeFisher as an optimizer: K-FAC with inverses as old as a pipeline makes them.

What is trained is what a pipeline with K-FAC in its bubbles would compute; what a step
would take there is simulated.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from experiments.pipefisher import experiment
from hpcjax import core
from hpcjax.core import checks
from hpcjax.core.config import Config, Patterns, Positive
from hpcjax.optim import LambConfig
from hpcjax.optim.kfac import SKIP

# The order in which a block uses its matrices, as `cost.transformer_block` lists them.
FORWARDS = (
    *("attention/query", "attention/key", "attention/value", "attention/output"),
    *("mlp/up", "mlp/down"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeFisherConfig(Config):
    """K-FAC with late inverses in front of LAMB.

    Attributes:
      base: takes the preconditioned gradient.
      skip: regexes of what keeps its gradient: all outside the stack of blocks.
      damping: γ.
      pipeline: whose bubbles the work is put into; its stages share the blocks out.
      fresh: inverts at every step instead, as if that took no time.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients",)
    whole: ClassVar[bool] = True  # works with whole matrices, not with parts of them
    figures: ClassVar[Mapping[str, str]] = {"step_time": ""}

    base: LambConfig = LambConfig()
    skip: Patterns = SKIP
    damping: Positive = 1e-3
    pipeline: experiment.Config = experiment.Config(stages=2, blocks=1)
    fresh: bool = False

    def build(self, setup: "core.RunShape") -> "core.Optimization":
        """Returns the optimizer, and the backward pass that it wants.

        Its fact `step_time` is what a step would take in the pipeline, over what it
        takes there without K-FAC.

        Raises:
          ConfigError: the stages do not hold the model's blocks.
        """
        import optax

        from hpcjax.optim import kfac

        plan = kfac.plan(setup.model, skip=self.skip)
        depths = {block.depth for block in plan.blocks}
        held = self.pipeline.stages * self.pipeline.blocks
        rule = f"stages times blocks of a pipeline must be the model's depth, {depths}"
        checks.require(depths == {held}, rule, stages_times_blocks=held)
        curvature = kfac.Curvature(plan)
        late = kfac.scale_by_pipefisher(
            plan,
            visible(self, [block.path for block in plan.blocks]),
            rows=[(0, stage) for stage in range(self.pipeline.stages)],
            damping=self.damping,
            data_axis=curvature.data_axis,
        )
        figures = experiment.figures(self.pipeline, experiment.simulate(self.pipeline))
        step_time = figures["t_step"].item() / figures["t_pipe"].item()
        tx = optax.chain(late, self.base.make(setup.steps))
        made = kfac.optimization(tx, curvature)
        return made._replace(facts={"step_time": step_time})


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
