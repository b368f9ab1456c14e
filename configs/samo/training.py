"""Losses of a pruned character model, compressed and masked; a minute a run.

`early_bird` looks for a ticket and trains a larger model longer: 13 minutes a run.
Expect: the same losses in both forms, and a validation loss within 8 % of that of the
network that is not pruned, as a random mask has, too (`hpcjax table samo/quality`).
"""

import dataclasses

from experiments.samo.training import Config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig

early = Config()
early_bird = dataclasses.replace(
    early,
    dataset=CharTextConfig(context=32),
    model=CausalLmConfig(depth=2, width=192, heads=4),
    pruned=(".*",),
    every=50,
    most=8,
    steps=1500,
)
base = early
