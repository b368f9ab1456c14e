"""The cost of the check for finite numbers and of checkpoints: ResNet-20, batch 128.

Expect: at most 1 % and 2 % of a step (`hpcjax table loop/safety`).
"""

from experiments.loop.safety import Config

base = Config()
smoke = {
    "model.depth": "8",
    "model.width": "2",
    "inputs": "[8,8,1]",
    "batch_size": "4",
    "larger": "2",
    "after": "1",
    "repetitions": "2",
}
