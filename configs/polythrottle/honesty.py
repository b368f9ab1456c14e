"""Whether chosen clocks keep the objective later, and training beside them; minutes.

Expect: 95 % of guarded choices do, fewer without the guard; no training step in the
half of the trace that allows none (`hpcjax table polythrottle/honesty`).
"""

from dataclasses import replace

from configs.polythrottle._devices import ORIN, TX2
from experiments.polythrottle.honesty import Config

tx2 = Config(device=TX2)
orin = replace(tx2, device=ORIN)
base = tx2
