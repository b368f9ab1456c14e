"""The median of few measurements, and how well it is known; imports no JAX."""

import numpy as np

DRAWS = 2000


def median(rows: np.ndarray) -> np.ndarray:
    """Returns the median of each row; infinite when a middle value is.

    Examples:
      >>> median(np.array([[1.0, 3.0], [2.0, np.inf]])).tolist()
      [2.0, inf]
    """
    ordered = np.sort(rows, axis=1)
    count = ordered.shape[1]
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2


def bootstrap_median(
    sample: np.ndarray, *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the median of a 1-D sample.

    scipy's bootstrap makes NaN of infinite values; here what never ended keeps its
    place at the slow end.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    medians = np.sort(median(rng.choice(sample, size=(DRAWS, len(sample)))))
    tail = (1 - confidence) / 2
    last = DRAWS - 1
    return float(medians[int(tail * last)]), float(medians[int((1 - tail) * last)])
