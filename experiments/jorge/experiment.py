"""Training with Jorge and the optimizers it is compared with: wiring only."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from hpcjax import train
from hpcjax.data.config import CharTextConfig, DigitsConfig, FashionMnistConfig
from hpcjax.models.config import CausalLmConfig, MlpConfig, ResNetConfig
from hpcjax.optim.config import (
    AdamWConfig,
    JorgeConfig,
    JorgeFromSgdConfig,
    SgdConfig,
    ShampooConfig,
)
from hpcjax.runs.config import TrainingConfig

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """One training run.

    Attributes:
      dataset: what is learned.
      model: what learns it.
      optimizer: SGD, AdamW, Shampoo, Jorge, or Jorge derived from an SGD recipe.
    """

    dataset: DigitsConfig | FashionMnistConfig | CharTextConfig = DigitsConfig()
    model: MlpConfig | ResNetConfig | CausalLmConfig = MlpConfig()
    optimizer: (
        SgdConfig | AdamWConfig | ShampooConfig | JorgeConfig | JorgeFromSgdConfig
    ) = SgdConfig()


def task(cfg: Config, data_root: pathlib.Path, devices: int = 1) -> "train.Task":
    """Puts data, model and optimizer together."""
    del devices
    dataset = cfg.dataset.load(data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    optimizer = cfg.optimizer.make(cfg.train.steps)
    return train.supervised(model, optimizer, dataset)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains and returns the history."""
    return ctx.train(task(cfg, ctx.data_root), cfg.train, seed=cfg.seed)
