"""Currents through a random junction whose electrons heat its phonons; seconds.

Expect: what comes in goes out to 1e-8 of the current, and phonons carry away all energy
that electrons lose (`hpcjax table omen/conservation`).
"""

from experiments.omen.transport import Config
from hpcjax.solvers import JunctionConfig

base = Config()
equilibrium = Config(feedback=False)
ballistic = Config(scattering=False)
three = Config(device=JunctionConfig(momenta=(3, 3)))
four = Config(device=JunctionConfig(momenta=(4, 2)))
swapped = Config(broken="swapped")
transposed = Config(broken="transposed")
spin = Config(broken="spin")
between = Config(broken="between")
