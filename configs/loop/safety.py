"""The cost of the check for finite numbers and of checkpoints: ResNet-20, batch 128.

Expect: at most 1 % and 2 % of a step (`hpcjax table loop/safety`).
"""

from experiments.loop.safety import Config

base = Config()
