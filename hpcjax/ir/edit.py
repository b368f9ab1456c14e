"""What rules need to find, compare and replace nodes."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcjax.core.errors import ConfigError, HpcjaxError, nearest
from hpcjax.ir.overlap import Meeting, countable, touched
from hpcjax.ir.sdfg import (
    SDFG,
    Access,
    Map,
    Nested,
    Node,
    accesses,
    assigned,
    codes,
    put,
)


class CannotApply(HpcjaxError, ValueError):
    """A rule might change what a graph computes.

    Attributes:
      cause: in a word or two, the condition that is not fulfilled.
    """

    exit_code = 2

    def __init__(self, rule: object, cause: str, detail: object = "") -> None:
        super().__init__(f"{rule}: {cause}" + (f": {detail}" if detail else ""))
        self.cause = cause


class Found(NamedTuple):
    """A node, those beside it, its place among them, its state, the maps around it."""

    node: Any
    beside: tuple[Node, ...]
    place: int
    state: int
    around: tuple[Map, ...]

    @property
    def ranges(self) -> tuple[Any, ...]:
        """Ranges of the maps around it."""
        return tuple(own for each in self.around for own in each.ranges)


def walk(graph: SDFG) -> Iterator[Found]:
    """Yields all nodes, also those in maps, in their order."""

    def inside(nodes: tuple[Node, ...], state: int, around: tuple[Map, ...]) -> Any:
        for place, node in enumerate(nodes):
            yield Found(node, nodes, place, state, around)
            if isinstance(node, Map):
                yield from inside(node.body, state, (*around, node))

    for number, state in enumerate(graph.states):
        yield from inside(state.nodes, number, ())


def find(graph: SDFG, name: str) -> Found:
    """Returns a node.

    Raises:
      ConfigError: there is none of that id.
    """
    every = {each.node.id: each for each in walk(graph)}
    if name not in every:
        hint = nearest(name, every)
        raise ConfigError(f"graph {graph.name!r} has no node {name!r}{hint}")
    return every[name]


def replace(graph: SDFG, found: Found, nodes: Sequence[Node]) -> SDFG:
    """Returns the graph with other nodes in the place of one."""
    before, after = found.beside[: found.place], found.beside[found.place + 1 :]
    return replace_all(graph, found, (*before, *nodes, *after))


def replace_all(graph: SDFG, found: Found, nodes: Sequence[Node]) -> SDFG:
    """Returns the graph with other nodes in the place of all that are beside one."""
    if found.around:
        parent = find(graph, found.around[-1].id)
        body = dataclasses.replace(parent.node, body=tuple(nodes))
        return replace(graph, parent, [body])
    states = list(graph.states)
    states[found.state] = states[found.state]._replace(nodes=tuple(nodes))
    return dataclasses.replace(graph, states=tuple(states))


def outer(node: Node, around: Sequence[Any] = ()) -> list[Access]:
    """Returns the edges to containers that are not an iteration's own."""
    found = accesses(node, tuple(around))
    return [each for each in found if each.memlet.data not in each.private]


def data_of(node: Node, *, writes: bool) -> set[str]:
    """Returns the containers that a node writes, or those that it reads."""
    return {each.memlet.data for each in outer(node) if each.writes == writes}


def depend(first: Node, second: Node) -> bool:
    """Whether the order of two nodes matters, by the containers that they touch."""
    read, written = (data_of(first, writes=w) for w in (False, True))
    others = data_of(second, writes=True)
    return bool(written & (others | data_of(second, writes=False)) or read & others)


def only_in(graph: SDFG, data: str, *nodes: Node) -> bool:
    """Whether nothing in a graph but these nodes touches a container."""

    def edges(parts: Iterable[Node]) -> int:
        found = (each.memlet for part in parts for each in accesses(part))
        return sum(each.data == data for each in found)

    every = [node for _, node in graph.nodes()]
    return edges(every) == edges(nodes) and not passed(every, data)


def passed(nodes: Iterable[Node], data: str) -> bool:
    """Whether a container is an argument of nested graphs."""
    nested = (node for node in nodes if isinstance(node, Nested))
    return any(data in dict(node.arguments).values() for node in nested)


def fresh(name: str, taken: Collection[str]) -> str:
    """Returns a name that is not taken."""
    while name in taken:
        name += "_"
    return name


def names_of(graph: SDFG) -> set[str]:
    """Returns the names of symbols, containers and parameters."""
    params = (n for each in walk(graph) for n in getattr(each.node, "params", ()))
    return {*graph.symbols, *graph.arrays, *params}


def new_id(graph: SDFG, kind: str, also: Collection[str] = ()) -> str:
    """Returns an id that no node has."""
    taken = {each.node.id for each in walk(graph)} | {*also}
    numbers = (f"{kind}.{n}" for n in itertools.count(1))
    return next(name for name in numbers if name not in taken)


def free_params(node: Node, taken: Collection[str]) -> Node:
    """Returns a node whose maps' parameters have other names than those taken."""
    if not isinstance(node, Map):
        return node
    edges = connectors(node)
    names = {name: fresh(name, {*taken, *edges}) for name in node.params}
    ranges = tuple((names[name], own.put(names)) for name, own in node.ranges)
    inner = {*taken, *names.values()}
    body = tuple(free_params(put(each, names), inner) for each in node.body)
    return dataclasses.replace(node, ranges=ranges, body=body)


def connectors(node: Node) -> set[str]:
    """Returns the names of edges and values in the code of a node."""
    found = set()
    for code, _ in codes(node):
        found |= {name for name, _ in (*code.inputs, *code.outputs)}
        found |= assigned(code.code) if code.kind == "tasklet" else set()
    return found


def uncovered(
    reads: Sequence[Access], writes: Sequence[Access], params: Sequence[str]
) -> Meeting | None:
    """Returns an element that an iteration reads and did not write, if there is one.

    Args:
      reads: edges of one container in a map.
      writes: those into it in another, whose parameters have the same names.
      params: of the maps and of those around.
    """
    left = [each for each in reads if not any(_within(each, w) for w in writes)]
    if not left:
        return None
    if not all(map(countable, (*left, *writes))):
        return Meeting(left[0].memlet.data, "not decided")
    written: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for iteration, element in touched(writes, params):
        written.setdefault(iteration, set()).add(element)
    for iteration, element in touched(left, params):
        if element not in written.get(iteration, ()):
            writer = (i for i, own in written.items() if element in own)
            return Meeting(left[0].memlet.data, element, next(writer, ()), iteration)
    return None


def _within(read: Access, write: Access) -> bool:
    """Whether bounds tell that one edge is in the other in each iteration."""
    return read.ranges[: len(write.ranges)] == write.ranges and all(
        one == other
        or (
            (other.step == 1 and len(one.ends) == len(other.ends) == 1)
            and all(
                gap.number is not None and gap.constant >= 0
                for gap in (one.start - other.start, other.ends[0] - one.ends[0])
            )
        )
        for one, other in zip(read.memlet.subset, write.memlet.subset, strict=True)
    )
