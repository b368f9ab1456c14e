"""A round of eight processes that arrive 1 ms after each other; 1 min on 2 cores.

Expect: on average a worker waits least in solo rounds and longest in synchronous ones,
with messages of up to 16 KiB (`hpcjax table eager/latency`).
"""

from experiments.eager.latency import Config

base = Config()
