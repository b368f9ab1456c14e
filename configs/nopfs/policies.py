"""Readers of input, simulated with memory for all data, for some and for little; 20 s.

Expect: clairvoyant reading is as fast as any that shuffles all data, and faster than
reading ahead where no memory holds the data (`hpcjax table nopfs/policies`).
"""

from experiments.nopfs.policies import Config

base = Config()
