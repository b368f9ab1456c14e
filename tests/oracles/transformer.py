"""A transformer block in numpy: one sequence, head by head, no batching."""

import math

import numpy as np


def norm(x, params, eps):
    if "bias" in params:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * params["scale"]
    return x + params.get("bias", 0)


def dense(x, params):
    return x @ params["kernel"] + params.get("bias", 0)


def rotate(x, theta):
    """Rotates pairs (i, i + d/2) as complex numbers; x is [time, head_dim]."""
    half = x.shape[-1] // 2
    z = x[:, :half] + 1j * x[:, half:]
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    z = z * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def slope(head, heads):
    """ALiBi's slope by the recursion of its authors' code."""

    def of_power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    closest = 2 ** math.floor(math.log2(heads))
    more = of_power_of_two(2 * closest)[0::2][: heads - closest]
    return (of_power_of_two(closest) + more)[head]


def attend(x, params, config, options, allowed):
    """Attention of one sequence, head by head; `allowed[i, j]`: i sees j."""
    size = params["query"]["kernel"].shape[-1] // config.heads
    kv_heads = getattr(config, "kv_heads", None)
    query, key, value = (dense(x, params[n]) for n in ("query", "key", "value"))
    parts = []
    for head in range(config.heads):
        kv = head * (kv_heads or config.heads) // config.heads
        q = query[:, head * size : (head + 1) * size]
        k, v = (a[:, kv * size : (kv + 1) * size] for a in (key, value))
        if options.position == "rope":
            q, k = (rotate(a, options.rope_theta) for a in (q, k))
        scores = q @ k.T / math.sqrt(size)
        if options.position == "alibi":
            # Press et al. subtract slope · distance; BLOOM adds slope · key's place,
            # which differs by a constant in each row.
            scores = scores + slope(head, config.heads) * np.arange(len(x))
        scores = np.where(allowed, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        parts.append(weights / weights.sum(-1, keepdims=True) @ v)
    return dense(np.concatenate(parts, -1), params["output"])


ACTIVATE = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu_erf": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
}


def feed_forward(x, params, kind):
    up = dense(x, params["up"])
    if kind == "silu_gated":
        gate = dense(x, params["gate"])
        return dense(gate / (1 + np.exp(-gate)) * up, params["down"])
    return dense(ACTIVATE[kind](up), params["down"])


def mixture(x, params, options):
    """Feed-forward by the chosen experts, one token and one expert at a time."""
    own, top_k = params["experts"], options.experts.top_k
    y = np.zeros_like(x)
    for token, row in enumerate(dense(x, params["router"])):
        likely = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        chosen = np.argsort(-likely)[:top_k]
        for expert in chosen:
            gate = likely[expert] / (likely[chosen].sum() if top_k > 1 else 1)
            parts = {
                name: {
                    kind: own[key][expert]
                    for kind, key in (("kernel", name), ("bias", f"{name}_bias"))
                    if key in own
                }
                for name in ("up", "gate", "down")
            }
            y[token] += gate * feed_forward(x[token], parts, options.mlp)
    return y


def layer(x, params, config, options, allowed):
    """One block, norms before each part or after its addition."""

    def part(name, x):
        if name == "attention":
            return attend(x, params[name], config, options, allowed)
        if "router" in params[name]:
            return mixture(x, params[name], options)
        return feed_forward(x, params[name], options.mlp)

    for name in ("attention", "mlp"):
        own = params[f"{name}_norm"]
        if options.norm_position == "pre":
            x = x + part(name, norm(x, own, options.norm_eps))
        else:
            x = norm(x + part(name, x), own, options.norm_eps)
    return x
