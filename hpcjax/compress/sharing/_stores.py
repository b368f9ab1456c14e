"""The parameters of a plan, and the weights that they make.

For a plan there are, each a dict:
  "stores": the numbers `[P]` of each group;
  "coefficients": α `[K]` of each layer that combines K templates;
  "embeddings", "maps": with `combine="emb"` α = φ W + b instead, φ of each layer, W and
    b of all layers of a group with equally many templates;
  "upsamplers": masks or mixtures of each layer that is larger than its store.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.compress.sharing import _upsampling
from hpcjax.compress.sharing._plan import (
    CANDIDATES,
    Layer,
    Plan,
    Window,
    template_shape,
)
from hpcjax.compress.sharing._report import read_ranges
from hpcjax.core.keys import derive

Parameters = dict[str, dict[str, Any]]
COMBINED = ("templates", "candidates")


def init(key: jax.Array, plan: Plan, dtype: Any = "float32") -> Parameters:
    """Draws the parameters of a plan.

    Stores are normal with variance 2/9, and where layers read them 2/inputs (He's), by
    the layers of the commonest shape where several do. Coefficients are rows of an
    orthogonal matrix, and so are mixtures. With r masks of w numbers all are 1/(r w).

    Args:
      key: random key.
      plan: from `make_plan`.
      dtype: of all parameters.

    Examples:
      >>> from hpcjax.compress import sharing
      >>> layers = [sharing.Layer("a", (4, 2)), sharing.Layer("b", (4, 2))]
      >>> made = init(jax.random.key(0), sharing.make_plan(layers, (0, 0), 16))
      >>> {name: list(made[name]) for name in ("stores", "coefficients")}
      {'stores': ['0'], 'coefficients': ['a', 'b']}
    """
    stores = {}
    for group, numbers in plan.stores:
        own = derive(key, f"store {group}")
        scale = jnp.asarray(_scales(plan, group, numbers), dtype)
        stores[str(group)] = scale * jax.random.normal(own, (numbers,), dtype)
    upsamplers = {
        key_of(layer): _upsampler(derive(key, layer.name), plan, layer, window, dtype)
        for layer, window in plan
        if window.kind in ("mask", "wavg")
    }
    combined = _coefficients(derive(key, "coefficients"), plan, dtype)
    return {"stores": stores, "upsamplers": upsamplers, **combined}


def generate(
    parameters: Mapping[str, Mapping[str, Any]], plan: Plan
) -> dict[str, Float[Array, "..."]]:
    """Returns the weights, by its name, of every layer without a kernel of its own.

    Their axes are in the order of `Layer.shape`. All places are known when this is
    traced: stores are read by slices, and gradients of all layers add up in them.

    Args:
      parameters: as from `init`.
      plan: the same plan.
    """
    return {
        layer.name: _make(parameters, plan, layer, window)
        for layer, window in plan
        if window.kind != "own"
    }


def key_of(layer: Layer) -> str:
    """Returns the name of what belongs to a layer, one level of a tree."""
    return layer.name.replace("/", ".")


def coefficients_of(
    parameters: Mapping[str, Mapping[str, Any]],
    plan: Plan,
    layer: Layer,
    window: Window,
) -> Float[Array, " templates"]:
    """Returns the coefficients of a layer's templates, as they are learned."""
    if plan.options.combine == "avg":
        return jnp.full((window.templates,), 1 / window.templates)
    name = key_of(layer)
    if plan.options.combine == "wavg":
        return parameters["coefficients"][name]
    kept = parameters["maps"][_map_of(window)]
    return parameters["embeddings"][name] @ kept["kernel"] + kept["bias"]


def _make(
    parameters: Mapping[str, Mapping[str, Any]],
    plan: Plan,
    layer: Layer,
    window: Window,
) -> jax.Array:
    store = parameters["stores"][str(window.group)]
    if window.kind == "templates":
        size = window.templates * layer.size
        read = _read(store, window.start, size)
        templates = read.reshape(-1, *layer.shape)
        if window.templates == 1:
            return templates[0]
        return _mix(coefficients_of(parameters, plan, layer, window), templates)
    if window.kind == "candidates":
        return _combine_candidates(parameters, plan, layer, window)
    if window.kind == "inter":
        return _upsampling.interpolate(store, window.reduced, layer.shape)
    if window.kind == "repeat":
        return _upsampling.repeat(store, layer.shape)
    learned = parameters["upsamplers"][key_of(layer)]
    enlarge = {"mask": _upsampling.mask_copies, "wavg": _upsampling.mix_halves}
    return enlarge[window.kind](store, learned, layer.shape)


def _mix(coefficients: jax.Array, templates: jax.Array) -> jax.Array:
    """Returns Σ_k α_k T_k, which is no product of matrices, see `share(remat=True)`."""
    return sum(
        (a * t for a, t in zip(coefficients, templates, strict=True)),
        start=jnp.zeros_like(templates[0]),
    )


def _read(store: jax.Array, start: int, size: int) -> jax.Array:
    """Returns so many numbers from `start` on, which go on at the beginning."""
    before = store[start : start + size]
    left = size - len(before)
    return jnp.concatenate([before, store[:left]]) if left else before


def _combine_candidates(
    parameters: Mapping[str, Mapping[str, Any]],
    plan: Plan,
    layer: Layer,
    window: Window,
) -> jax.Array:
    """Returns the mean of the store's resized parts, weighted by a softmax."""
    store = parameters["stores"][str(window.group)]
    height, width = template_shape(layer, len(store))
    parts = store[: len(store) // CANDIDATES * CANDIDATES].reshape(CANDIDATES, -1)
    weights = jax.nn.softmax(coefficients_of(parameters, plan, layer, window))
    # Resizing is linear: one matrix is resized in place of four.
    mixed = _mix(weights, parts)[: height * width].reshape(height, width)
    return _upsampling.resize(mixed, layer.shape)


def _scales(plan: Plan, group: int, numbers: int) -> np.ndarray:
    """Returns the standard deviation of each number of a store."""
    scales = np.full(numbers, math.sqrt(2 / 9))
    own = [(layer, window) for layer, window in plan if window.group == group]
    shapes = [layer.shape for layer, _ in own]
    for layer, window in sorted(own, key=lambda pair: shapes.count(pair[0].shape)):
        inputs = math.prod(layer.shape[1:])
        for start, stop in read_ranges(plan, layer, window):
            scales[start:stop] = math.sqrt(2 / inputs)
    return scales


def _upsampler(
    key: jax.Array, plan: Plan, layer: Layer, window: Window, dtype: Any
) -> jax.Array:
    numbers = dict(plan.stores)[window.group]
    unit = plan.options.mask_window if window.kind == "mask" else 2
    copies = _upsampling.count_copies(layer.size, numbers // unit * unit)
    if window.kind == "mask":
        return jnp.full((copies, unit), 1 / (copies * unit), dtype)
    rows = (copies + 1) * unit
    return jax.nn.initializers.orthogonal()(key, (rows, 2), dtype)


def _map_of(window: Window) -> str:
    """Returns the name of the map that layers with so many templates share."""
    return f"{window.group} of {window.templates}"


def _coefficients(key: jax.Array, plan: Plan, dtype: Any) -> Parameters:
    """Draws coefficients, or embeddings and their maps, of layers with templates."""
    alike: dict[str, list[tuple[Layer, Window]]] = {}
    for layer, window in plan:
        if window.kind in COMBINED and window.templates > 1:
            alike.setdefault(_map_of(window), []).append((layer, window))
    made: Parameters = {"coefficients": {}, "embeddings": {}, "maps": {}}
    if plan.options.combine == "avg":
        return made
    for name, members in alike.items():
        count, own = members[0][1].templates, derive(key, name)
        if plan.options.combine == "wavg":
            shape = (len(members), count)
            rows = jax.nn.initializers.orthogonal()(own, shape, dtype)
            made["coefficients"] |= {
                key_of(layer): row
                for (layer, _), row in zip(members, rows, strict=True)
            }
            continue
        length = plan.options.embedding
        # As PyTorch's `Embedding` and `Linear` begin.
        kernel = jax.random.uniform(
            derive(own, "map"), (length, count), dtype, -1, 1
        ) / math.sqrt(length)
        made["maps"][name] = {"kernel": kernel, "bias": jnp.zeros(count, dtype)}
        drawn = jax.random.normal(derive(own, "embeddings"), (len(members), length))
        made["embeddings"] |= {
            key_of(layer): row.astype(dtype)
            for (layer, _), row in zip(members, drawn, strict=True)
        }
    return made
