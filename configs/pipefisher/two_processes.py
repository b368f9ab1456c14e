"""K-FAC in the bubbles of a GPipe of two processes, one on each core; 2 min.

Expect: at least 15 points more of the time computed, in steps at most 1.2 times as long
(`hpcjax table pipefisher/two-processes`).
"""

from experiments.pipefisher.two_processes import Config

base = Config()
