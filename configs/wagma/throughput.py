"""Eight processes that sleep in their steps, one of them longer; 3 min on 2 cores.

Expect: with one random process 200 ms late, WAGMA takes at most two thirds of
allreduce's time, and less than groups that wait (`hpcjax table wagma/throughput`).
"""

from experiments.wagma.throughput import Config

base = Config()
smoke = {
    "processes": "2",
    "group_size": "2",
    "tau": "2",
    "steps": "3",
    "warm_up": "1",
    "base": "0.001",
    "delay": "0.005",
    "numbers": "100",
    "repetitions": "1",
}
