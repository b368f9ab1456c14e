"""What training beside inference does to its latency, and when it may run there.

References:
  Yan, Wang, Venkataraman: PolyThrottle, arXiv 2310.19991, §6.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.least_squares import fit_costs

FEATURES = ("flops", "intensity", "train_flops", "train_intensity")
_LEAST_SAMPLES = 10


class Sample(NamedTuple):
    """A measured latency, and what ran.

    Attributes:
      flops: of a batch of inference.
      intensity: FLOPs for each byte it moves.
      train_flops: of a training step beside it, 0 without one.
      train_intensity: FLOPs for each of its bytes, 0 without one.
      seconds: latency of the batch.
    """

    flops: float
    intensity: float
    train_flops: float
    train_intensity: float
    seconds: float


class Interference(NamedTuple):
    """L = w₀ + w₁ flops + w₂ intensity + w₃ train_flops + w₄ train_intensity.

    Features are correlated, so that single weights are poorly determined: what counts
    is the error of predictions.

    Attributes:
      weights: `[5]`, at least 0; the first is the fixed overhead in seconds.
      residual: standard deviation of relative errors, by the samples' own fit.
      left_out: the same, each sample predicted from a fit of the others.
      errors: standard errors of the weights, `[5]`, as if none were at 0.
    """

    weights: np.ndarray
    residual: float
    left_out: float
    errors: np.ndarray

    def predict(
        self,
        flops: float,
        intensity: float,
        train_flops: float = 0.0,
        train_intensity: float = 0.0,
    ) -> float:
        """Returns the latency in seconds; without training beside it by default."""
        row = (1.0, flops, intensity, train_flops, train_intensity)
        return float(np.dot(row, self.weights))

    def cautious(self, *features: float, margin: float = 1.0) -> float:
        """Returns the prediction and as many standard deviations of its residual."""
        return self.predict(*features) * (1 + margin * self.residual)


def fit_interference(samples: Sequence[Sample], *, ridge: float = 1e-3) -> Interference:
    """Fits the latency of inference with and without training beside it.

    Non-negative least squares of relative errors; the intercept is not penalised.

    Args:
      samples: at least 10, at one setting of clocks.
      ridge: penalty of a weight, whose column is scaled to a largest entry of 1.

    Raises:
      ConfigError: too few samples, or a number that is not finite and at least 0.
    """
    count = len(samples)
    rule = f"a fit needs {_LEAST_SAMPLES} samples"
    checks.require(count >= _LEAST_SAMPLES, rule, samples=count)
    table = np.array(samples, float)
    good = bool(np.isfinite(table).all() and table.min() >= 0 and table[:, -1].all())
    checks.require(good, "samples must be finite and >= 0, and take time", good=good)
    rows = np.column_stack([np.ones(count), table[:, :-1]])
    seconds = table[:, -1]
    penalty = ridge * np.array([0.0, *np.ones(len(FEATURES))])
    weights = fit_costs(rows, seconds, penalty)
    errors = rows @ weights / seconds - 1
    left_out = []
    for n in range(count):
        kept = np.arange(count) != n
        other = fit_costs(rows[kept], seconds[kept], penalty)
        left_out.append(rows[n] @ other / seconds[n] - 1)
    variance = (errors**2).sum() / max(count - rows.shape[1], 1)
    # Columns differ by ten orders of magnitude, more than a pseudo-inverse keeps.
    relative = rows / seconds[:, None]
    scale = np.where(relative.any(0), relative.max(0), 1.0)
    inverse = np.linalg.pinv((relative / scale).T @ (relative / scale))
    return Interference(
        weights=weights,
        residual=float(np.sqrt(variance)),
        left_out=float(np.sqrt(np.mean(np.square(left_out)))),
        errors=np.sqrt(variance * np.diag(inverse).clip(0)) / scale,
    )


class Trace(NamedTuple):
    """What was served, in the order of arrival.

    Attributes:
      starts: seconds at which each query was started.
      latencies: seconds from its arrival to its end.
      admitted: whether a training step ran beside each query.
    """

    starts: np.ndarray
    latencies: np.ndarray
    admitted: np.ndarray


def simulate_trace(
    arrivals: Sequence[float],
    admit: Callable[[float], bool],
    serve: Callable[[bool], float],
) -> Trace:
    """Serves queries one after the other, the next once the last has ended.

    A training step that is admitted runs beside one query: the processor has no
    partitions, so that it can be asked for anew only then.

    Args:
      arrivals: seconds, ascending.
      admit: whether a step may run beside the query that starts at a time.
      serve: seconds that a query takes, with a step beside it or without.

    Raises:
      ConfigError: arrivals that do not ascend.
    """
    ascending = bool(np.all(np.diff(arrivals) >= 0))
    checks.require(ascending, "arrivals must ascend", ascending=ascending)
    free, rows = 0.0, []
    for arrival in arrivals:
        start = max(arrival, free)
        beside = admit(start)
        free = start + serve(beside)
        rows.append((start, free - arrival, beside))
    starts, latencies, admitted = np.array(rows, float).reshape(-1, 3).T
    return Trace(starts, latencies, admitted.astype(bool))
