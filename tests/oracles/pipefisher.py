"""Training with K-FAC's late inverses, in numpy: all curvature kept, the old picked.

The network is that of `tests.sharding.pipelines`: tanh(x E), then stages
x + tanh(tanh(x U + b) D + c), then softmax of x H.
"""

import numpy as np

from tests.oracles import kfac


def _slopes(params, batch):
    """Gradients of the mean loss, and each layer's inputs and output gradients."""
    x, y = np.asarray(batch["x"], float), np.asarray(batch["y"])
    count = len(x)
    h = np.tanh(x @ params["embed"])
    kept, stages = [], params["stages"]
    number = len(stages["up"]["kernel"])
    for s in range(number):
        inner = np.tanh(h @ stages["up"]["kernel"][s] + stages["up"]["bias"][s])
        outer = np.tanh(inner @ stages["down"]["kernel"][s] + stages["down"]["bias"][s])
        kept.append((h, inner, outer))
        h = h + outer
    error = kfac.softmax(h @ params["head"])
    error[np.arange(count), y] -= 1
    error /= count
    grads = {"head": h.T @ error, "stages": {"up": {}, "down": {}}}
    slope = error @ params["head"].T
    rows = {}
    for s in reversed(range(number)):
        before, inner, outer = kept[s]
        down = slope * (1 - outer**2)
        up = (down @ stages["down"]["kernel"][s].T) * (1 - inner**2)
        rows[s, "down"], rows[s, "up"] = (inner, down), (before, up)
        slope = slope + up @ stages["up"]["kernel"][s].T
    grads["embed"] = x.T @ (slope * (1 - np.tanh(x @ params["embed"]) ** 2))
    return grads, rows


def train(params, batches, layers, age, damping, rate):
    """The parameters after a step on each batch.

    Args:
      params: leaves of stages `[stages, ...]`.
      batches: one for each step.
      layers: names of a stage's layers by their number.
      age: `(step from 1) -> {(stage, layer, "A" or "B"): steps}` of each inverse.
      damping: added to both factors.
      rate: of gradient descent.
    """
    params = {
        "embed": np.asarray(params["embed"], float),
        "head": np.asarray(params["head"], float),
        "stages": {
            name: {key: np.asarray(leaf, float).copy() for key, leaf in each.items()}
            for name, each in params["stages"].items()
        },
    }
    history = {}
    for step, batch in enumerate(batches, 1):
        grads, rows = _slopes(params, batch)
        ages = age(step)
        factors = {}
        for (s, name), (x, slope) in rows.items():
            # Of single losses: the mean loss's gradients are smaller by their number.
            a, g = kfac.dense_factors(x, slope * len(x), use_bias=True)
            factors[s, layers.index(name)] = {"A": a, "B": g}
        history[step] = factors
        for name in ("embed", "head"):
            params[name] = params[name] - rate * grads[name]
        for (s, name), (x, slope) in rows.items():
            layer = layers.index(name)
            old = {
                side: history[step - ages[s, layer, side]][s, layer][side]
                for side in "AB"
            }
            wide = np.append(x, np.ones((len(x), 1)), axis=1)
            made = kfac.solve_factors(
                old["A"], old["B"], slope.T @ wide, *[damping] * 2
            )
            params["stages"][name]["kernel"][s] -= rate * made.T[:-1]
            params["stages"][name]["bias"][s] -= rate * made.T[-1]
    return params
