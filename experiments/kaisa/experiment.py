"""Training with K-FAC and the optimizers it is compared with: wiring only."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, ClassVar

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
from hpcjax.runs.config import check_seed
from hpcjax.train.config import TrainConfig

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One training run.

    Attributes:
      dataset: what is learned.
      model: what learns it.
      optimizer: SGD, AdamW, LAMB, or K-FAC in front of one of them.
      train: length, batch and intervals.
      seed: of parameters, data order and draws.
    """

    resumable: ClassVar[tuple[str, ...]] = (
        "train.steps",
        "train.checkpoint_every",
        "train.keep",
    )

    dataset: DigitsConfig | FashionMnistConfig | PhantomsConfig | MaskedTextConfig = (
        DigitsConfig()
    )
    model: MlpConfig | ResNetConfig | UNetConfig | BertConfig = MlpConfig()
    optimizer: SgdConfig | AdamWConfig | LambConfig | KfacConfig = KfacConfig()
    train: TrainConfig = TrainConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


def task(cfg: Config, data_root: pathlib.Path, devices: int = 1) -> "train.Task":
    """Puts data, model and optimizer together."""
    dataset = cfg.dataset.load(data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    if isinstance(cfg.optimizer, KfacConfig):
        optimizer, curvature = cfg.optimizer.make(cfg.train.steps, model, devices)
    else:
        optimizer, curvature = cfg.optimizer.make(cfg.train.steps), None
    objectives = {
        "segmentation": train.segmentation_totals,
        "masked": train.masked_language_totals,
    }
    return train.supervised(
        model,
        optimizer,
        dataset,
        objective=objectives.get(dataset.kind, train.label_totals),
        curvature=curvature,
    )


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains and returns the history."""
    own = task(cfg, ctx.data_root, ctx.mesh.size)
    return ctx.train(own, cfg.train, seed=cfg.seed)
