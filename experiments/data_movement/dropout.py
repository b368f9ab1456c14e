"""Trains a Transformer with dropout, plain and fused."""

import contextlib
import dataclasses

from hpcjax import runs
from hpcjax.core.config import find_function
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.runs import training

task = training.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run, maybe with something broken; see `TrainingConfig`.

    Attributes:
      broken: `"module:function"`, a context in which it trains; "" for none.
    """

    dataset: training.DatasetPart = CharTextConfig()
    model: training.ModelPart = CausalLmConfig()
    broken: str = ""


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains."""
    broken = find_function(cfg.broken)() if cfg.broken else contextlib.nullcontext()
    with broken:
        return training.run(cfg, ctx)
