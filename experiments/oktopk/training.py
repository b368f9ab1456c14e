"""Training with gradients that are exchanged in one way or another: wiring only."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from hpcjax import train
from hpcjax.collectives.config import AnyExchangeConfig, DenseConfig
from hpcjax.data.config import (
    CharTextConfig,
    Cifar10Config,
    DigitsConfig,
    FashionMnistConfig,
)
from hpcjax.models.config import CausalLmConfig, MlpConfig, ResNetConfig, VggConfig
from hpcjax.optim.config import AdamWConfig, SgdConfig
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
      optimizer: gets the averaged gradients.
      exchange: how devices average their gradients.
    """

    dataset: DigitsConfig | FashionMnistConfig | Cifar10Config | CharTextConfig = (
        DigitsConfig()
    )
    model: MlpConfig | ResNetConfig | VggConfig | CausalLmConfig = MlpConfig()
    optimizer: SgdConfig | AdamWConfig = SgdConfig()
    exchange: AnyExchangeConfig = DenseConfig()


def task(cfg: Config, data_root: pathlib.Path, devices: int = 1) -> "train.Task":
    """Puts data, model, optimizer and exchange together."""
    del devices
    dataset = cfg.dataset.load(data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    optimizer = cfg.optimizer.make(cfg.train.steps)
    return train.supervised(model, optimizer, dataset, exchange=cfg.exchange)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains and returns the history."""
    return ctx.train(task(cfg, ctx.data_root), cfg.train, seed=cfg.seed)
