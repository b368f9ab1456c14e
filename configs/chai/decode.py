"""One token's attention over 8192 keys, 4 clusters of 32 heads; 1 min on a GPU.

16 requests, bfloat16, random numbers. Needs a GPU; where there is none the plain
reference runs, small sizes only.
Expect: at least 1.3 times as fast as the fastest attention of all heads, not measured
yet (`hpcjax table chai/decode --tier gpu`).
"""

from experiments.chai.decode import Config

needs = ("gpu",)

base = Config()
