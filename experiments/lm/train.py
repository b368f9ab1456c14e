"""Trains a language model of one's own on texts that packages carry."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from hpcjax.data.config import CharTextConfig, TokenTextConfig
from hpcjax.models.config import CausalLmConfig
from hpcjax.optim.config import AdamWConfig, LambConfig, SgdConfig
from hpcjax.runs.config import TrainingConfig

if TYPE_CHECKING:
    import pathlib

    import xarray as xr

    from hpcjax import train
    from hpcjax.runs.context import Context

FOLDER = "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """One training run.

    Attributes:
      dataset: texts, in byte-pair tokens or in characters.
      model: its context is the data's, its vocabulary too.
      optimizer: what trains it.
      compute: dtype of products; parameters and their updates stay float32.
    """

    dataset: TokenTextConfig | CharTextConfig = TokenTextConfig()
    model: CausalLmConfig = CausalLmConfig()
    optimizer: AdamWConfig | LambConfig | SgdConfig = AdamWConfig()
    compute: Literal["float32", "bfloat16"] = "float32"


def task(cfg: Config, data_root: "pathlib.Path", devices: int = 1) -> "train.Task":
    """Puts data, model and optimizer together."""
    from hpcjax import core, train

    del devices
    dataset = cfg.dataset.load(data_root)
    policy = core.Policy(compute=cfg.compute)
    model = cfg.model.make(dataset.inputs, dataset.outputs, policy)
    return train.supervised(model, cfg.optimizer.make(cfg.train.steps), dataset)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains, and writes the model to the run's folder `model`.

    It is in Hugging Face's layout, with `tokenizer.json` beside it if the data has
    byte-pair tokens: `hpcjax run lm/generate model=runs/<id>/model` goes on with it.
    """
    from hpcjax.models import pretrained

    made = task(cfg, ctx.data_root)
    history = ctx.train(made, cfg.train, seed=cfg.seed)
    assert ctx.trained is not None
    folder = ctx.directory.path / FOLDER
    coder = made.dataset.coder
    trained = pretrained.Pretrained(
        params=ctx.trained.params,
        config=cfg.model,
        context=made.dataset.inputs[0],
        vocabulary=made.dataset.outputs,
        metadata={} if coder is None else {"eos_token_id": coder.eos},
    )
    pretrained.save(folder, trained)
    if coder is not None:
        coder.save(folder / "tokenizer.json")
    return history
