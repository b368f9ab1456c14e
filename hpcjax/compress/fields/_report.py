"""How far a compressed field is from what it was."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from hpcjax import metrics


class Report(NamedTuple):
    """Errors over all points, in the field's unit.

    Attributes:
      wrmse: root of the mean square, weighted by cos φ.
      wmae: mean of the sizes, weighted likewise.
      largest: the largest size.
    """

    wrmse: float
    wmae: float
    largest: float


def score(
    decoded: Float[np.ndarray, "... y x"],
    truth: Float[np.ndarray, "... y x"],
    latitude: Float[np.ndarray, " y"],
) -> Report:
    """Returns the errors of a field; sums are float64.

    Raises:
      ValueError: shapes differ.

    Examples:
      >>> score(np.zeros((2, 1)), np.array([[3.0], [-4.0]]), np.array([60.0, -60.0]))
      Report(wrmse=3.5355339059327378, wmae=3.5, largest=4.0)
    """
    if decoded.shape != truth.shape:
        raise ValueError(f"shapes must agree: got {decoded.shape} and {truth.shape}")
    error = decoded.astype(np.float64) - truth
    weights = metrics.latitude_weights(latitude, "cos")[:, None]
    return Report(
        wrmse=float(np.sqrt((weights * error**2).mean())),
        wmae=float((weights * np.abs(error)).mean()),
        largest=float(np.abs(error).max()),
    )
