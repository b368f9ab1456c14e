"""The largest base of a mixture of 4 experts in 4 GiB of each of 32 devices; 1 min.

Steps are compiled for simulated devices, and nothing is run.
Expect: nearly twice the parameters with two devices to a matrix, and more than three
times with four (`hpcjax table ted/memory`).
"""

from experiments.ted.memory import Config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig, ExpertsConfig, TransformerOptions
from hpcjax.optim import AdamWConfig
from hpcjax.sharding import TedConfig
from hpcjax.train.config import TrainConfig

base = Config(
    devices=32,
    dataset=CharTextConfig(context=8),
    model=CausalLmConfig(
        depth=4,
        width=1024,
        heads=8,
        options=TransformerOptions(experts=ExpertsConfig(count=4, top_k=1, every=2)),
        remat="collectives",
    ),
    optimizer=AdamWConfig(lr=1e-3),
    parallel=TedConfig(expert=4),
    train=TrainConfig(batch_size=32, steps=1),
    memory=4 * 2**30,
)
smoke = {
    "devices": "2",
    "parallel.tensor": "1",
    "parallel.expert": "2",
    "model.width": "16",
    "dataset.context": "4",
    "train.batch_size": "2",
    "memory": "300000",
}
