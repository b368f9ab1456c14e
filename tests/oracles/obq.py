"""OBQ with a fixed order, in numpy: the slow method that GPTQ computes."""

import numpy as np


def fit(rows, bits, symmetric=False, reference=False, mse=False, ternary=False):
    """The values that a grid has for `rows` [inputs, outputs]: [values, outputs]."""
    low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
    if symmetric:
        far = np.maximum(-low, high)
        low = np.zeros_like(far) if reference else -far
        if reference:
            low[(rows < 0).any(0)] = -far[(rows < 0).any(0)]
        high = far
    none = (low == 0) & (high == 0)
    low, high = np.where(none, -1, low), np.where(none, 1, high)
    if ternary:
        return np.stack([low, np.zeros_like(low), high])
    tried = [1 - step / 100 for step in range(80 if mse else 1)]
    grids = np.stack([_even(s * low, s * high, bits, symmetric) for s in tried])
    off = [np.abs(nearest(rows, grid)[1] - rows) ** 2.4 for grid in grids]
    best = np.argmin(np.sum(off, axis=1), axis=0)
    return np.take_along_axis(grids, best[None, None], axis=0)[0]


def _even(low, high, bits, symmetric):
    """2^bits values with equal steps, [values, outputs]; zero is one of them."""
    step = (high - low) / (2**bits - 1)
    below = np.full_like(step, 2 ** (bits - 1)) if symmetric else np.round(-low / step)
    return (np.arange(2**bits)[:, None] - below) * step


def nearest(rows, values):
    """Integers and values of weights [..., outputs] on a grid of `fit`."""
    found = np.argmin(np.abs(rows[..., None, :] - values), axis=-2)
    return found, values[found, np.arange(values.shape[1])]


def obq(
    kernel,
    hessian,
    bits,
    *,
    group=None,
    order=None,
    static=False,
    damping=0.01,
    taken=None,
    **grid,
):
    """Quantizes input after input by eliminating each from the full inverse Hessian.

    With the values `taken` [inputs, outputs] of another, each input is eliminated with
    the error that those leave: what is returned is then the choice at each input after
    the other's choices before it, and a near tie that fell otherwise has no successors.

    Returns integers [inputs, outputs], the values, and the damped Hessian.
    """
    inputs = len(kernel)
    weights, hessian = kernel.astype(np.float64), hessian.astype(np.float64)
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    order = np.arange(inputs) if order is None else order
    hessian = hessian + damping * np.mean(np.diag(hessian)) * np.eye(inputs)
    size = group or inputs
    # Before dead inputs are dropped.
    start = [
        fit(weights[at : at + size], bits, **grid) for at in range(0, inputs, size)
    ]
    weights[dead] = 0
    inverse = np.linalg.inv(hessian)
    integers, values = np.zeros_like(weights), np.zeros_like(weights)
    for place, i in enumerate(order):
        if group is None or static:
            now = start[i // size]
        elif place % size == 0:
            now = fit(weights[order[place : place + size]], bits, **grid)
        integers[i], values[i] = nearest(weights[i], now)
        left = values[i] if taken is None else taken[i]
        error = (weights[i] - left) / inverse[i, i]
        weights -= inverse[:, i : i + 1] * error
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        # What is done takes part in nothing any more.
        inverse[i, :], inverse[:, i] = 0, 0
    return integers.astype(np.uint8), values, hessian
