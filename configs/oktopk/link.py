"""Dense, TopkA and Ok-Topk between 4 processes at 100 Mbit/s each; 2 min on 2 cores.

Expect: Ok-Topk takes at most a fifth of the dense exchange's time and 1/1.3 of TopkA's,
selection included (`oktopk/throughput`).
"""

from experiments.oktopk.link import Config

base = Config()
