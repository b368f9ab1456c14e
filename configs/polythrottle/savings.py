"""Energy that the best clocks save, by network and batch, on two devices; seconds.

Expect: 10 % or more at a fixed batch, and 28 % or more for most networks with the batch
chosen, too (`hpcjax table polythrottle/savings`).
"""

from dataclasses import replace

from configs.polythrottle._devices import ORIN, TX2
from experiments.polythrottle.savings import Config

tx2 = Config(device=TX2)
orin = replace(tx2, device=ORIN)
base = tx2
