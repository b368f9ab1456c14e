"""A training step of GPT-2 medium against the device's own peak; 2 min on a GPU.

Needs a GPU of 40 GB, cuDNN for one of the rows.
Expect: at least 35 % of the peak, not measured yet
(`hpcjax table lm/training-speed --tier gpu`).
"""

from experiments.lm.training_speed import Config

needs = ("gpu",)

base = Config()
smoke = {
    "model.depth": "2",
    "model.width": "16",
    "model.heads": "2",
    "context": "8",
    "vocabulary": "31",
    "batch": "2",
    "compute": "float32",
    "side": "16",
    "attention": "[1,8,2,8]",
    "implementations": "[xla]",
    "repetitions": "2",
}
