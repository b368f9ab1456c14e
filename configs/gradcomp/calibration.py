"""Passes and encoding of this device for the utility table; half an hour on a GPU.

`:cpu` has ResNet-50 with small batches, about ten minutes on 2 cores.
Expect: exact Top-k is the slowest to encode, PowerSGD gets slower with its rank
(`hpcjax table gradcomp/encoding`).
"""

import dataclasses

from experiments.gradcomp.calibration import Config

gpu = Config()
cpu = dataclasses.replace(
    gpu, models=("resnet50",), batches=(4, 8), processes=(8, 16, 32), repetitions=7
)
base = cpu
