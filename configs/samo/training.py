"""Losses of a pruned character model, compressed and masked; 13 min a run.

Expect: the same losses in both forms, and a validation loss near that of the network
that is not pruned (`hpcjax table samo/training`).
"""

from experiments.samo.training import Config

early_bird = Config()
base = early_bird
smoke = {
    "steps": "2",
    "every": "1",
    "most": "2",
    "batch_size": "2",
    "dataset.context": "8",
    "model.width": "8",
    "model.heads": "2",
    "model.depth": "1",
}
