"""Throughput of up to 1024 processes, one of them late, by the event model; 5 s.

Expect: sync pays the delay in every step, majority in about half of them, solo rarely
(`hpcjax table eager/scaling --tier model`).
"""

from experiments.eager.scaling import Config

base = Config()
