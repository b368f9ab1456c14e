"""Medians of small samples with bootstrap intervals; imports no JAX.

A run that never reached its target enters a sample as infinity.
"""

import numpy as np

DRAWS = 2000


def median(rows: np.ndarray) -> np.ndarray:
    """Returns the median of each row; infinite when a middle value is, NaN when any is.

    Examples:
      >>> median(np.array([[1.0, 3.0], [2.0, np.inf]])).tolist()
      [2.0, inf]
    """
    ordered = np.sort(rows, axis=1)
    count = ordered.shape[1]
    middle = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
    # Sorted last, a NaN would pass for the largest value.
    return np.where(np.isnan(ordered[:, -1]), np.nan, middle)


def bootstrap_median(
    sample: np.ndarray, *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the median of a 1-D sample.

    scipy's bootstrap returns NaN if the sample holds infinities; here they sort after
    every finite value, so that an end of the interval may itself be infinite.

    Args:
      sample: `[count]`.
      confidence: share of the resampled medians inside the interval.
      seed: of the resampling.

    Returns:
      The lower and upper end; NaN if a value is.
    """
    if np.isnan(sample).any():
        return np.nan, np.nan
    rng = np.random.Generator(np.random.Philox(seed))
    medians = np.sort(median(rng.choice(sample, size=(DRAWS, len(sample)))))
    tail = (1 - confidence) / 2
    # Order statistics, not interpolated quantiles: inf - inf would be NaN.
    last = DRAWS - 1
    return float(medians[int(tail * last)]), float(medians[int((1 - tail) * last)])
