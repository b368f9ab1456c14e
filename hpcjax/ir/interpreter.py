"""Runs graphs element by element in numpy: what a graph means, and what it must not do.

It shares nothing with what lowers graphs, so that it can judge it.
"""

import ast
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy import special

from hpcjax.core import checks as values_checks
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.ir.affine import Values, iterate
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
    parse,
)

Order = Literal["forward", "reverse", "drawn"]
_OPERATORS: Mapping[type, str] = {
    **{ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"},
    **{ast.FloorDiv: "floor_divide", ast.Mod: "mod", ast.Pow: "power"},
    **{ast.USub: "negative", ast.Lt: "less", ast.LtE: "less_equal", ast.Eq: "equal"},
    **{ast.Gt: "greater", ast.GtE: "greater_equal", ast.NotEq: "not_equal"},
}
_Log = dict[tuple[str, tuple[int, ...]], dict[str, set[int]]]


def interpret(
    graph: SDFG,
    inputs: Mapping[str, Any],
    symbols: Values | None = None,
    *,
    order: Order = "forward",
    seed: int = 0,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    valid: bool = False,
) -> dict[str, np.ndarray]:
    """Returns the containers that are not transient after a run.

    Args:
      graph: the program.
      inputs: arrays by container; others begin as NaN, or 0 if they have none.
      symbols: their values.
      order: in which the iterations of every map run.
      seed: of a drawn order.
      functions: of library nodes, by their code: arrays of the inputs' subsets to a
        tuple of the outputs'.
      valid: whether the graph is known to be, and need not be checked.

    Raises:
      ConfigError: the graph is not valid, an input has another shape, a symbol has no
        value, or two iterations of a map touch an element that one writes, without a
        resolution of conflicts.

    Examples:
      >>> from hpcjax.ir import Builder
      >>> program = Builder("double")
      >>> program.array("x", 3)
      >>> with program.map(i="0:3"):
      ...     program.tasklet("b = 2 * a", a="x[i]", b="x[i]")
      >>> interpret(program.build(), {"x": [1, 2, 3]})["x"].tolist()
      [2.0, 4.0, 6.0]
    """
    values_checks.require_choice("order", order, ("forward", "reverse", "drawn"))
    bound = graph.bind(symbols or {})
    if bound.symbols:
        raise ConfigError(f"symbols without values: {', '.join(bound.symbols)}")
    if not valid:
        check(bound)
    for name in inputs:
        if name not in bound.arrays:
            hint = nearest(name, bound.arrays)
            raise ConfigError(f"there is no container {name!r}{hint}")
    data = {}
    for name, each in bound.arrays.items():
        shape = tuple(size.constant for size in each.shape)
        data[name] = _unset(shape, each.dtype)
        if name in inputs:
            given = np.asarray(inputs[name])
            if given.shape != shape:
                raise ConfigError(f"{name!r} has shape {shape}: got {given.shape}")
            data[name][...] = given
    run = _Run(order, np.random.default_rng(seed), functions or {})
    run.graph(bound, data, {})
    return {n: a for n, a in data.items() if not bound.arrays[n].transient}


def _unset(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan if np.dtype(dtype).kind in "fc" else 0, dtype)


class _Run:
    """The state of an interpretation: an order, and who touched what."""

    def __init__(
        self,
        order: Order,
        rng: np.random.Generator,
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.order, self.rng, self.functions = order, rng, functions
        # Of each open map: its log, the iteration, and the containers of an iteration.
        self.open: list[list[Any]] = []

    def graph(self, graph: SDFG, data: dict[str, np.ndarray], values: Values) -> None:
        """Runs all nodes, one after the other."""
        for state in graph.states:
            for node in state.nodes:
                self.node(node, data, values)

    def node(self, node: Node, data: dict[str, np.ndarray], values: Values) -> None:
        """Runs a node with the values of the parameters around it."""
        if isinstance(node, Map):
            self.map(node, data, values)
        elif isinstance(node, Code):
            self.code(node, data, values)
        else:
            self.nested(node, data, values)

    def nested(self, node: Nested, data: dict[str, np.ndarray], values: Values) -> None:
        """Runs a graph several times, with containers of its own."""
        symbols = {name: own.at(values) for name, own in node.symbols}
        names = dict(node.arguments)
        for turn in range(node.times):
            symbols |= {node.counter: turn} if node.counter else {}
            inner = {
                name: data[names[name]]
                if name in names
                else _unset(tuple(size.at(symbols) for size in each.shape), each.dtype)
                for name, each in node.graph.arrays.items()
            }
            self.graph(node.graph, inner, symbols)

    def map(self, node: Map, data: dict[str, np.ndarray], values: Values) -> None:
        """Runs all iterations in the order that was asked for."""
        iterations = list(iterate(node.ranges, values))
        if self.order == "reverse":
            iterations.reverse()
        elif self.order == "drawn":
            iterations = [iterations[k] for k in self.rng.permutation(len(iterations))]
        log: _Log = {}
        self.open.append([log, 0, node.private])
        for place, own in enumerate(iterations):
            self.open[-1][1] = place
            for name in node.private:
                data[name] = _unset(data[name].shape, data[name].dtype)
            for inner in node.body:
                self.node(inner, data, own)
        self.open.pop()
        _judge(node.id, log)

    def code(self, node: Code, data: dict[str, np.ndarray], values: Values) -> None:
        """Reads, computes, and writes or resolves."""
        read = {name: self.read(memlet, data, values) for name, memlet in node.inputs}
        try:
            wide = [data[memlet.data].dtype for _, memlet in node.outputs]
            made = self.compute(node, read, values, wide)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{node.id}: {error}") from error
        for name, memlet in node.outputs:
            place = self.touch(memlet, memlet.wcr or "write", values)
            array, at = data[memlet.data], _at(place)
            shape = np.shape(array[at])
            if np.size(made[name]) != math.prod(shape):
                raise ConfigError(
                    f"{node.id}: {memlet} has shape {shape}: got {np.shape(made[name])}"
                )
            value = np.reshape(made[name], shape)
            if value.dtype.kind in "iu":  # Sums of whole numbers wrap around.
                value = value.astype(array.dtype)
            if memlet.wcr:
                value = getattr(np, memlet.wcr)(array[at], value)
            array[at] = value

    def compute(
        self, node: Code, read: dict[str, Any], values: Values, dtypes: Sequence[Any]
    ) -> Mapping[str, Any]:
        """Returns the outputs of a node, of so many dtypes, by name."""
        if node.kind == "tasklet":
            scope: dict[str, Any] = {**values, **{n: a.item() for n, a in read.items()}}
            with np.errstate(all="ignore"):
                for line in parse(node.code).body:
                    assert isinstance(line, ast.Assign)
                    for target in line.targets:
                        scope[ast.unparse(target)] = _evaluate(line.value, scope)
            return scope
        arrays = list(read.values())
        if node.kind == "reduce":
            first = REDUCERS[node.code]
            limited = np.isinf(first) and arrays[0].dtype.kind in "biu"
            given = {} if limited else {"initial": first}
            reducer = getattr(np, node.code).reduce
            results = (reducer(*arrays, axis=node.axes, **given),)
        elif node.kind == "copy":
            results = tuple(arrays)
        elif node.code in self.functions:
            results = self.functions[node.code](*arrays)
        elif "->" in node.code:
            wide = (array.astype(dtypes[0]) for array in arrays)
            results = (np.einsum(node.code, *wide),)
        else:
            raise ConfigError(f"no function {node.code!r} was given")
        return dict(zip((name for name, _ in node.outputs), results, strict=True))

    def read(self, memlet: Memlet, data: dict[str, np.ndarray], values: Values) -> Any:
        """Returns a copy of the elements of a subset."""
        place = self.touch(memlet, "read", values)
        found = data[memlet.data][_at(place)].copy()
        return found.reshape([len(own) for own in place])

    def touch(self, memlet: Memlet, how: str, values: Values) -> list[range]:
        """Notes an access in the logs of all maps around, and returns its indices."""
        place = [own.at(values) for own in memlet.subset]
        logs = []
        for log, iteration, private in reversed(self.open):
            if memlet.data in private:
                break
            logs.append((log, iteration))
        if logs:
            for element in itertools.product(*place):
                for log, iteration in logs:
                    ways = log.setdefault((memlet.data, element), {})
                    ways.setdefault(how, set()).add(iteration)
        return place


def _evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of numpy's functions."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return scope[name] if name in scope else getattr(np, name)
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
    module = special if name in SPECIAL else np
    return getattr(module, name)(*(_evaluate(part, scope) for part in parts))


def _at(place: list[range]) -> tuple[Any, ...]:
    """Returns what selects a product of indices, the quicker way if it is one."""
    points = tuple(own[0] for own in place if len(own) == 1)
    return points if len(points) == len(place) else np.ix_(*place)


def _judge(name: str, log: _Log) -> None:
    """Raises for an element that iterations touch, and their order decides how."""
    for (data, element), ways in log.items():
        alone = len(ways) == 1 and "write" not in ways
        iterations = set().union(*ways.values())
        if not alone and len(iterations) > 1:
            raise ConfigError(
                f"race in {name}: iterations {sorted(iterations)[:2]} {sorted(ways)} "
                f"element {data}[{', '.join(map(str, element))}]"
            )
