"""Fits of non-negative unit costs to measured totals; imports no JAX."""

import numpy as np


def fit_costs(
    counts: np.ndarray, measured: np.ndarray, ridge: np.ndarray | float = 0.0
) -> np.ndarray:
    """Returns the non-negative costs with the least squared relative errors.

    Minimizes Σ ((counts @ costs) / measured − 1)² + Σ ridge · (scale · costs)², with
    the largest count of a cost, over the mean of what was measured, as its scale. With
    absolute errors the largest measurements would decide alone, and small costs would
    be fitted to their noise.

    Args:
      counts: `[measurements, costs]`, at least 0; how often each cost was incurred.
      measured: the measured totals, `[measurements]`, positive.
      ridge: penalty of each cost, `[costs]` or the same of all.

    Examples:
      >>> counts = np.array([[1.0, 0.0], [1.0, 1000.0]])
      >>> fit_costs(counts, np.array([0.5, 2.5])).round(6).tolist()
      [0.5, 0.002]
    """
    from scipy.optimize import nnls

    # Columns differ by orders of magnitude (bytes against messages), which would spoil
    # the condition of the problem: each is scaled to a largest entry of one.
    scale = np.where(counts.any(0), counts.max(0), 1.0)
    rows, ones = counts / scale / measured[:, None], np.ones(len(measured))
    if np.any(ridge):
        penalty = np.sqrt(np.broadcast_to(ridge, len(scale))) / measured.mean()
        rows = np.vstack([rows, np.diag(penalty)])
        ones = np.append(ones, np.zeros(len(scale)))
    scaled, _ = nnls(rows, ones)
    return scaled / scale
