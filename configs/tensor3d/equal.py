"""A small language model trained on every grid of eight devices; 2 min.

The devices are simulated.
Expect: parameters within 10⁻⁶ of those of one device
(`hpcjax table tensor3d/grids`).
"""

from experiments.tensor3d.equal import Config

base = Config()
broken = Config(broken=True, devices=2)
