"""Rules that rewrite a graph and leave what it computes.

A rule names nodes by their ids: `graph.apply(MapFusion("map.1", "map.2"))`. `matches`
lists those that a graph has a pattern for; `check` raises `CannotApply` if the result
might differ, with the element and the iterations that forbid it.

References:
  Ben-Nun et al., Stateful Dataflow Multigraphs, SC 2019.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

from hpcjax.ir.affine import Affine, Range
from hpcjax.ir.edit import (
    CannotApply,
    Found,
    connectors,
    data_of,
    depend,
    find,
    free_params,
    fresh,
    names_of,
    new_id,
    only_in,
    outer,
    replace,
    replace_all,
    uncovered,
    walk,
)
from hpcjax.ir.overlap import meeting
from hpcjax.ir.sdfg import SDFG, Map, Memlet, Node, put, rewrite


@dataclasses.dataclass(frozen=True)
class MapFusion:
    """Makes one map of two, of which the second reads what the first writes.

    What lies between them shrinks to an iteration's part, if nothing else uses it.

    Attributes:
      first: a map.
      second: one that comes later in the same state or map.
    """

    first: str
    second: str

    # Negative controls leave the condition out.
    aliases: ClassVar[bool] = True

    @classmethod
    def matches(cls, graph: SDFG) -> list["MapFusion"]:
        """Returns all pairs of maps that are beside each other."""
        maps = [each for each in walk(graph) if isinstance(each.node, Map)]
        return [
            cls(one.node.id, other.id)
            for one in maps
            for other in one.beside[one.place + 1 :]
            if isinstance(other, Map)
        ]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply unless each iteration needs its own of the first alone."""
        self._second(find(graph, self.first), find(graph, self.second))

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph with one map, which has the id of the first."""
        one, other = find(graph, self.first), find(graph, self.second)
        second = self._second(one, other)
        first, arrays, private = one.node, dict(graph.arrays), []
        for data in sorted(data_of(first, writes=True) & data_of(second, writes=False)):
            alone = arrays[data].transient and only_in(
                graph, data, one.node, other.node
            )
            part = _part(first, second, data) if alone else None
            if part:
                arrays[data] = arrays[data]._replace(
                    shape=tuple(own.ends[0] - own.start + 1 for own in part)
                )
                first, second = (_shift(node, data, part) for node in (first, second))
                private.append(data)
        fused = dataclasses.replace(
            first,
            body=first.body + second.body,
            private=first.private + second.private + tuple(private),
        )
        between = one.beside[one.place + 1 : other.place]
        later = _later(first, between)
        earlier = [node for node in between if node not in later]
        nodes = (*one.beside[: one.place], *earlier, fused, *later)
        made = replace_all(graph, one, (*nodes, *other.beside[other.place + 1 :]))
        return dataclasses.replace(made, arrays=arrays)

    def _second(self, one: Found, other: Found) -> Map:
        """Returns the second map with the parameters of the first."""
        maps = isinstance(one.node, Map) and isinstance(other.node, Map)
        if not maps or one.beside is not other.beside or one.place >= other.place:
            raise CannotApply(self, "order", "two maps, the second after the first")
        between = data_of(one.node, writes=True) & data_of(other.node, writes=False)
        if not between:
            raise CannotApply(self, "nothing between")
        for each in outer(one.node):
            if each.memlet.wcr and each.memlet.data in between:
                raise CannotApply(self, "conflict resolution", each.memlet)
        for node in _later(one.node, one.beside[one.place + 1 : other.place]):
            if depend(node, other.node):
                raise CannotApply(self, "path", f"{node.id} must run between them")
        refused = None
        for second in _renamed(one.node, other.node):
            try:
                self._compare(one, second, between)
            except CannotApply as error:
                refused = refused or error
            else:
                return second
        raise refused or CannotApply(self, "ranges", _told(one.node, other.node))

    def _compare(self, one: Found, second: Map, between: set[str]) -> None:
        """Raises CannotApply unless iterations meet in their own elements alone."""
        names = [name for name, _ in one.ranges]
        firsts, seconds = outer(one.node, one.ranges), outer(second, one.ranges)
        for data in sorted(between):
            reads = [e for e in seconds if e.memlet.data == data and not e.writes]
            writes = [e for e in firsts if e.memlet.data == data and e.writes]
            missing = uncovered(reads, writes, [*names, *second.params])
            if missing:
                cause = "cover" if missing.known else "not decided"
                raise CannotApply(self, cause, missing)
        if connectors(second) & {*second.params}:
            raise CannotApply(self, "names", "an edge has the name of a parameter")
        pairs = itertools.product(firsts, seconds) if self.aliases else ()
        for a, b in pairs:
            resolved = a.memlet.wcr and a.memlet.wcr == b.memlet.wcr
            if (a.writes or b.writes) and not resolved:
                found = meeting(a, b, second.params, names)
                if found:
                    cause = "alias" if found.known else "not decided"
                    raise CannotApply(self, cause, found)


def _told(*maps: Map) -> str:
    return " and ".join(str({n: str(own) for n, own in m.ranges}) for m in maps)


def _later(node: Node, others: Sequence[Node]) -> list[Node]:
    """Returns nodes that must run after a node, or after one that must."""
    later = [node]
    for each in others:
        if any(depend(before, each) for before in later):
            later.append(each)
    return later[1:]


def _renamed(first: Map, second: Map) -> Iterator[Map]:
    """Yields the second map with parameters of the first, where ranges are equal."""
    if len(first.ranges) != len(second.ranges):
        return
    body = tuple(free_params(each, first.params) for each in second.body)
    for order in itertools.permutations(second.ranges):
        names = dict(zip((name for name, _ in order), first.params, strict=True))
        ranges = [own.put(names) for _, own in order]
        if all(map(_equal, ranges, (own for _, own in first.ranges))):
            inner = tuple(put(each, names) for each in body)
            yield dataclasses.replace(second, ranges=first.ranges, body=inner)


def _equal(one: Range, other: Range) -> bool:
    free = one.names | other.names
    return one == other or (not free and one.at({}) == other.at({}))


def _part(first: Map, second: Map, data: str) -> tuple[Range, ...] | None:
    """Returns what an iteration writes of a container; None if it must stay whole."""
    ones = [each for each in outer(first) if each.memlet.data == data]
    others = [each for each in outer(second) if each.memlet.data == data]
    parts = {each.memlet.subset for each in ones}
    part = parts.pop()
    direct = all(each.writes and each.ranges == first.ranges for each in ones)
    plain = all(
        own.step == 1
        and len(own.ends) == 1
        and (own.ends[0] - own.start).number is not None
        for own in part
    )
    if parts or not direct or not plain or any(each.writes for each in others):
        return None
    bare = [each._replace(ranges=()) for each in (*others, ones[0])]
    return None if uncovered(bare[:-1], bare[-1:], ()) else part


def _shift(node: Map, data: str, part: Sequence[Range]) -> Map:
    """Returns a map in which indices of a container begin where a part does."""

    def move(memlet: Memlet) -> Memlet:
        if memlet.data != data:
            return memlet
        subset = (
            Range(own.start - to.start, tuple(e - to.start for e in own.ends), own.step)
            for own, to in zip(memlet.subset, part, strict=True)
        )
        return memlet._replace(subset=tuple(subset))

    body = tuple(rewrite(each, move) for each in node.body)
    return dataclasses.replace(node, body=body)


@dataclasses.dataclass(frozen=True)
class MapTiling:
    """Splits a map into one over tiles and one within a tile.

    Attributes:
      map: which.
      sizes: iterations of a tile, by parameter; others stay within.
    """

    map: str
    sizes: tuple[tuple[str, int], ...]

    # Negative controls leave the cut at the end out.
    cut: ClassVar[bool] = True

    @classmethod
    def matches(cls, graph: SDFG, size: int = 2) -> list["MapTiling"]:
        """Returns tilings of all parameters of all maps."""
        maps = [each.node for each in walk(graph) if isinstance(each.node, Map)]
        return [cls(m.id, tuple((name, size) for name in m.params)) for m in maps]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply for ranges that depend on each other, or a wrong size."""
        node, sizes = find(graph, self.map).node, dict(self.sizes)
        if not isinstance(node, Map) or not {*sizes} <= {*node.params}:
            raise CannotApply(self, "parameters", "must be those of a map")
        if not sizes or not all(isinstance(n, int) and n >= 1 for n in sizes.values()):
            raise CannotApply(self, "sizes", "must be integers >= 1")
        for name, own in node.ranges:
            if own.names & {*sizes} or (name in sizes and own.names & {*node.params}):
                raise CannotApply(self, "ranges", f"{name} in {own} depends on others")

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph with the map in another one, over tiles."""
        found, sizes = find(graph, self.map), dict(self.sizes)
        taken = names_of(graph) | connectors(found.node)
        tiles, inner = [], []
        for name, own in found.node.ranges:
            if name not in sizes:
                inner.append((name, own))
                continue
            tile = fresh(f"{name}_tile", taken)
            last = Affine.of(tile) + (sizes[name] - 1) * own.step
            tiles.append((tile, own._replace(step=own.step * sizes[name])))
            ends = (
                (last, *own.ends) if self.cut and _ragged(own, sizes[name]) else (last,)
            )
            inner.append((name, Range(Affine.of(tile), ends, own.step)))
        within = dataclasses.replace(found.node, ranges=tuple(inner))
        return replace(
            graph, found, [Map(new_id(graph, "map"), tuple(tiles), (within,))]
        )


def _ragged(own: Range, size: int) -> bool:
    """Whether the last tile may not be full."""
    length = (own.ends[0] - own.start).number
    return len(own.ends) > 1 or length is None or (length // own.step + 1) % size != 0


@dataclasses.dataclass(frozen=True)
class MapInterchange:
    """Swaps a map with the one that is all of its body.

    Attributes:
      map: the outer one.
    """

    map: str

    @classmethod
    def matches(cls, graph: SDFG) -> list["MapInterchange"]:
        """Returns all maps with a map in them."""
        maps = (each.node for each in walk(graph) if isinstance(each.node, Map))
        return [
            cls(m.id) for m in maps if any(isinstance(each, Map) for each in m.body)
        ]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply unless the nest is perfect and ranges are independent."""
        node = find(graph, self.map).node
        alone = isinstance(node, Map) and len(node.body) == 1 and not node.private
        if not alone or not isinstance(node.body[0], Map):
            raise CannotApply(self, "nest", "one map, and nothing else, must be in it")
        for name, own in node.body[0].ranges:
            if own.names & {*node.params}:
                raise CannotApply(self, "ranges", f"{name} in {own} depends on others")

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph with the inner map outside."""
        found = find(graph, self.map)
        (inner,) = found.node.body
        within = dataclasses.replace(found.node, body=inner.body, private=inner.private)
        swapped = dataclasses.replace(inner, body=(within,), private=())
        return replace(graph, found, [swapped])
