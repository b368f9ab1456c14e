"""Points between those of a grid, evenly over time, the sphere and levels."""

import numpy as np
from jaxtyping import Float, Int

from hpcjax.compress.fields._grid import Grid


class PointSampler:
    """Draws points of a scrambled Sobol sequence.

    Times are uniform, places uniform on the sphere: a mean over them is weighted by
    area. All levels come equally often, but for one.
    """

    def __init__(self, grid: Grid, seed: int) -> None:
        """Starts the sequence of a seed."""
        from scipy.stats import qmc

        # As many as 30 bits have would be too few for the paper's 2·10¹⁰.
        self._sequence = qmc.Sobol(3, scramble=True, bits=48, rng=seed)
        self._rng = np.random.default_rng([seed, 1])
        self._span, self._level, self._drawn = len(grid.time) - 1, grid.level, 0

    def draw(
        self, count: int
    ) -> tuple[Float[np.ndarray, "n 4"], Int[np.ndarray, " n"]]:
        """Returns the next points.

        With u of the cube, t = u₀ · (last step), φ = 90° − acos(1 − 2 u₁), λ = 360° u₂.

        Args:
          count: a power of two, or Sobol's points are not even.

        Returns:
          Time in steps, pressure in hPa, latitude and longitude in degrees, float32;
          and the number of each point's level, int32.
        """
        u = self._sequence.random(count)
        latitude = 90 - np.rad2deg(np.arccos(1 - 2 * u[:, 1]))
        turn = (self._drawn + np.arange(count)) % len(self._level)
        level = self._rng.permutation(turn).astype(np.int32)
        self._drawn += count
        columns = (u[:, 0] * self._span, self._level[level], latitude, 360 * u[:, 2])
        return np.stack(columns, axis=1).astype(np.float32), level
