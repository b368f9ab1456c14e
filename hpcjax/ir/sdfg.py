"""Programs as graphs of data movement: what each node reads and writes, by element.

A state is a sequence of nodes, and means what these do one after the other: each edge
of data goes from a node to a later one, so that there are no cycles. The iterations of
a map are parallel. A graph does not change: rules return new ones.
"""

import ast
import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.ir.affine import Affine, Index, Range, Ranges, Values, count

# What resolves conflicts and reduces, with the value that changes nothing.
REDUCERS = {
    "add": 0.0,
    "multiply": 1.0,
    "maximum": float("-inf"),
    "minimum": float("inf"),
}

# Functions of code that are scipy's; all others are numpy's.
SPECIAL = ("erf", "erfc", "erfinv", "gammaln", "digamma")


class Array(NamedTuple):
    """A container.

    Attributes:
      shape: of symbols; empty for a scalar.
      dtype: of its elements.
      transient: whether nothing outside of the graph sees it.
    """

    shape: tuple[Affine, ...]
    dtype: str = "float64"
    transient: bool = False

    @property
    def whole(self) -> tuple[Range, ...]:
        """The subset of all its elements."""
        return tuple(Range(Affine(), (size - 1,)) for size in self.shape)


class Memlet(NamedTuple):
    """What moves along an edge.

    Attributes:
      data: a container.
      subset: which elements, a range for each axis.
      wcr: of a write into what is there: one of `REDUCERS`; "" to overwrite.
    """

    data: str
    subset: tuple[Range, ...]
    wcr: str = ""

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.subset))
        return (f"{self.wcr} " if self.wcr else "") + f"{self.data}[{inside}]"

    def put(self, values: Mapping[str, Index]) -> "Memlet":
        """Returns it with expressions in the place of names."""
        return self._replace(subset=tuple(each.put(values) for each in self.subset))


