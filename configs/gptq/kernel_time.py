"""A product of one token with 49152×12288 weights of 4 and 3 bits; 1 min on a GPU.

Needs a GPU; where there is none the plain reference runs, small sizes only.
Expect: at least 3 times as fast as bfloat16, not measured yet
(`hpcjax table gptq/kernel --tier gpu`).
"""

from experiments.gptq.kernel_time import Config

needs = ("gpu",)

base = Config()
