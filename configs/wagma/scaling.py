"""Throughput of up to 1024 processes, one of them late, by the event model; 10 s.

Expect: allreduce pays the delay in every step, WAGMA about once in tau steps
(`hpcjax table wagma/scaling --tier model`).
"""

from experiments.wagma.scaling import Config

base = Config()
