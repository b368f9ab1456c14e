"""A training step of GPT-2 medium against the device's own peak; 2 min on a GPU.

Needs a GPU of 40 GB, cuDNN for one of the rows.
Expect: at least 35 % of the peak, not measured yet
(`hpcjax table lm/training-speed --tier gpu`).
"""

from experiments.lm.training_speed import Config

needs = ("gpu",)

base = Config()
