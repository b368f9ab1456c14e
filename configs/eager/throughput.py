"""Eight processes that sleep in their steps, one of them longer; 1 min on 2 cores.

Expect: with one random process 200 ms late, solo takes less than half of sync's time
and majority less than 0.7 of it, as the event model foretells (`hpcjax table
eager/throughput`).
"""

from experiments.eager.throughput import Config

base = Config()
