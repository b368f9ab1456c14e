"""ResNet-8 on digits with the weights of a narrower network; 20 s a run on 2 cores.

`:shared` makes all kernels from one store; `:unshared` has its own.
Expect: with a quarter of the weights within 2 points of the unshared network's
accuracy, and with 1.7 % above a narrow network of as many (`hpcjax table ssn/budgets`).
"""

import dataclasses

from experiments.ssn.digits import Config
from hpcjax.compress import SharingConfig

unshared = Config()
shared = dataclasses.replace(unshared, sharing=SharingConfig(budget=0.25))
base = shared
