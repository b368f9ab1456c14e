"""A small network on digits, eight workers, 300 steps; 5 s on 2 cores.

Expect: WAGMA's accuracy is within one point of allreduce's, mean of three seeds
(`hpcjax table wagma/accuracy`).
"""

from experiments.wagma.digits import Config

base = Config()
smoke = {
    "workers": "4",
    "group_size": "2",
    "steps": "4",
    "batch": "2",
    "widths": "[4]",
    "tau": "2",
}
