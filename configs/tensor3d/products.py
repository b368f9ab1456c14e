"""A layer on a square or a cube of devices, as Optimus and Colossal-AI do; seconds.

The devices are simulated.
Expect: the words of the formula, two to four times those of
Tensor3D (`hpcjax table tensor3d/grids`).
"""

from experiments.tensor3d.products import Config

base = Config()
cube = Config(scheme="colossal3d")
