"""Lowers graphs to JAX: maps are array operations over all iterations at once.

Where each axis of a container has an index of at most one parameter, an edge is a
slice; elsewhere it is a gather, or a scatter.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.ir import affine
from hpcjax.ir.affine import Affine, Range, Values
from hpcjax.ir.checks import check
from hpcjax.ir.sdfg import (
    REDUCERS,
    SDFG,
    SPECIAL,
    Code,
    Map,
    Memlet,
    Nested,
    Node,
    accesses,
    codes,
    parse,
)

_REDUCE = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
_OPERATORS: Mapping[type, str] = {
    **{ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"},
    **{ast.FloorDiv: "floor_divide", ast.Mod: "mod", ast.Pow: "power"},
    **{ast.USub: "negative", ast.Lt: "less", ast.LtE: "less_equal", ast.Eq: "equal"},
    **{ast.Gt: "greater", ast.GtE: "greater_equal", ast.NotEq: "not_equal"},
}
_Functions = Mapping[str, Callable[..., Any]]
_Arrays = Mapping[str, Any]


def to_jax(
    graph: SDFG,
    symbols: Values | None = None,
    *,
    functions: _Functions | None = None,
    by_node: bool = False,
) -> Callable[[_Arrays], dict[str, Any]]:
    """Returns a function from containers to those that are not transient.

    Args:
      graph: the program.
      symbols: their values.
      functions: of library nodes, by their code.
      by_node: whether each top-level node is a program of its own.

    Raises:
      ConfigError: the graph is not valid, a symbol has no value, a library node no
        function; when called, an array is of another shape, or no container's.

    Examples:
      >>> from hpcjax import ir
      >>> program = ir.Builder("sum of rows")
      >>> program.array("x", 2, 3)
      >>> program.array("y", 2)
      >>> with program.map(i="0:2", j="0:3"):
      ...     program.tasklet("b = 2 * a", wcr="add", a="x[i, j]", b="y[i]")
      >>> run = to_jax(program.build())
      >>> run({"x": jnp.ones((2, 3)), "y": jnp.zeros(2)})["y"].tolist()
      [6.0, 6.0]
    """
    bound = graph.bind(symbols or {})
    if bound.symbols:
        raise ConfigError(f"symbols without values: {', '.join(bound.symbols)}")
    check(bound)
    known = functions or {}
    _check_functions(bound, known)
    steps = [_Step(bound, node, known, by_node) for _, node in bound.nodes()]

    def run(inputs: _Arrays) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in inputs.items():
            if name not in bound.arrays:
                hint = nearest(name, bound.arrays)
                raise ConfigError(f"there is no container {name!r}{hint}")
            data[name] = _given(name, value, bound)
        last = {name: place for place, step in enumerate(steps) for name in step.names}
        for place, step in enumerate(steps):
            step(data, inputs)
            for name in step.names:
                if last[name] == place and bound.arrays[name].transient:
                    data.pop(name, None)
        kept = (name for name, each in bound.arrays.items() if not each.transient)
        return {name: _value(data, name, bound) for name in kept}

    return run


def _given(name: str, value: Any, graph: SDFG) -> Any:
    array = jnp.asarray(value, _dtype(graph.arrays[name].dtype))
    shape = tuple(size.constant for size in graph.arrays[name].shape)
    if array.shape != shape:
        raise ConfigError(f"{name!r} has shape {shape}: got {array.shape}")
    return array


def _check_functions(graph: SDFG, functions: _Functions) -> None:
    for _, node in graph.nodes():
        if isinstance(node, Nested):
            _check_functions(node.graph, functions)
        for code, _ in codes(node):
            named = code.kind == "library" and "->" not in code.code
            if named and code.code not in functions:
                raise ConfigError(f"no function {code.code!r} was given")


def _dtype(name: str) -> Any:
    """Returns a container's dtype, in single precision unless JAX has double."""
    return jax.dtypes.canonicalize_dtype(name)


