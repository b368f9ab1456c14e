"""Training with K-FAC and the optimizers it is compared with: wiring only."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from hpcjax import train
from hpcjax.data.config import (
    DigitsConfig,
    FashionMnistConfig,
    MaskedTextConfig,
    PhantomsConfig,
)
from hpcjax.models.config import BertConfig, MlpConfig, ResNetConfig, UNetConfig
from hpcjax.optim.config import AdamWConfig, LambConfig, SgdConfig
from hpcjax.optim.kfac.config import KfacConfig
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
      optimizer: SGD, AdamW, LAMB, or K-FAC in front of one of them.
    """

    dataset: DigitsConfig | FashionMnistConfig | PhantomsConfig | MaskedTextConfig = (
        DigitsConfig()
    )
    model: MlpConfig | ResNetConfig | UNetConfig | BertConfig = MlpConfig()
    optimizer: SgdConfig | AdamWConfig | LambConfig | KfacConfig = KfacConfig()


def task(cfg: Config, data_root: pathlib.Path, devices: int = 1) -> "train.Task":
    """Puts data, model and optimizer together."""
    dataset = cfg.dataset.load(data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    if isinstance(cfg.optimizer, KfacConfig):
        optimizer, curvature = cfg.optimizer.make(cfg.train.steps, model, devices)
    else:
        optimizer, curvature = cfg.optimizer.make(cfg.train.steps), None
    return train.supervised(model, optimizer, dataset, curvature=curvature)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains and returns the history."""
    own = task(cfg, ctx.data_root, ctx.mesh.size)
    return ctx.train(own, cfg.train, seed=cfg.seed)