@dataclasses.dataclass(frozen=True)
class Code:
    """A node that computes.

    Attributes:
      id: unique in its graph.
      kind: "tasklet": `code` is assignments to the names of outputs; "copy": elements
        in order; "reduce": of the `axes` by one of `REDUCERS`; "library": `code` names
        what it does, an einsum such as "ij,jk->ik" or a function that is given.
      code: see kind.
      inputs: edges, by the names that `code` has for them.
      outputs: the same.
      axes: those that a reduction takes away.
    """

    id: str
    kind: Literal["tasklet", "copy", "reduce", "library"]
    code: str
    inputs: tuple[tuple[str, Memlet], ...]
    outputs: tuple[tuple[str, Memlet], ...]
    axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Map:
    """A node whose body runs for all values of parameters, in any order.

    Attributes:
      id: unique in its graph.
      ranges: of the parameters; one may depend on those before it.
      body: nodes of an iteration, one after the other.
      private: containers of which each iteration has its own.
    """

    id: str
    ranges: tuple[tuple[str, Range], ...]
    body: tuple["Node", ...]
    private: tuple[str, ...] = ()

    @property
    def params(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return tuple(name for name, _ in self.ranges)


@dataclasses.dataclass(frozen=True)
class Nested:
    """A node that runs a graph several times, one after the other; not in a map.

    Attributes:
      id: unique in its graph.
      graph: what runs; none of its containers is read before it is written, but those
        that are arguments.
      arguments: for each of its containers that is not transient, one of this graph.
      times: how often it runs.
      counter: the symbol that counts the runs from 0; "" for none.
      symbols: what its other symbols are here.
    """

    id: str
    graph: "SDFG"
    arguments: tuple[tuple[str, str], ...]
    times: int = 1
    counter: str = ""
    symbols: tuple[tuple[str, Affine], ...] = ()


Node: TypeAlias = "Code | Map | Nested"


class State(NamedTuple):
    """Nodes that run one after the other."""

    name: str
    nodes: tuple[Node, ...]


class Access(NamedTuple):
    """An edge between a container and a node.

    Attributes:
      memlet: what moves in an iteration.
      writes: whether into the container.
      ranges: parameters of the maps around it, outermost first.
      node: the id of what computes.
      private: containers that belong to an iteration.
    """

    memlet: Memlet
    writes: bool
    ranges: Ranges
    node: str
    private: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class SDFG:
    """A program.

    Attributes:
      name: for people.
      arrays: containers by name.
      states: they run one after the other.
      symbols: names of positive integers that sizes and ranges depend on.
      history: rules that were applied, with their fields, and the digest of the graph
        that the first was applied to.
    """

    name: str
    arrays: Mapping[str, Array]
    states: tuple[State, ...]
    symbols: tuple[str, ...] = ()
    history: tuple[tuple[str, dict[str, Any]], ...] = dataclasses.field(
        default=(), compare=False
    )

    def apply(self, rule: Any) -> "SDFG":
        """Returns the graph that a rule makes of this one, which stays as it is.

        Raises:
          CannotApply: the result might differ; says which element forbids it.
        """
        rule.check(self)
        first = () if self.history else (("graph", {"digest": self.digest}),)
        done = (*first, (type(rule).__name__, dataclasses.asdict(rule)))
        made = rule.apply(self)
        return dataclasses.replace(made, history=self.history + done)

    def to_json(self) -> str:
        """Returns all but the history as text, the same in every process."""
        fields = dataclasses.asdict(
            self, dict_factory=lambda own: {k: v for k, v in own if k != "history"}
        )
        # Shapes and steps may be numpy's integers.
        return json.dumps(fields, sort_keys=True, default=operator.index)

    @functools.cached_property
    def digest(self) -> str:
        """A short text that differs between graphs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def bind(self, symbols: Values) -> "SDFG":
        """Returns the graph with numbers in the place of symbols.

        Raises:
          ConfigError: one that it has not, or is not a positive integer.
        """
        for name, value in symbols.items():
            if name not in self.symbols:
                hint = nearest(name, self.symbols)
                raise ConfigError(f"graph {self.name!r} has no symbol {name!r}{hint}")
            if value < 1:
                raise ConfigError(f"symbols are positive: got {name}={value}")
        return self.put(symbols)

    def put(self, values: Mapping[str, Index]) -> "SDFG":
        """Returns the graph with expressions in the place of symbols."""
        if not values:
            return self
        arrays = {
            name: each._replace(shape=tuple(size.put(values) for size in each.shape))
            for name, each in self.arrays.items()
        }
        states = tuple(
            State(name, tuple(put(node, values) for node in nodes))
            for name, nodes in self.states
        )
        new = {
            name: None
            for value in values.values()
            for name in sorted(Affine.of(value).names)
        }
        left = tuple(name for name in self.symbols if name not in values)
        symbols = tuple(dict.fromkeys((*left, *new)))
        return dataclasses.replace(self, arrays=arrays, states=states, symbols=symbols)

    def movement(self, symbols: Values | None = None) -> "tuple[Traffic, ...]":
        """Returns what edges of top-level nodes and nested graphs move.

        An edge moves each element of its subset once: iterations that differ in no
        index share it. In a node, edges with one subset are one.

        Args:
          symbols: their values.

        Raises:
          ConfigError: a symbol has no value.
        """
        bound = self.bind(symbols or {})
        if bound.symbols:
            raise ConfigError(f"symbols without values: {', '.join(bound.symbols)}")
        return tuple(each for _, node in bound.nodes() for each in moved(node, {}))

    def nodes(self) -> Iterator[tuple[int, Node]]:
        """Yields top-level nodes, each with the place of its state."""
        for place, state in enumerate(self.states):
            yield from ((place, node) for node in state.nodes)


class Traffic(NamedTuple):
    """What an edge moves in all runs.

    Attributes:
      node: the id of the top-level node, or of one of a nested graph.
      data: the container, by its name in that graph.
      writes: whether into it.
      words: elements.
      code: of library nodes, what they do.
      kind: of node: "map", which is also a tasklet in none, "copy", which is also a
        map that only copies or converts, "reduce" or "library".
    """

    node: str
    data: str
    writes: bool
    words: int
    code: str = ""
    kind: str = "map"


def moved(node: Node, values: Values, times: int = 1) -> Iterator[Traffic]:
    """Yields what the edges of a node move, in so many runs."""
    if isinstance(node, Nested):
        inner = {name: own.at(values) for name, own in node.symbols}
        inner |= {node.counter: 0} if node.counter else {}
        for _, each in node.graph.nodes():
            yield from moved(each, inner, times * node.times)
        return
    kind, code = "map", ""
    if isinstance(node, Code) and node.kind != "tasklet":
        kind, code = node.kind, node.code if node.kind == "library" else ""
    if all(_copies(each) for each, _ in codes(node)):
        kind = "copy"
    edges = (
        (e.memlet.data, e.writes, e.memlet.subset, _needed(e))
        for e in accesses(node)
        if e.memlet.data not in e.private
    )
    for data, writes, subset, ranges in dict.fromkeys(edges):
        words = times * count(ranges, subset, values)
        yield Traffic(node.id, data, writes, words, code, kind)


def _copies(code: Code) -> bool:
    """Whether it writes what it reads, and computes nothing."""
    if code.kind != "tasklet":
        return code.kind == "copy"
    read = {name for name, _ in code.inputs}
    lines = (line for line in parse(code.code).body if isinstance(line, ast.Assign))
    return all(
        isinstance(own.value, ast.Name) and own.value.id in read for own in lines
    )


def _needed(access: Access) -> tuple[tuple[str, Range], ...]:
    """Returns the ranges that an edge's subset depends on."""
    names = frozenset().union(*(own.names for own in access.memlet.subset))
    kept = []
    for name, own in reversed(access.ranges):
        if name in names:
            names |= own.names
            kept.append((name, own))
    return tuple(reversed(kept))


@functools.lru_cache(2**10)
def parse(code: str) -> ast.Module:
    """Returns the tree of a tasklet's code."""
    try:
        return ast.parse(code)
    except SyntaxError:
        raise ConfigError(f"code must be assignments of calls: got {code!r}") from None


def assigned(code: str) -> set[str]:
    """Returns the names that a tasklet's code assigns to."""
    names = (n for n in ast.walk(parse(code)) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def codes(node: Node, ranges: Ranges = ()) -> Iterator[tuple[Code, Ranges]]:
    """Yields what computes in a node, with the parameters around it."""
    if isinstance(node, Code):
        yield node, ranges
    elif isinstance(node, Map):
        for inner in node.body:
            yield from codes(inner, (*ranges, *node.ranges))


def accesses(
    node: Node, ranges: Ranges = (), private: frozenset[str] = frozenset()
) -> Iterator[Access]:
    """Yields the edges of a node, what is read before what is written.

    Those of a nested graph are edges to this graph's containers, for all its runs.
    """
    if isinstance(node, Code):
        for own, writes in ((node.inputs, False), (node.outputs, True)):
            for _, memlet in own:
                yield Access(memlet, writes, ranges, node.id, private)
    elif isinstance(node, Map):
        for inner in node.body:
            own = private.union(node.private)
            yield from accesses(inner, (*ranges, *node.ranges), own)
    else:
        names, values = dict(node.arguments), dict(node.symbols)
        runs = Range(Affine(), (Affine((), node.times - 1),))
        outer = (*ranges, (node.counter or f"{node.id}.run", runs))
        for _, inner in node.graph.nodes():
            for each in accesses(inner):
                if each.memlet.data in names:
                    memlet = each.memlet.put(values)
                    within = tuple((name, r.put(values)) for name, r in each.ranges)
                    yield each._replace(
                        memlet=memlet._replace(data=names[memlet.data]),
                        ranges=(*outer, *within),
                    )


def rewrite(
    node: Node,
    on_memlet: Callable[[Memlet], Memlet],
    on_range: Callable[[Range], Range] = lambda own: own,
    on_code: Callable[[str], str] = lambda code: code,
) -> Node:
    """Returns a node with other memlets, ranges and code of tasklets."""
    if isinstance(node, Map):
        inner = (rewrite(each, on_memlet, on_range, on_code) for each in node.body)
        ranges = tuple((name, on_range(own)) for name, own in node.ranges)
        private = tuple(on_memlet(Memlet(name, ())).data for name in node.private)
        return dataclasses.replace(
            node, ranges=ranges, body=tuple(inner), private=private
        )
    if isinstance(node, Nested):
        arguments = (
            (name, on_memlet(Memlet(outer, ())).data) for name, outer in node.arguments
        )
        return dataclasses.replace(node, arguments=tuple(arguments))
    inputs, outputs = (
        tuple((name, on_memlet(memlet)) for name, memlet in own)
        for own in (node.inputs, node.outputs)
    )
    code = on_code(node.code) if node.kind == "tasklet" else node.code
    return dataclasses.replace(node, code=code, inputs=inputs, outputs=outputs)


def put(node: Node, values: Mapping[str, Index]) -> Node:
    """Returns a node with expressions in the place of parameters or symbols."""
    if isinstance(node, Nested):
        symbols = tuple((name, own.put(values)) for name, own in node.symbols)
        return dataclasses.replace(node, symbols=symbols)

    def replace(code: str) -> str:
        tree = ast.parse(code)
        if not any(isinstance(n, ast.Name) and n.id in values for n in ast.walk(tree)):
            return code
        return ast.unparse(_Names(values).visit(tree))

    return rewrite(node, lambda m: m.put(values), lambda r: r.put(values), replace)


def rename(node: Node, names: Mapping[str, str]) -> Node:
    """Returns a node with other containers."""
    return rewrite(node, lambda m: m._replace(data=names.get(m.data, m.data)))


class _Names(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, values: Mapping[str, Index]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.values:
            return node
        text = str(Affine.of(self.values[node.id]))
        return ast.parse(text, mode="eval").body
