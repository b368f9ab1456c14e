"""OBQ with a fixed order, in numpy: the slow method that GPTQ computes."""

import numpy as np


def fit(rows, bits, symmetric=False):
    """Scale and zero of each output of `rows` [inputs, outputs]."""
    low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    none = (low == 0) & (high == 0)
    low, high = np.where(none, -1, low), np.where(none, 1, high)
    scale = (high - low) / (2**bits - 1)
    zero = np.full_like(scale, 2 ** (bits - 1)) if symmetric else np.round(-low / scale)
    return scale, zero


def quantize(row, scale, zero, bits):
    """Integers and values of one input's weights."""
    q = np.clip(np.round(row / scale) + zero, 0, 2**bits - 1)
    return q, scale * (q - zero)


def obq(kernel, hessian, bits, *, group=None, order=None, static=False, damping=0.01):
    """Quantizes input after input by eliminating each from the full inverse Hessian.

    Returns integers [inputs, outputs], the values, and the damped Hessian.
    """
    inputs = len(kernel)
    weights, hessian = kernel.astype(np.float64), hessian.astype(np.float64)
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    order = np.arange(inputs) if order is None else order
    hessian = hessian + damping * np.mean(np.diag(hessian)) * np.eye(inputs)
    size = group or inputs
    start = {
        g: fit(weights[g * size : (g + 1) * size], bits) for g in range(inputs // size)
    }
    row_grid = fit(weights, bits)
    weights[dead] = 0
    inverse = np.linalg.inv(hessian)
    integers, values = np.zeros_like(weights), np.zeros_like(weights)
    left = list(order)
    for place, i in enumerate(order):
        if group is None:
            grid = row_grid
        elif static:
            grid = start[i // size]
        elif place % size == 0:
            grid = fit(weights[order[place : place + size]], bits)
        integers[i], values[i] = quantize(weights[i], *grid, bits)
        error = (weights[i] - values[i]) / inverse[i, i]
        weights -= inverse[:, i : i + 1] * error
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        left.remove(i)
        # What is done takes part in nothing any more.
        inverse[i, :], inverse[:, i] = 0, 0
    return integers.astype(np.uint8), values, hessian
