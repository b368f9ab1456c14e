"""Primitives that read or write parts of arrays, as a reader of JAX adds them."""

import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hpcjax.ir.views import View, axis

Reader = Any  # of `_from_jax`, which stands on this
_JOIN = {"sum": "{} + {}", "max": "maximum({}, {})", "min": "minimum({}, {})"}


def _rev(_: Reader, eqn: Any, views: list[View]) -> list[View]:
    shape = views[0].shape
    turned = [k in eqn.params["dimensions"] for k in range(len(shape))]
    start = [(n - 1) * turn for n, turn in zip(shape, turned, strict=True)]
    return [views[0].slice(start, shape, [1 - 2 * turn for turn in turned])]


def _split(_: Reader, eqn: Any, views: list[View]) -> list[View]:
    made, start = [], [0] * len(views[0].shape)
    for variable in eqn.outvars:
        made.append(views[0].slice(start, variable.aval.shape))
        start[eqn.params["axis"]] += variable.aval.shape[eqn.params["axis"]]
    return made


def _iota(reader: Reader, eqn: Any, _: list[View]) -> list[View]:
    made = reader.new(eqn.outvars[0].aval)
    reader.tasklet(axis(eqn.params["dimension"]), [], made)
    return [made]


def _pad(reader: Reader, eqn: Any, views: list[View]) -> list[View] | None:
    """Adds what writes the elements, and what is around them."""
    (view, value), sizes = views, eqn.params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in sizes):
        return None
    made = reader.new(eqn.outvars[0].aval)
    return [_padded(reader, view, value, sizes, made)]


def _padded(reader: Reader, view: View, value: View, sizes: Any, made: View) -> View:
    start, steps = [low for low, *_ in sizes], [gap + 1 for *_, gap in sizes]
    around = value.broadcast(made.shape, ())
    if any(gap for *_, gap in sizes):
        reader.tasklet("a", [around], made)
    else:
        _frame(reader, around, made, start, view.shape)
    reader.tasklet("a", [view], made.slice(start, view.shape, steps))
    return made


def _window(reader: Reader, eqn: Any, views: list[View]) -> list[View] | None:
    """Adds a map that reads all of a small window."""
    (view,), aval, params = views, eqn.outvars[0].aval, eqn.params
    sizes, paddings = params["window_dimensions"], params["padding"]
    free = all(min(own) >= 0 for own in paddings) and {*params["base_dilation"]} <= {1}
    if not free or math.prod(sizes) > len(string.ascii_letters):
        return None
    kind = eqn.primitive.name.rpartition("_")[2]
    if any(map(any, paddings)):
        shape = [n + sum(own) for n, own in zip(view.shape, paddings, strict=True)]
        around = View("", (), (), _neutral(kind, aval.dtype))
        gaps = [(*own, 0) for own in paddings]
        padded = reader.container(shape, np.dtype(aval.dtype).name)
        view = _padded(reader, view, around, gaps, padded)
    parts = [
        view.slice(
            np.multiply(place, params["window_dilation"]).tolist(),
            aval.shape,
            params["window_strides"],
        )
        for place in np.ndindex(*sizes)
    ]
    code = functools.reduce(_JOIN[kind].format, string.ascii_letters[: len(parts)])
    made = reader.new(aval)
    reader.tasklet(code, parts, made)
    return [made]


def _neutral(kind: str, dtype: Any) -> str:
    """Returns the code of what does not change a sum, a maximum or a minimum."""
    if kind == "sum":
        return "0"
    if np.dtype(dtype) == bool:
        return str(kind == "min")
    lowest = kind == "max"
    if jnp.issubdtype(dtype, jnp.integer):
        limits: Any = jnp.iinfo(dtype)
    elif np.isinf(np.asarray(np.inf).astype(dtype)):
        return "-inf" if lowest else "inf"
    else:  # Some narrow floating points have no infinity.
        limits = jnp.finfo(dtype)
    return repr(np.asarray(limits.min if lowest else limits.max).item())


def _concatenate(reader: Reader, eqn: Any, views: list[View]) -> list[View]:
    made = reader.new(eqn.outvars[0].aval)
    start = [0] * len(made.shape)
    for view in views:
        reader.tasklet("a", [view], made.slice(start, view.shape))
        start[eqn.params["dimension"]] += view.shape[eqn.params["dimension"]]
    return [made]


def _stack(reader: Reader, eqn: Any, views: list[View]) -> list[View]:
    made = reader.new(eqn.outvars[0].aval)
    for n, view in enumerate(views):
        reader.tasklet("a", [view], made.pick(eqn.params["axis"], n))
    return [made]


def _unstack(_: Reader, eqn: Any, views: list[View]) -> list[View]:
    return [views[0].pick(eqn.params["axis"], n) for n in range(len(eqn.outvars))]


def _starts(eqn: Any, first: int, sizes: Sequence[int]) -> list[int] | None:
    """Returns where a dynamic slice begins, if that is a constant."""
    literals = eqn.invars[first:]
    if not all(isinstance(v, core.Literal) for v in literals):
        return None
    whole = zip(literals, eqn.invars[0].aval.shape, sizes, strict=True)
    return [max(0, min(int(v.val), n - size)) for v, n, size in whole]


def _dynamic_slice(reader: Reader, eqn: Any, views: list[View]) -> list[View] | None:
    start = _starts(eqn, 1, eqn.params["slice_sizes"])
    return None if start is None else [views[0].slice(start, eqn.params["slice_sizes"])]


def _dynamic_update(reader: Reader, eqn: Any, views: list[View]) -> list[View] | None:
    whole, part = views[:2]
    start = _starts(eqn, 2, part.shape)
    if start is None:
        return None
    made = reader.new(eqn.outvars[0].aval)
    _frame(reader, whole, made, start, part.shape)
    reader.tasklet("a", [part], made.slice(start, part.shape))
    return [made]


def _frame(
    reader: Reader, view: View, made: View, start: Sequence[int], sizes: Sequence[int]
) -> None:
    """Adds what writes all but a part of an array."""
    first, shape = [0] * len(start), [*made.shape]
    for place, (low, size) in enumerate(zip(start, sizes, strict=True)):
        for begin, end in ((0, low), (low + size, made.shape[place])):
            first[place], shape[place] = begin, end - begin
            part = view.slice(first, shape)
            reader.tasklet("a", [part], made.slice(first, shape))
        first[place], shape[place] = low, size


PARTS: Mapping[str, Callable[[Reader, Any, list[View]], list[View] | None]] = {
    "scan": lambda reader, eqn, views: reader.scan(eqn, views),
    "dot_general": lambda reader, eqn, views: [reader.contract(eqn, views)],
    "rev": _rev,
    "split": _split,
    "iota": _iota,
    "pad": _pad,
    **{f"reduce_window_{kind}": _window for kind in _JOIN},
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
}
