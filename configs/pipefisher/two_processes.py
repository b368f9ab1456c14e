"""K-FAC in the bubbles of a GPipe of two processes, one on each core; 2 min.

Expect: at least 15 points more of the time computed, in steps at most 1.2 times as long
(`hpcjax table pipefisher/two-processes`).
"""

from experiments.pipefisher.two_processes import Config

base = Config()
smoke = {
    "width": "16",
    "layers": "2",
    "rows": "32",
    "steps": "2",
    "warmup": "1",
    "runs": "2",
    "repetitions": "3",
}