def _value(data: _Arrays, name: str, graph: SDFG, values: Values | None = None) -> Any:
    """Returns a container; nothing was written into it yet if it is not there."""
    if name in data:
        return data[name]
    array = graph.arrays[name]
    dtype = _dtype(array.dtype)
    shape = tuple(size.at(values or {}) for size in array.shape)
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


class _Lowering:
    """Runs the nodes of a graph on arrays by container."""

    def __init__(self, graph: SDFG, functions: _Functions) -> None:
        self.graph, self.functions = graph, functions

    def node(self, node: Node, data: dict[str, Any], values: Any) -> None:
        """Runs a node; values are of counters, and of parameters of maps around."""
        if isinstance(node, Nested):
            self.nested(node, data, values)
        elif isinstance(node, Code):
            self.code(node, data, _Space((), values), {})
        elif _vectors(node):
            self.map(node, data, _Space((), values))
        else:
            self.loop(node, data, values)

    def nested(self, node: Nested, data: dict[str, Any], values: Any) -> None:
        """Runs a graph several times."""
        names, inner = dict(node.arguments), _Lowering(node.graph, self.functions)
        symbols = {name: own.at(values) for name, own in node.symbols}
        written = sorted({e.memlet.data for e in accesses(node) if e.writes})
        fixed = {
            name: _value(data, outer, self.graph, values)
            for name, outer in names.items()
        }

        def turn(count: Any, carried: dict[str, Any]) -> dict[str, Any]:
            own = {name: carried.get(o, fixed[name]) for name, o in names.items()}
            now = symbols | ({node.counter: count} if node.counter else {})
            for _, each in node.graph.nodes():
                inner.node(each, own, now)
            return {o: own[name] for name, o in names.items() if o in carried}

        first = {name: _value(data, name, self.graph, values) for name in written}
        data |= lax.fori_loop(0, node.times, turn, first)

    def loop(self, node: Map, data: dict[str, Any], values: Any) -> None:
        """Runs iterations one after the other, where they are no array operation."""
        listed = [
            {n: v[n] for n in node.params} for v in affine.iterate(node.ranges, values)
        ]
        table = {n: jnp.asarray([v[n] for v in listed]) for n in node.params}
        written = sorted(
            {e.memlet.data for e in accesses(node) if e.writes} - {*node.private}
        )

        def turn(count: Any, carried: dict[str, Any]) -> dict[str, Any]:
            own = {n: v for n, v in data.items() if n not in node.private} | carried
            now = values | {name: column[count] for name, column in table.items()}
            for each in node.body:
                self.node(each, own, now)
            return {name: own[name] for name in written}

        first = {name: _value(data, name, self.graph, values) for name in written}
        data |= lax.fori_loop(0, len(listed), turn, first)

    def map(self, node: Map, data: dict[str, Any], outer: "_Space") -> None:
        """Runs all iterations at once, one statement after the other."""
        space = outer.extend(node.ranges)
        if 0 in space.shape:
            return
        local: dict[Any, Any] = {name: {} for name in node.private}
        for each in node.body:
            if isinstance(each, Map):
                self.map(each, data, space)
            elif isinstance(each, Code):
                self.code(each, data, space, local)

    def code(
        self, node: Code, data: dict[str, Any], space: "_Space", local: dict[Any, Any]
    ) -> None:
        """Reads, computes, and writes or resolves."""
        read = {}
        for name, memlet in node.inputs:
            own = local.get(memlet.data)
            read[name] = (
                _value(data, memlet.data, self.graph, space.values)
                if own is None
                else own[memlet.subset]
            )
            if own is None:
                read[name] = space.read(read[name], memlet)
        made = self.compute(node, read, space)
        for name, memlet in node.outputs:
            value = jnp.asarray(made[name])
            value = value.astype(_dtype(self.graph.arrays[memlet.data].dtype))
            if memlet.data in local:
                local[memlet.data][memlet.subset] = value
                continue
            array = _value(data, memlet.data, self.graph, space.values)
            data[memlet.data] = space.write(array, memlet, value)

    def compute(
        self, node: Code, read: dict[str, Any], space: "_Space"
    ) -> Mapping[str, Any]:
        """Returns the outputs of a node by name."""
        if node.kind == "tasklet":
            scope = {**space.values, **space.grids, **read}
            for line in parse(node.code).body:
                assert isinstance(line, ast.Assign)
                for target in line.targets:
                    scope[ast.unparse(target)] = _evaluate(line.value, scope)
            return scope
        arrays = list(read.values())
        if node.kind == "reduce":
            reducer = getattr(jnp, _REDUCE[node.code])
            limited = jnp.issubdtype(arrays[0].dtype, jnp.inexact)
            initial = {"initial": REDUCERS[node.code]} if limited else {}
            results: Sequence[Any] = (reducer(arrays[0], axis=node.axes, **initial),)
        elif node.kind == "copy":
            results = arrays
        elif node.code in self.functions:
            results = self.functions[node.code](*arrays)
        else:
            # Sums of narrow numbers may be asked for in wider ones.
            wide = _dtype(self.graph.arrays[node.outputs[0][1].data].dtype)
            results = (jnp.einsum(node.code, *arrays, preferred_element_type=wide),)
        return dict(zip((name for name, _ in node.outputs), results, strict=True))


