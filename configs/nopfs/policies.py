"""Readers of input, simulated with memory for all data, for some and for little; 20 s.

Expect: where links are slow, keeping what is read most is the fastest; where they are
fast, keeping what is read first (`hpcjax table nopfs/policies`).
"""

from dataclasses import replace

from experiments.nopfs.policies import Config

base = Config(network_rate=8e6)
fast = Config()
ram = replace(fast, ram=1.2)
ssd = replace(fast, ssd=1.0)
workers = replace(fast, ram=0.05, ssd=0.25)
little = replace(fast, ram=0.02, ssd=0.08)
