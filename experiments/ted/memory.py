"""The largest base of a mixture of experts of which a training step fits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpcjax import core, cost, runs, sharding
from hpcjax.core import checks
from hpcjax.runs import program
from hpcjax.sharding import TedConfig

FLOAT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A mixture of experts, trained by AdamW; its depth is what is looked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        experts = getattr(getattr(self.model, "options", None), "experts", None)
        good = isinstance(self.parallel, TedConfig) and experts is not None
        rule = "experts must be shared out, in a memory"
        told: dict[str, Any] = {"parallel": self.parallel, "memory": self.memory}
        checks.require(good and self.memory > 0, rule, experts=experts, **told)

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and what formulas say."""
        return {
            **super().figures,
            "base": ": parameters of the deepest model that fits, without experts",
            "formula": ": bytes of a device between steps",
            "gathered": ": these, if each device had all experts",
        }


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Looks for the deepest model; the formula is for the config's own depth."""
    import jax

    found = program.read(cfg, ctx)
    dataset, stacks = cfg.dataset.load(ctx.data_root), cfg.model.stacks
    plain = dataclasses.replace(cfg.model.options, experts=None)
    base = dataclasses.replace(cfg.model, depth=found["depth"], options=plain)
    mixture, deepest = (
        each.make(dataset.inputs, dataset.outputs) for each in (cfg.model, base)
    )
    devices, spread = cfg.devices or ctx.mesh.size, cfg.parallel
    layout = sharding.Layout.of(devices, spread.tensor, spread.expert)
    formula, gathered = (
        cost.ted_memory(mixture, each, held=FLOAT, stepped=2 * FLOAT, stacked=stacks)
        for each in (layout, layout._replace(expert=1))
    )
    shapes, _ = jax.eval_shape(deepest.init, jax.random.key(0))
    size = core.trees.num_params(shapes)
    return {**found, "base": size, "formula": formula, "gathered": gathered}
