"""How near 15 trials come to the least energy, on two simulated devices; minutes.

Expect: within 5 % of the optimum in nine of ten searches, and in one of five with
random points (`hpcjax table polythrottle/convergence`).
"""

from dataclasses import replace

from configs.polythrottle._devices import ORIN, TX2
from experiments.polythrottle.convergence import Config

tx2 = Config(device=TX2)
orin = replace(tx2, device=ORIN)
tx2_scaled = replace(tx2, scaled=True, draws=2)
orin_scaled = replace(orin, scaled=True, draws=2)
base = tx2
