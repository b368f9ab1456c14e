"""A graph convolution on 2, 4 and 8 simulated devices, compiled; two minutes.

Expect: bytes of the formulas, and rounds of permutations that send half of what an
all-gather does (`hpcjax table gnn/bytes`).
"""

import dataclasses

from experiments.gnn.exchanges import Config

base = Config()
missing = dataclasses.replace(base, missing=True, parts=(8,), names=("digits",))
