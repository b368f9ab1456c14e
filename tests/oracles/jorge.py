"""Jorge, exact Shampoo and SGD in float64 numpy, written from the formulas."""

import numpy as np

TINY = 1e-30  # ν below which a factor stays as it is
COEFFICIENTS = (-1 / 4, 5 / 32, -15 / 128)


def problem(seed: int, steps: int, shape: tuple[int, int] = (16, 24)) -> np.ndarray:
    """Gradients C_L^(1/2) Z C_R^(1/2), spectra log-spaced 1…0.01, `[steps, m, n]`."""
    rng = np.random.default_rng(seed)

    def half(size: int) -> np.ndarray:
        basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
        return basis * np.sqrt(np.geomspace(1, 0.01, size)) @ basis.T

    left, right = half(shape[0]), half(shape[1])
    return left @ rng.normal(size=(steps, *shape)) @ right


def guard(matrix: np.ndarray, eps: float, max_gain: float | None) -> np.ndarray:
    """Scales row i by min(1, c·ε^(−1/4)·min_j‖L̂_j‖/‖L̂_i‖)."""
    if max_gain is None:
        return matrix
    rows = np.linalg.norm(matrix, axis=1)
    return np.minimum(1, max_gain * eps**-0.25 * rows.min() / rows)[:, None] * matrix


def factor_step(
    root: np.ndarray,
    gradient: np.ndarray,
    order: int = 2,
    beta2: float | None = None,
    eps: float = 1e-6,
    max_gain: float | None = 1.0,
    symmetrize: bool = False,
) -> tuple[np.ndarray, float, float]:
    """Returns (L̂, ν, β₂) after one update; `beta2=None` is the dynamic one."""
    x = np.linalg.matrix_power(root, 4) @ gradient @ gradient.T
    nu = float(np.sqrt((x**2).sum()))
    used = nu / (nu + 1) if beta2 is None else beta2
    y = x / nu if beta2 is None else (1 - used) / used * x
    series = np.eye(len(root))
    for power, coefficient in enumerate(COEFFICIENTS[:order], start=1):
        series = series + coefficient * np.linalg.matrix_power(y, power)
    new = guard(used**-0.25 * root @ series, eps, max_gain)
    return ((new + new.T) / 2 if symmetrize else new), nu, used


def factor(gradients: np.ndarray, init: str = "eps", eps: float = 1e-6) -> np.ndarray:
    """L̂ after an update for each of the gradients that are not too small for one."""
    size = gradients.shape[1]
    root = eps**-0.25 * np.eye(size) if init == "eps" else None
    for gradient in gradients:
        mean = np.sum(gradient**2) / size
        if root is None and mean >= TINY:
            root = mean**-0.25 * np.eye(size)
        if root is not None:
            x = np.linalg.matrix_power(root, 4) @ gradient @ gradient.T
            if np.linalg.norm(x) >= TINY:
                root, _, _ = factor_step(root, gradient, eps=eps)
    return eps**-0.25 * np.eye(size) if root is None else root


def inverse_root(matrix: np.ndarray, power: float = 4) -> np.ndarray:
    """A^(−1/p) of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * values ** (-1 / power) @ vectors.T


def exact_shampoo(
    gradients: np.ndarray, left: np.ndarray, right: np.ndarray, eps: float = 1e-6
) -> np.ndarray:
    """L^(−1/4)GR^(−1/4) at each step, averaging with the given β₂ sequences."""
    rows, columns = gradients.shape[1:]
    stats = [eps * np.eye(rows), eps * np.eye(columns)]
    found = []
    for g, a, b in zip(gradients, left, right, strict=True):
        stats[0] = a * stats[0] + (1 - a) * g @ g.T
        stats[1] = b * stats[1] + (1 - b) * g.T @ g
        found.append(inverse_root(stats[0]) @ g @ inverse_root(stats[1]))
    return np.stack(found)


def shampoo(
    gradients: np.ndarray, damping: str, b2: float, eps: float = 1e-6
) -> np.ndarray:
    """L^(−1/4)GR^(−1/4) with new roots at each step.

    A statistic that float32 cannot hold is not taken.
    """
    stats = [eps * np.eye(size) for size in gradients.shape[1:]]
    found = []
    for g in gradients:
        for side, square in enumerate((g @ g.T, g.T @ g)):
            new = b2 * stats[side] + (1 - b2) * square
            if np.abs(square).max() <= np.finfo(np.float32).max:
                stats[side] = new
        left, right = (_damped_root(stat, damping, eps) for stat in stats)
        found.append(left @ g @ right)
    return np.stack(found)


def _damped_root(matrix: np.ndarray, damping: str, eps: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    least = eps * values[-1]
    values = values + least if damping == "ridge" else np.maximum(values, least)
    return vectors * values**-0.25 @ vectors.T


def hard_gradients() -> dict[str, np.ndarray]:
    """Five gradients of each degenerate kind, `[5, m, n]`, that float32 holds exactly.

    Zero, of one entry, singular, of low rank, of scales that float32 cannot square.
    """
    rng = np.random.default_rng(0)
    full, (left, right) = rng.normal(size=(5, 4, 6)), rng.normal(size=(2, 5, 6, 2))
    thin = left[:, :4] @ right.transpose(0, 2, 1)
    kinds = {
        "zero": 0 * full,
        "one entry": full[:, :1, :1],
        "one entry, zero": 0 * full[:, :1, :1],
        "one entry, huge": 1e20 * full[:, :1, :1],
        "a row of zeros": full * [[1], [1], [0], [1]],
        "rank 1": left[:, :4, :1] * right[:, None, :, 0],
        "rank 2 of 4": thin,
        "rank 2, huge": 1e20 * thin,
        "tiny": 1e-20 * full,
        "huge": 1e20 * full,
        "rows apart": full * [[1e-6], [1e6], [1], [1e-10]],
    }
    return {name: g.astype(np.float32).astype(float) for name, g in kinds.items()}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of the angle between two arrays."""
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


class Jorge:
    """The whole optimizer for one matrix, with SGD grafting and decoupled decay."""

    def __init__(self, shape, lr, weight_decay, momentum=0.9, eps=1e-6, init="eps"):
        rows, columns = shape
        self.left = eps**-0.25 * np.eye(rows)
        self.right = eps**-0.25 * np.eye(columns)
        self.fresh = init == "grad"
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        self.m, self.buffer = np.zeros(shape), np.zeros(shape)

    def step(self, params: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Returns the new parameters."""
        if self.fresh:
            mean = np.sum(g**2)
            self.left = (mean / len(self.left)) ** -0.25 * np.eye(len(self.left))
            self.right = (mean / len(self.right)) ** -0.25 * np.eye(len(self.right))
            self.fresh = False
        self.left, _, _ = factor_step(self.left, g)
        self.right, _, _ = factor_step(self.right, g.T)
        preconditioned = self.left @ g @ self.right
        self.m = self.momentum * self.m + (1 - self.momentum) * preconditioned
        self.buffer = self.momentum * self.buffer + g
        size = np.linalg.norm(self.buffer) / np.linalg.norm(self.m)
        return params - self.lr * (size * self.m + self.weight_decay * params)


def sgd(params, gradients, lr, momentum, nesterov, weight_decay) -> np.ndarray:
    """PyTorch's SGD over a given sequence of gradients."""
    buffer = np.zeros_like(params)
    for gradient in gradients:
        g = gradient + weight_decay * params
        buffer = momentum * buffer + g
        params = params - lr * (g + momentum * buffer if nesterov else buffer)
    return params
