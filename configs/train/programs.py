"""A compiler's analysis learnt from LLVM-IR by a gated graph network; 3 to 4 minutes.

`hpcjax run train/programs dataset.task=data_dependence model.gate=post`.
Programs are installed with the project; to read them needs `pip install 'hpcjax[ir]'`.
Expect: F1 of reachability, 2 · val_true / (val_predicted + val_actual), above 0.95;
`hpcjax table programl/dataflow`.
"""

from hpcjax.data import ProgramsConfig
from hpcjax.models import GgnnConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    dataset=ProgramsConfig(),
    model=GgnnConfig(),
    optimizer=AdamWConfig(
        lr=4e-3, weight_decay=0.0, clip_norm=1.0, schedule=CosineConfig()
    ),
    train=TrainConfig(steps=300, batch_size=1, eval_every=300, checkpoint_every=0),
)
