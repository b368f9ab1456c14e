"""What a measurement is worth: constrained expected improvement.

References:
  Gardner et al.: Bayesian Optimization with Inequality Constraints, ICML 2014.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from hpcjax.bo.gaussian_process import fit

Bounds = Mapping[str, float]


class Observations(NamedTuple):
    """What has been measured at n places.

    Attributes:
      x: places in [0, 1], `[n, d]`.
      value: what is to be least, `[n]`.
      bounded: what must stay within bounds, `[n]` each.
      bounds: the largest allowed value of each.
    """

    x: np.ndarray
    value: np.ndarray
    bounded: Mapping[str, np.ndarray]
    bounds: Bounds

    @property
    def feasible(self) -> np.ndarray:
        """Whether each place was measured within all bounds, `[n]`."""
        within = np.ones(len(self.x), bool)
        for name, bound in self.bounds.items():
            within &= self.bounded[name] <= bound
        return within


Acquisition = Callable[[Observations, np.ndarray], np.ndarray]


def constrained_improvement(seen: Observations, x: np.ndarray) -> np.ndarray:
    """Returns EI(x) · Π Pr[constraint holds at x], `[m]`, in units of the value.

    EI is over the best feasible value y⁺: (y⁺ − μ) Φ(z) + σ φ(z), z = (y⁺ − μ) / σ.
    While nothing feasible has been seen, it is the probability alone.

    Args:
      seen: at least one observation.
      x: places, `[m, d]`.
    """
    likely = np.ones(len(x))
    for name, bound in seen.bounds.items():
        mean, deviation = fit(seen.x, seen.bounded[name])(x)
        likely *= ndtr((bound - mean) / np.maximum(deviation, 1e-300))
    if not seen.feasible.any():
        return likely
    return likely * _over_best(seen, x)


def unconstrained_improvement(seen: Observations, x: np.ndarray) -> np.ndarray:
    """Returns EI(x) over the best feasible value, as if no place broke a constraint."""
    return _over_best(seen, x) if seen.feasible.any() else np.ones(len(x))


def _over_best(seen: Observations, x: np.ndarray) -> np.ndarray:
    mean, deviation = fit(seen.x, seen.value)(x)
    return expected_improvement(mean, deviation, seen.value[seen.feasible].min())


def expected_improvement(
    mean: np.ndarray, deviation: np.ndarray, best: float
) -> np.ndarray:
    """Returns E[max(0, best − Y)] of normal Y, at least 0."""
    gain, spread = best - mean, np.maximum(deviation, 1e-300)
    z = gain / spread
    return np.maximum(gain * ndtr(z) + spread * _density(z), 0.0)


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
