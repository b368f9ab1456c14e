"""Fused operations and the fused layer, timed on a GPU; a minute. Not run yet.

Expect: 75 % of a copy's bandwidth for each operation, and a norm 1.7 times as fast as
in four programs (`hpcjax table data_movement/encoder`).
"""

from experiments.data_movement.encoder import Config

needs = ("gpu",)
base = Config()
