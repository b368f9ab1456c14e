"""Graph layers as dense formulas in numpy, of the matrix A[v, u] of edges u → v.

They know nothing of edges in lists, segments or sorting.
"""

import numpy as np


def adjacency(senders, receivers, vertices, weights=None):
    a = np.zeros((vertices, vertices))
    for number, (u, v) in enumerate(zip(senders, receivers, strict=True)):
        a[v, u] += 1 if weights is None else weights[number]
    return a


def with_loops(a, how):
    if how == "one":
        a = a - np.diag(np.diag(a))
    return a + np.eye(len(a))


def normalized(a):
    degree = a.sum(1)
    root = np.zeros(len(a))
    root[degree > 0] = degree[degree > 0] ** -0.5
    return root[:, None] * a * root[None, :]


def gcn(a, x, params):
    return normalized(a) @ x @ params["kernel"] + params["bias"]


def sgc(a, x, powers):
    return np.linalg.matrix_power(normalized(a), powers) @ x


def sage(a, x, params, aggregate):
    degree = a.sum(1, keepdims=True)
    own = x @ params["self"]
    if aggregate == "gcn":
        return (x + a @ x) / (degree + 1) @ params["self"] + params["bias"]
    if aggregate == "mean":
        mean = np.divide(a @ x, degree, out=np.zeros_like(x), where=degree > 0)
        return own + mean @ params["neighbors"] + params["bias"]
    pooled = np.maximum(x @ params["pool"] + params["pool_bias"], 0)
    largest = [pooled[row > 0].max(0) if row.any() else 0 * pooled[0] for row in a]
    return own + np.stack(largest) @ params["neighbors"] + params["bias"]


def gat(a, x, params, combine):
    """One α for each pair, times how often the edge is there."""
    heads = []
    for head in range(params["kernel"].shape[1]):
        z = x @ params["kernel"][:, head]
        e = (z @ params["receiver"][head])[:, None] + z @ params["sender"][head]
        e = np.where(e > 0, e, 0.2 * e)
        power = a * np.exp(e - e.max())
        total = power.sum(1, keepdims=True)
        share = np.divide(power, total, out=np.zeros_like(power), where=total > 0)
        heads.append(share @ z)
    y = np.mean(heads, 0) if combine == "mean" else np.concatenate(heads, 1)
    return y + params["bias"]


def gat_of_edges(senders, receivers, features, x, params):
    """Edge by edge, since each has features of its own; heads concatenated."""
    z = np.einsum("vi,ihw->vhw", x, params["kernel"])
    f = np.einsum("ei,ihw->ehw", features, params["edge"])
    y = np.zeros_like(z)
    for v in range(len(x)):
        into = [e for e in range(len(receivers)) if receivers[e] == v]
        for head in range(z.shape[1]):
            logits = np.array(
                [
                    z[v, head] @ params["receiver"][head]
                    + z[senders[e], head] @ params["sender"][head]
                    + f[e, head] @ params["edge_attention"][head]
                    for e in into
                ]
            )
            if not len(logits):
                continue
            power = np.exp(np.where(logits > 0, logits, 0.2 * logits))
            for share, e in zip(power / power.sum(), into, strict=True):
                y[v, head] += share * z[senders[e], head]
    return y.reshape(len(x), -1) + params["bias"]


def gin(a, x, params):
    return mlp((1 + params["epsilon"]) * x + a @ x, params)


def gine(senders, receivers, features, x, params):
    total = (1 + params["epsilon"]) * x
    for u, v, f in zip(senders, receivers, features, strict=True):
        total[v] += np.maximum(x[u] + f @ params["edge"], 0)
    return mlp(total, params)


def mlp(x, params):
    hidden = x @ params["kernel_0"] + params["bias_0"]
    if "scale" in params:
        hidden = hidden - hidden.mean(1, keepdims=True)
        hidden = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-5)
        hidden = hidden * params["scale"] + params["shift"]
    return np.maximum(hidden, 0) @ params["kernel_1"] + params["bias_1"]
