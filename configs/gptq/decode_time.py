"""LLaMA-7B's shape writes with 4 and 3 bits a weight; 3 min on a GPU of 40 GB.

Needs a GPU; random weights.
Expect: at least 2 times the tokens a second of bfloat16, not measured yet
(`hpcjax table gptq/decode --tier gpu`).
"""

from experiments.gptq.decode_time import Config

needs = ("gpu",)

base = Config()
