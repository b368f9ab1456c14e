"""What a block with experts sends in a step, beside the formula for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hpcjax import cost, runs, sharding
from hpcjax.core import checks
from hpcjax.models import CausalLmConfig
from hpcjax.runs import program
from hpcjax.sharding import TedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A mixture of experts, in every block, on devices that share these out."""

    smoke: ClassVar[Mapping[str, str]] = {
        "devices": "2",
        "parallel.tensor": "1",
        "parallel.expert": "2",
        "model.width": "16",
        "dataset.context": "4",
        "train.batch_size": "4",
        "taken": "1",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        spread, options = self.parallel, getattr(self.model, "options", None)
        experts = getattr(options, "experts", None)
        checks.require(
            isinstance(self.model, CausalLmConfig)
            and isinstance(spread, TedConfig)
            and experts is not None
            and (experts.every, experts.capacity_factor) == (1, None)
            and spread.expert > 1,
            "each block must have experts, which devices share out, without a limit",
            experts=experts,
            parallel=spread,
        )
        known = ("none", "full", "collectives")
        checks.require_choice("model.remat", self.model.remat, known)

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and the formula's."""
        return {**super().figures, "formula": ": words that a device sends for a block"}


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the step; an expert has a place for each token in the formula."""
    spread = cfg.parallel
    layout = sharding.Layout.of(
        cfg.devices or ctx.mesh.size, spread.tensor, spread.expert
    )
    tokens = cfg.train.batch_size * cfg.dataset.context // (layout.data * layout.expert)
    slots = tokens * cfg.model.options.experts.count
    options: Any = {"drop_duplicates": spread.drop_duplicates}
    options |= {"remat": cfg.model.remat}
    words = cost.ted_volume(tokens, cfg.model.width, slots, layout, **options)
    return {**program.read(cfg, ctx), "formula": sum(words.values())}
