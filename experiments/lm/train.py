"""Trains a language model of one's own on texts that packages carry, and saves it."""

import dataclasses

from hpcjax import runs
from hpcjax.core.errors import ConfigError
from hpcjax.data import TokenTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs import training

FOLDER = "model"
task = training.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run whose model can be continued with; see `TrainingConfig`."""

    dataset: training.DatasetPart = TokenTextConfig()
    model: training.ModelPart = CausalLmConfig()
    optimizer: training.OptimizerPart = AdamWConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, CausalLmConfig):
            raise ConfigError(
                "lm/train saves causal language models: model must be causal_lm; "
                "train/digits takes any other"
            )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains, and writes the model to the run's folder `model`.

    It is in Hugging Face's layout, with `tokenizer.json` beside it if the data has
    byte-pair tokens: `hpcjax run lm/generate model=runs/<id>/model` goes on with it.
    """
    from hpcjax.core import per_device
    from hpcjax.models import pretrained

    history = training.run(cfg, ctx)
    assert ctx.trained is not None
    dataset, folder = cfg.dataset.load(ctx.data_root), ctx.directory.path / FOLDER
    coder = dataset.coder
    trained = pretrained.Pretrained(
        params=per_device.average_outside(ctx.trained.params),
        config=cfg.model,
        context=dataset.inputs[0],
        vocabulary=dataset.outputs,
        metadata={} if coder is None else {"eos_token_id": coder.eos},
    )
    pretrained.save(folder, trained)
    if coder is not None:
        coder.save(folder / "tokenizer.json")
    return history
