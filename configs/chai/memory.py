"""Caches that plans of the authors leave, in bytes; seconds.

`seven`, `thirty` and `patch` are the published lists for LLaMA-7B, LLaMA-33B and the
default of the authors' patch; the others are SmolLM2's shapes in the three modes of
shared keys.
Expect: 19.1, 26.5 and 31.6 % of the cache saved (`hpcjax table chai/memory`).
"""

import dataclasses

from experiments.chai.memory import Config

seven = Config()
thirty = dataclasses.replace(
    seven, heads=52, kv_heads=52, layers=(18, 8, 6, 2, 26), clusters=(48, 36, 24, 8, 6)
)
patch = dataclasses.replace(seven, layers=(3, 12, 2, 15), clusters=(28, 18, 8, 4))
expand = dataclasses.replace(
    seven,
    heads=9,
    kv_heads=3,
    head_dim=64,
    layers=(15, 15),
    clusters=(9, 6),
    mode="expand",
)
within_group = dataclasses.replace(expand, mode="within_group")
cross_group = dataclasses.replace(expand, mode="cross_group")
base = seven
