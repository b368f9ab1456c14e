"""Latency of a draft step by depth and width, random weights; 5 min on 2 cores.

Expect: on a GPU latency follows depth, whatever the width, as long as a layer's bytes
take less time than its launch; on two cores bytes count (`hpcjax table
specdec/depth-width`).
"""

from experiments.specdec.latency import Config

cpu = Config()
gpu = Config(
    depths=(2, 4, 8, 16, 24),
    widths=(512, 1024, 2048),
    head_dim=64,
    parameters=200_000_000,
    vocabulary=32_000,
    size=512,
    compute="bfloat16",
    repetitions=50,
    inner=16,
)
base = cpu
