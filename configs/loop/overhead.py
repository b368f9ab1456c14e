"""The training loop against a bare jitted step: ResNet-20, batch 128; 5 min on 2 cores.

Expect: at most 1.03 of the bare step's time (`hpcjax table loop/overhead`).
"""

from experiments.loop.experiment import Config

base = Config()
