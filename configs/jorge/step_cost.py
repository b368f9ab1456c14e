"""What a step costs with SGD, AdamW, Jorge and Shampoo; 5 min on 2 cores.

Expect: on 2 cores a step that updates the preconditioners costs 1.08 of SGD's (Jorge)
and 1.31 (Shampoo, eigh); at k = 50 neither is told apart from SGD's. On a GPU the
bar is 1.10 at k = 50, not measured yet (`hpcjax table jorge/step-cost`).
"""

from experiments.jorge.step_cost import Config
from hpcjax.models import ResNetConfig

cpu = Config(model=ResNetConfig(depth=20), inputs=(32, 32, 3), batch_size=128)
gpu = Config(
    model=ResNetConfig(depth=50),
    inputs=(224, 224, 3),
    classes=1000,
    batch_size=256,
    compute="bfloat16",
)
base = cpu
