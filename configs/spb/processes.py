"""Four processes, one for each role, that compile their own program; 1 min.

Expect: at most 78 % of the bytes of zeros, and less computing and memory the shorter
the role (`hpcjax table spb/processes`). Nothing is timed.
"""

import dataclasses

from experiments.spb.processes import Config

base = Config(k=4, layers=2, width=256, rows=2048, steps=8)
zeros = dataclasses.replace(base, mode="zeros")