def _vectors(node: Map) -> bool:
    """Whether all statements are tasklets, on own containers where they own them."""

    def good(each: Node, owned: frozenset[str], here: frozenset[str]) -> bool:
        if isinstance(each, Map):
            inner = frozenset(each.private)
            return all(good(n, owned | inner, inner) for n in each.body)
        if not isinstance(each, Code) or each.kind != "tasklet":
            return False
        return all(
            m.data not in owned
            or (m.data in here and not m.wcr and not any(r.names for r in m.subset))
            for _, m in (*each.inputs, *each.outputs)
        )

    return good(node, frozenset(), frozenset())


class _Space:
    """Iterations of nested maps: a product of ranges, or a list if they depend."""

    def __init__(
        self, ranges: affine.Ranges, values: Mapping[str, Any], listed: bool = False
    ) -> None:
        self.ranges, self.values = tuple(ranges), values
        names = {name for name, _ in ranges}
        plain = all(not own.names & names and len(own.ends) == 1 for _, own in ranges)
        self.dense = plain and not listed
        self.grids: dict[str, Any] = {}
        if self.dense:
            sizes = [_length(own, values) for _, own in ranges]
            self.shape = tuple(sizes)
            for place, (name, own) in enumerate(ranges):
                line = own.start.at(values) + own.step * np.arange(sizes[place])
                after = (1,) * (len(sizes) - place - 1)
                self.grids[name] = line.reshape((-1, *after))
        else:
            rows = list(affine.iterate(ranges, values))
            self.shape = (len(rows),)
            for name, _ in ranges:
                self.grids[name] = np.asarray([row[name] for row in rows], int)

    def extend(self, ranges: affine.Ranges) -> "_Space":
        """Returns the space with maps within."""
        return _Space((*self.ranges, *ranges), self.values)

    def read(self, array: Any, memlet: Memlet) -> Any:
        """Returns what all iterations read, with an axis for each parameter."""
        axes = self.axes(memlet, array.shape)
        if axes is None:
            return array[self.indices(memlet)]
        array = _cut(array.reshape([axis.whole for axis in axes]), axes)
        if not self.ranges:
            return array
        kept = [n for n, axis in enumerate(axes) if axis.place >= 0]
        array = array.reshape([array.shape[n] for n in kept])
        order = sorted(range(len(kept)), key=lambda n: axes[kept[n]].place)
        places = {axes[n].place for n in kept}
        shape = [n if k in places else 1 for k, n in enumerate(self.shape)]
        return array.transpose(order).reshape(shape)

    def write(self, array: Any, memlet: Memlet, value: Any) -> Any:
        """Returns a container with what all iterations write."""
        axes = self.axes(memlet, array.shape)
        if axes is None:
            value = jnp.broadcast_to(value, self.shape)
            at = array.at[self.indices(memlet)]
            how = {"": "set", "maximum": "max", "minimum": "min"}
            return getattr(at, how.get(memlet.wcr, memlet.wcr))(value)
        if self.ranges:
            places = [axis.place for axis in axes if axis.place >= 0]
            left = tuple(k for k in range(len(self.shape)) if k not in places)
            value = jnp.broadcast_to(value, self.shape)
            if left:
                value = getattr(jnp, _REDUCE[memlet.wcr or "maximum"])(value, axis=left)
            value = value.transpose([sorted(places).index(place) for place in places])
        value = value.reshape([axis.size for axis in axes]).astype(array.dtype)
        split = array.reshape([axis.whole for axis in axes])
        if memlet.wcr:
            value = getattr(jnp, memlet.wcr)(_cut(split, axes), value)
        return _paste(split, axes, value).reshape(array.shape)

    def axes(self, memlet: Memlet, shape: Sequence[int]) -> "list[_Axis] | None":
        """Returns a slice for each axis of a container; None if there is none."""
        if not self.dense:
            return None
        made, names = [], [name for name, _ in self.ranges]
        for own, size in zip(memlet.subset, shape, strict=True):
            inner = [name for name in names if own.start.factor(name)]
            if own.ends != (own.start,):
                if inner or any(end.factor(n) for end in own.ends for n in names):
                    return None
                start, count = own.start.at(self.values), _length(own, self.values)
                made.append(_Axis(-1, start, count, own.step, size))
            elif not inner:
                made.append(_Axis(-1, own.start.at(self.values), 1, 1, size))
            elif len(inner) == 1:
                made.append(self.axis(own.start, inner[0], names, size))
            else:
                split = self.split(own.start, inner, names, size)
                if split is None:
                    return None
                made += split
        places = [axis.place for axis in made if axis.place >= 0]
        return made if len(places) == len({*places}) else None

    def axis(self, index: Affine, name: str, names: list[str], size: int) -> "_Axis":
        """Returns the slice that a parameter takes."""
        place, own = names.index(name), dict(self.ranges)[name]
        start = index.put({name: own.start}).at(self.values)
        return _Axis(
            place, start, self.shape[place], index.factor(name) * own.step, size
        )

    def split(
        self, index: Affine, inner: list[str], names: list[str], size: int
    ) -> "list[_Axis] | None":
        """Returns slices of an axis that several parameters number."""
        inner = sorted(inner, key=index.factor, reverse=True)
        sizes = [self.shape[names.index(name)] for name in inner]
        own = dict(self.ranges)
        ordered = all(
            index.factor(name) * own[name].step == math.prod(sizes[k + 1 :])
            for k, name in enumerate(inner)
        )
        first = index.put({name: own[name].start for name in inner}).number
        if not ordered or first != 0 or math.prod(sizes) != size:
            return None
        return [
            _Axis(names.index(name), 0, n, 1, n)
            for name, n in zip(inner, sizes, strict=True)
        ]

    def indices(self, memlet: Memlet) -> tuple[Any, ...]:
        """Returns arrays of the indices of all iterations."""
        if any(own.ends != (own.start,) for own in memlet.subset):
            raise ConfigError(f"{memlet} cannot be lowered: its range depends on maps")
        full = (own.start.at({**self.values, **self.grids}) for own in memlet.subset)
        return tuple(jnp.broadcast_to(jnp.asarray(i), self.shape) for i in full)


