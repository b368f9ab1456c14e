"""What a step costs with SGD, AdamW, Jorge and Shampoo; 5 min on 2 cores.

Expect: Jorge's step at k = 50 costs less than Shampoo's (cpu: 1.02 and 1.16 of SGD's).
On a GPU the bar is 1.10 of SGD's, not measured yet (`hpcjax table jorge/step-cost`).
"""

from experiments.jorge.step_cost import Config
from hpcjax.models.config import ResNetConfig

cpu = Config(model=ResNetConfig(depth=20), inputs=(32, 32, 3), batch_size=128)
gpu = Config(
    model=ResNetConfig(depth=50),
    inputs=(224, 224, 3),
    classes=1000,
    batch_size=256,
    compute="bfloat16",
)
base = cpu
smoke = {
    "model.depth": "8",
    "model.width": "2",
    "inputs": "[8,8,1]",
    "batch_size": "4",
    "factor": "8",
    "methods": "[jorge]",
    "repetitions": "2",
}
