"""A Gaussian process with a Matérn-5/2 kernel, in numpy and scipy; imports no JAX.

References:
  Rasmussen, Williams: Gaussian Processes for Machine Learning, 2006, alg. 2.1, §5.4.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController

from hpcjax.core import checks

_ROOT5 = 5**0.5
_JITTERS = (0.0, *(10.0**k for k in range(-8, 0)))
_CHUNK = 4096
# Log-normal priors on standardised targets and inputs in [0, 1]: medians, and standard
# deviations of the logarithms.
_LENGTH, _VARIANCE, _NOISE = (0.5, 0.75), (1.0, 1.0), (1e-2, 1.0)
_LEAST_NOISE = 1e-6
# Where L-BFGS starts, in standard deviations of the priors of (lengths, noise).
_STARTS = ((0.0, 0.0), (-1.0, 0.0), (1.0, 0.0), (0.0, -2.0))


class Kernel(NamedTuple):
    """k(x, x') = variance · (1 + √5 r + 5/3 r²) exp(−√5 r), r² = Σ (Δx_i / lengths_i)².

    Attributes:
      lengths: `[d]`, one for each dimension.
      variance: of the function.
      noise: variance of what is added to each observation.
    """

    lengths: np.ndarray
    variance: float
    noise: float

    def __call__(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns the covariances `[n, m]` of function values at `[n, d]`, `[m, d]`."""
        r = _ROOT5 * np.sqrt(_squares(a, b, self.lengths).sum(-1))
        return self.variance * (1 + r + r**2 / 3) * np.exp(-r)


class Posterior:
    """A Gaussian process, given observations.

    Attributes:
      kernel: of standardised targets, `(y − offset) / scale`.
      log_likelihood: log p(standardised y | x, kernel).
    """

    def __init__(self, kernel: Kernel, x: np.ndarray, y: np.ndarray) -> None:
        """Conditions on observations.

        Args:
          kernel: of standardised targets.
          x: places, `[n, d]`, float64.
          y: targets, `[n]`.

        Raises:
          ConfigError: shapes that do not fit, no observation, or one not finite.
        """
        x, y = _check(x, y)
        self.kernel, self._x = kernel, x
        self._offset, self._scale = _standard(y)
        targets = (y - self._offset) / self._scale
        self._factor = _cholesky(kernel(x, x) + kernel.noise * np.eye(len(x)))
        self._weights = _solve(self._factor, targets)
        self.log_likelihood = _log_likelihood(self._factor, targets, self._weights)

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean and standard deviation of the function at `[m, d]`, each `[m]`.

        In the units of the targets; the noise of another observation is not included.
        """
        mean, deviation = np.empty(len(x)), np.empty(len(x))
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            cross = self.kernel(self._x, x[part])
            known: Any = solve_triangular(self._factor, cross, lower=True)
            left = self.kernel.variance - (known**2).sum(0)
            mean[part] = cross.T @ self._weights
            deviation[part] = np.sqrt(np.maximum(left, 0.0))
        return self._offset + self._scale * mean, self._scale * deviation


@functools.cache
def _threads() -> ThreadpoolController:
    """Returns what limits the threads of BLAS; it looks through all libraries once."""
    return ThreadpoolController()


def fit(x: np.ndarray, y: np.ndarray) -> Posterior:
    """Returns the process whose kernel has the largest posterior density.

    Log-normal priors of lengths (median 0.5), variance (1) and noise (1e-2, at least
    1e-6) on standardised targets; L-BFGS-B on the analytic gradient from four starts.

    Args:
      x: places in [0, 1], `[n, d]`.
      y: targets, `[n]`.

    Raises:
      ConfigError: shapes that do not fit, no observation, or one not finite.

    Examples:
      >>> x = np.linspace(0, 1, 9)[:, None]
      >>> mean, deviation = fit(x, np.sin(6 * x[:, 0]))(np.array([[0.3]]))
      >>> bool(abs(mean[0] - np.sin(1.8)) < 0.05)
      True
    """
    x, y = _check(x, y)
    offset, scale = _standard(y)
    medians, widths = _priors(x.shape[1])
    squares = _squares(x, x, np.ones(x.shape[1]))
    targets = (y - offset) / scale

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _likelihood_and_gradient(squares, targets, logs)
        far = (logs - medians) / widths
        return 0.5 * (far**2).sum() - value, far / widths - gradient

    bounds = [(m - 6 * w, m + 6 * w) for m, w in zip(medians, widths, strict=True)]
    bounds[-1] = (np.log(_LEAST_NOISE), bounds[-1][1])
    # Matrices are so small that threads of BLAS wait for each other: on a busy machine
    # seven times as long.
    with _threads().limit(limits=1, user_api="blas"):
        found = [
            minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
            for start in _starts(medians, widths)
        ]
    best = min(found, key=lambda each: each.fun)
    return Posterior(_kernel(best.x), x, y)


def _check(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, float), np.asarray(y, float)
    good = x.ndim == 2 and y.shape == x.shape[:1] and y.size > 0
    rule = "observations must be x [n, d] and y [n], n > 0"
    checks.require(good, rule, x=x.shape, y=y.shape)
    finite = bool(np.isfinite(x).all() and np.isfinite(y).all())
    checks.require(finite, "observations must be finite", y=y.tolist())
    return x, y


def _standard(y: np.ndarray) -> tuple[float, float]:
    """Returns offset and scale of the targets; the scale of equal ones is 1."""
    spread = float(y.std())  # of equal ones may be rounding of the mean
    return float(y.mean()), spread if spread > 1e-14 * np.abs(y).max() else 1.0


def _squares(a: np.ndarray, b: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns (Δx_i / lengths_i)², `[n, m, d]`."""
    return ((a[:, None] - b[None]) / lengths) ** 2


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """Returns the lower factor; adds to the diagonal as little as makes one."""
    scale = np.trace(matrix) / len(matrix)
    for jitter in _JITTERS:
        try:
            return np.linalg.cholesky(matrix + jitter * scale * np.eye(len(matrix)))
        except np.linalg.LinAlgError:
            continue
    raise np.linalg.LinAlgError("a covariance is not positive definite")


def _solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    solved: Any = cho_solve((factor, True), right)
    return solved


def _log_likelihood(
    factor: np.ndarray, targets: np.ndarray, weights: np.ndarray
) -> float:
    half = 0.5 * targets @ weights + np.log(np.diag(factor)).sum()
    return float(-half - 0.5 * len(targets) * np.log(2 * np.pi))


def _likelihood_and_gradient(
    squares: np.ndarray, targets: np.ndarray, logs: np.ndarray
) -> tuple[float, np.ndarray]:
    """Returns log p(targets) and its gradient by the logarithms of the parameters.

    With K the covariance, α = K⁻¹ y: ∂ log p / ∂θ = ½ tr((α αᵀ − K⁻¹) ∂K/∂θ). For a
    length, ∂k/∂log ℓ_i = variance · 5/3 (1 + √5 r) exp(−√5 r) · (Δx_i / ℓ_i)².
    """
    lengths, variance, noise = _kernel(logs)
    scaled = squares / lengths**2
    r = _ROOT5 * np.sqrt(scaled.sum(-1))
    decay = variance * np.exp(-r)
    smooth = (1 + r + r**2 / 3) * decay
    factor = _cholesky(smooth + noise * np.eye(len(targets)))
    inverse = _solve(factor, np.eye(len(targets)))
    weights = inverse @ targets
    inner = 0.5 * (np.outer(weights, weights) - inverse)
    by_length = np.einsum("nm,nmd->d", inner * (5 / 3) * (1 + r) * decay, scaled)
    rest = [(inner * smooth).sum(), noise * np.trace(inner)]
    value = _log_likelihood(factor, targets, weights)
    return value, np.append(by_length, rest)


def _kernel(logs: np.ndarray) -> Kernel:
    *lengths, variance, noise = np.exp(logs)
    return Kernel(np.array(lengths), float(variance), float(noise))


def _priors(dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns medians and widths of the parameters' logarithms."""
    medians, widths = zip(*[_LENGTH] * dims, _VARIANCE, _NOISE, strict=True)
    return np.log(medians), np.array(widths)


def _starts(medians: np.ndarray, widths: np.ndarray) -> list[np.ndarray]:
    rows = [[length] * (len(medians) - 2) + [0.0, n] for length, n in _STARTS]
    return [medians + widths * np.array(row) for row in rows]
