"""Clocks and batch of the least energy within a latency objective; seconds.

Expect: BERT on the TX2-like device saves more than 20 % of its energy a query within
1.5 times the latency at the greatest clocks (`hpcjax run polythrottle/tune`).
"""

from dataclasses import replace

from configs.polythrottle._devices import ORIN, TX2
from experiments.polythrottle.tune import Config

tx2 = Config(device=TX2)
orin = replace(tx2, device=ORIN)
base = tx2
