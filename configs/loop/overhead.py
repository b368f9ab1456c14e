"""The training loop against a bare jitted step: ResNet-20, batch 128; 5 min on 2 cores.

Expect: at most 1.03 of the bare step's time (`hpcjax table loop/overhead`).
"""

from experiments.loop.experiment import Config

base = Config()
smoke = {
    "model.depth": "8",
    "model.width": "2",
    "inputs": "[8,8,1]",
    "batch_size": "4",
    "larger": "2",
    "steps": "2",
    "repetitions": "2",
}
