"""Eight processes that sleep in their steps, one of them longer; 3 min on 2 cores.

Expect: with one random process 200 ms late, WAGMA takes at most two thirds of
allreduce's time, and less than groups that wait (`hpcjax table wagma/throughput`).
"""

from experiments.wagma.throughput import Config

base = Config()
