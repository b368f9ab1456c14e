"""Losses of a pruned character model, compressed and masked; 13 min a run.

Expect: the same losses in both forms, and a validation loss near that of the network
that is not pruned (`hpcjax table samo/training`).
"""

from experiments.samo.training import Config

early_bird = Config()
base = early_bird
