"""Products of sparse integers against dense and sparse ones in bfloat16; 1 min, GPU.

Expect: L8-R8 faster than bfloat16 at 90 % zeros, not measured yet
(`hpcjax table magicube/spmm --tier gpu`).
"""

from experiments.magicube.spmm_time import Config

needs = ("gpu",)

base = Config()
