"""The language model of `strategies/compare` in the loop; half a minute a run.

On one device, where PipeDream's weights are as old as on eight.
Expect: with older weights more steps to data parallelism's loss, each at its own best
rate (`hpcjax table strategies/rates`).
"""

from configs.strategies import compare
from hpcjax.data import CharTextConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    dataset=CharTextConfig(context=8, validation=0.02),
    model=compare.base.model,
    optimizer=compare.base.optimizer,
    train=TrainConfig(batch_size=32, steps=100, eval_every=10),
)
smoke = {
    "model.depth": "2",
    "model.width": "16",
    "dataset.context": "4",
    "train.batch_size": "8",
    "train.steps": "2",
}
