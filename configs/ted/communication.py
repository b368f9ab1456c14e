"""What a block with experts sends, and a hundred steps on characters; 20 s a run.

Eight devices are simulated.
Expect: two devices with equal tokens halve the bytes of all-to-alls, eight collectives
in place of twelve, the losses of one device (`hpcjax table ted/communication`).
"""

from dataclasses import replace

from experiments.ted.communication import Config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig, ExpertsConfig, TransformerOptions
from hpcjax.optim import SgdConfig
from hpcjax.sharding import TedConfig
from hpcjax.train.config import TrainConfig

base = Config(
    devices=8,
    dataset=CharTextConfig(context=8),
    model=CausalLmConfig(
        depth=3,
        width=64,
        heads=4,
        options=TransformerOptions(experts=ExpertsConfig(count=4, top_k=1)),
        remat="collectives",
    ),
    optimizer=SgdConfig(lr=0.05, momentum=0.9),
    parallel=TedConfig(tensor=2, expert=2),
    train=TrainConfig(batch_size=16, steps=100),
    taken=100,
)
full = replace(base, model=replace(base.model, remat="full"))
duplicates = replace(base, parallel=replace(base.parallel, drop_duplicates=False))
plain = replace(full, parallel=duplicates.parallel)
scattered = replace(base, broken="experiments.ted.controls:scattered")
