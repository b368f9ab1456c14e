"""What a transformer's block sends on every grid of row times col devices; 5 s a grid.

The devices are simulated.
Expect: the words of the formula and of the norms' moments,
to the byte, and the least on the grid that `cost.best_grid` names (`hpcjax table
tensor3d/grids`).
"""

from experiments.tensor3d.grids import Config

base = Config()
marked = Config(broken="marked")
