"""What a few members tell of the deviation of many, of Gaussian ones."""

import math
from typing import Literal

import numpy as np

from hpcjax.core import checks


def spread_factor(
    k: int, m: int, of: Literal["variance", "deviation"] = "variance"
) -> float:
    """Returns what turns the deviation of k members into one that m would have.

    Deviations divide by the number of members. √(k (m − 1) / (m (k − 1))) makes the
    variance right in the mean, and c₄(m) √((m − 1) / m) / (c₄(k) √((k − 1) / k)) the
    deviation of Gaussian members.

    Raises:
      ConfigError: fewer than two members.

    Examples:
      >>> round(spread_factor(5, 10), 4), round(spread_factor(5, 10, "deviation"), 4)
      (1.0607, 1.0975)
    """
    checks.require_count(2, k=k, m=m)
    checks.require_choice("of", of, ("variance", "deviation"))
    if of == "variance":
        return math.sqrt(k * (m - 1) / (m * (k - 1)))
    return _mean_deviation(m) / _mean_deviation(k)


def _mean_deviation(n: int) -> float:
    """Returns c₄(n) √((n − 1) / n) = √(2 / n) Γ(n / 2) / Γ((n − 1) / 2)."""
    return math.sqrt(2 / n) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))


def spread_floor(
    k: int, m: int, *, nested: bool = True, draws: int = 200_000, seed: int = 0
) -> float:
    """Returns the least RMSE of a deviation of m members, in that of all there are.

    Members are drawn again and again, Gaussian of deviation 1. What predicts knows this
    and the deviation of k members; the mean of that of m is taken from a cubic in it.

    Args:
      k: members that are known.
      m: members whose deviation is predicted.
      nested: whether the first of these are those that are known.
      draws: of ensembles.
      seed: of the draws.
    """
    checks.require_count(2, k=k, m=m)
    rng = np.random.default_rng(seed)
    members = rng.standard_normal((draws, max(k, m)), dtype=np.float32)
    target = members[:, :m].std(1, dtype=np.float64)
    if not nested:
        return float(target.std())
    known = members[:, :k].std(1, dtype=np.float64)
    fitted = np.polynomial.Polynomial.fit(known, target, 3)(known)
    return float(np.sqrt(np.mean((target - fitted) ** 2)))
