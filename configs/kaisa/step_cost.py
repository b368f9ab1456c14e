"""What a step of K-FAC costs against SGD, by stage; 3 min on 2 cores.

Expect: at intervals of 10 and 100 at most 1.25 of SGD's step: 1.10 on a CPU, not
measured on a GPU yet (`hpcjax table kaisa/step-cost`).
"""

from experiments.kaisa.step_cost import Config
from hpcjax.models import ResNetConfig

cpu = Config()
gpu = Config(
    model=ResNetConfig(depth=50),
    inputs=(224, 224, 3),
    classes=1000,
    compute="bfloat16",
    precision="default",
)
base = cpu
