"""Five functions as graphs, maps fused: words, times and results; two minutes.

Expect: 9 of 13, 9 of 15 and 12 of 54 words are left (`hpcjax table sdfg/movement`).
"""

from experiments.sdfg.movement import Config

base = Config()
