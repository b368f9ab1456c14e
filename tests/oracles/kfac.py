"""K-FAC in numpy float64 loops: explicit patches, dense Kronecker solves."""

import math

import numpy as np


def dense_factors(x, g, use_bias):
    """A and G as means over rows, one outer product at a time."""
    rows, slopes = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    a = g_factor = 0.0
    for row, slope in zip(rows, slopes, strict=True):
        wide = np.append(row, 1.0) if use_bias else row
        a = a + np.outer(wide, wide) / len(rows)
        g_factor = g_factor + np.outer(slope, slope) / len(rows)
    return a, g_factor


def patch(image, top, left, kernel, dilation):
    """The values under a kernel whose upper left tap is at (top, left)."""
    values = []
    for u in range(kernel[0]):
        for v in range(kernel[1]):
            i, j = top + u * dilation, left + v * dilation
            inside = 0 <= i < image.shape[0] and 0 <= j < image.shape[1]
            values.append(image[i, j] if inside else np.zeros(image.shape[2]))
    return np.concatenate(values)


def conv_factors(x, g, kernel, stride, padding, dilation, use_bias, reference):
    """KFC's Ω and Γ, or the reference's A and G, position by position.

    padding: (top, left) zeros before the image.
    """
    examples, (height, width) = len(x), g.shape[1:3]
    positions = height * width
    a = g_factor = 0.0
    for n in range(examples):
        for i in range(height):
            for j in range(width):
                top, left = i * stride - padding[0], j * stride - padding[1]
                row = patch(x[n], top, left, kernel, dilation)
                row = np.append(row, 1.0) if use_bias else row
                slope = g[n, i, j]
                if reference:
                    row, slope = row / positions, slope / positions
                    a = a + np.outer(row, row) / (examples * positions)
                else:
                    a = a + np.outer(row, row) / examples
                outer = np.outer(slope, slope)
                g_factor = g_factor + outer / (examples * positions)
    return a, g_factor


def solve_kronecker(a, g, gradient, damping):
    """(A⊗G + γI)⁻¹ on the column-major vec of the (d_out, d_in) gradient."""
    matrix = np.kron(a, g) + damping * np.eye(len(a) * len(g))
    solved = np.linalg.solve(matrix, gradient.reshape(-1, order="F"))
    return solved.reshape(gradient.shape, order="F")


def solve_factors(a, g, gradient, damping_a, damping_g):
    """(G + γ I)⁻¹ ∇ (A + γ I)⁻¹ of a (d_out, d_in) gradient."""
    left = np.linalg.solve(g + damping_g * np.eye(len(g)), gradient)
    return np.linalg.solve(a + damping_a * np.eye(len(a)), left.T).T


def pi(a, g):
    return math.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))


def softmax(z):
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)