class _Axis(NamedTuple):
    """A slice of an axis: a parameter's place, or -1; start, size, step; all of it."""

    place: int
    start: Any
    size: int
    step: int
    whole: int


def _length(own: Range, values: Mapping[str, Any]) -> int:
    """Returns the number of integers in a range; its ends may be traced, not this."""
    gaps = [(end - own.start).at(values) for end in own.ends]
    return max(min(gaps) // own.step + 1, 0)


def _cut(array: Any, axes: Sequence[_Axis]) -> Any:
    """Returns slices of all axes."""
    for n, axis in enumerate(axes):
        if axis.size == axis.whole and axis.step == 1:
            continue
        if isinstance(axis.start, jax.Array):
            if axis.size > 1 and axis.step != 1:
                at = axis.start + axis.step * jnp.arange(axis.size)
                array = jnp.take(array, at, axis=n)
            else:
                array = lax.dynamic_slice_in_dim(array, axis.start, axis.size, n)
            continue
        low = axis.start if axis.step > 0 else axis.start + axis.step * (axis.size - 1)
        high = low + abs(axis.step) * (axis.size - 1) + 1
        array = lax.slice_in_dim(array, low, high, abs(axis.step), n)
        array = jnp.flip(array, n) if axis.step < 0 else array
    return array


def _paste(array: Any, axes: Sequence[_Axis], value: Any) -> Any:
    """Returns an array with slices of all axes replaced."""
    if value.shape == array.shape and all(axis.step == 1 for axis in axes):
        return value
    if all(axis.step == 1 or axis.size == 1 for axis in axes):
        return lax.dynamic_update_slice(array, value, [axis.start for axis in axes])
    lines = [axis.start + axis.step * np.arange(axis.size) for axis in axes]
    return array.at[jnp.ix_(*map(jnp.asarray, lines))].set(value)


def _evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of jnp's functions."""
    match node:
        case ast.Constant(value=value):
            return _number(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return _number(-value)
        case ast.Name(id=name):
            return scope[name] if name in scope else getattr(jnp, name)
        case ast.Call(func=ast.Name(id=name), args=parts):
            pass
        case ast.BinOp(left=left, op=op, right=right):
            name, parts = _OPERATORS[type(op)], [left, right]
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            name, parts = _OPERATORS[type(op)], [left, right]
        case ast.UnaryOp(op=op, operand=operand):
            name, parts = _OPERATORS[type(op)], [operand]
        case _:
            raise ConfigError(f"a tasklet cannot compute {ast.unparse(node)!r}")
    module = special if name in SPECIAL else jnp
    return getattr(module, name)(*(_evaluate(part, scope) for part in parts))


def _number(value: Any) -> Any:
    """Returns a number, unsigned if it is too large for JAX's own integers."""
    limit = np.iinfo(jax.dtypes.canonicalize_dtype(int)).max
    return np.uint64(value) if isinstance(value, int) and value > limit else value


class _Step:
    """Runs a top-level node, as a program of its own if that is asked for."""

    def __init__(
        self, graph: SDFG, node: Node, functions: _Functions, by_node: bool
    ) -> None:
        own = [e for e in accesses(node) if e.memlet.data not in e.private]
        self.names = sorted({e.memlet.data for e in own})
        self.written = sorted({e.memlet.data for e in own if e.writes})
        lowering = _Lowering(graph, functions)

        def run(replaced: _Arrays, kept: _Arrays) -> dict[str, Any]:
            data = {**kept, **replaced}
            lowering.node(node, data, {})
            return {name: data[name] for name in self.written if name in data}

        self.run = jax.jit(run, donate_argnums=0) if by_node else run

    def __call__(self, data: dict[str, Any], inputs: _Arrays) -> None:
        """Replaces what the node writes; what is an input is not overwritten."""
        own = {name: data[name] for name in self.names if name in data}
        replaced = {
            name: value
            for name, value in own.items()
            if name in self.written and value is not inputs.get(name)
        }
        kept = {name: value for name, value in own.items() if name not in replaced}
        data |= self.run(replaced, kept)
