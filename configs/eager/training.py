"""A hyperplane learned by eight processes, one of them late; 4 min on 2 cores.

`paper` has the paper's size, 1 GB of data in all; `base` an eighth of its dimensions.
Expect: majority ends with the loss of sync, sooner (`hpcjax table eager/hyperplane`).
"""

from experiments.eager.hyperplane import Hyperplane
from experiments.eager.training import Config

paper = Config()
cpu = Config(
    task=Hyperplane(dims=1024, points=8192, batch=512), epochs=12, lr=0.1, base=0.02
)
newest = Config(
    task=cpu.task,
    epochs=cpu.epochs,
    lr=cpu.lr,
    base=cpu.base,
    missed="newest",
    sync_models_every=48,
)
base = cpu
