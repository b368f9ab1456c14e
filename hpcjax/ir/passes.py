"""Rules, applied until none is left that helps."""

from collections.abc import Iterator, Sequence
from typing import Any

from hpcjax.ir.edit import CannotApply, data_of
from hpcjax.ir.removals import (
    DeadDataflow,
    InlineNested,
    MapReduceFusion,
    RedundantArray,
)
from hpcjax.ir.rules import MapFusion
from hpcjax.ir.sdfg import SDFG, Map, moved


def simplify(graph: SDFG) -> SDFG:
    """Returns the graph without what is not needed: copies, dead parts, nests.

    Rules are applied in a fixed order, until none of them can be.
    """
    return _fixed(graph, (InlineNested, RedundantArray, DeadDataflow))


def _fixed(graph: SDFG, rules: Sequence[Any]) -> SDFG:
    while made := _first(graph, rules):
        graph = made
    return graph


def _first(graph: SDFG, rules: Sequence[Any]) -> SDFG | None:
    """Returns what the first rule that can be applied makes of a graph."""
    for rule in rules:
        for each in rule.matches(graph):
            try:
                return graph.apply(each)
            except CannotApply:
                continue
    return None


def fuse_maps(graph: SDFG) -> SDFG:
    """Returns the graph with maps fused where that saves words.

    A map takes the reduction of what it alone writes, and maps are fused where what
    lies between them shrinks to an iteration's part. Candidates are tried in the order
    of the program, until no one saves words. See `SDFG.movement` for what is counted;
    symbols must have values.

    Examples:
      >>> import jax
      >>> from hpcjax import ir
      >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
      >>> program = ir.from_jax(lambda x: (2 * x + 1).sum(1), x)
      >>> for each in (program, program.rewrite(fuse_maps)):
      ...     print(sum(edge.words for edge in each.graph.movement()))
      164
      40
    """
    refused: set[Any] = set()
    graph.movement()  # raises for symbols without values
    known: dict[int, Any] = {}
    while True:
        before, made = _words(graph, known), None
        for each in _candidates(graph):
            key = (each, *_users(graph, each))
            if key in refused:
                continue
            try:
                made = graph.apply(each)
            except CannotApply:
                made = None
            if made and _words(made, known) < before:
                break
            refused.add(key)
            made = None
        if made is None:
            return graph
        graph = made


def _words(graph: SDFG, known: dict[int, Any]) -> int:
    """Returns the words of all nodes; those of nodes that stay are counted once."""
    for _, node in graph.nodes():
        if id(node) not in known:
            # With the node, for whose id no other one may come.
            known[id(node)] = node, sum(each.words for each in moved(node, {}))
    return sum(known[id(node)][1] for _, node in graph.nodes())


def _users(graph: SDFG, rule: Any) -> Iterator[Any]:
    """Yields the nodes of a candidate, which a refusal holds for."""
    names = {*vars(rule).values()}
    yield from (node for _, node in graph.nodes() if node.id in names)


def _candidates(graph: SDFG) -> Iterator[Any]:
    """Yields fusions of nodes between which lies what nothing else uses."""
    readers: dict[str, set[str]] = {}
    for _, node in graph.nodes():
        for data in data_of(node, writes=False):
            readers.setdefault(data, set()).add(node.id)
    kinds = {node.id: node for _, node in graph.nodes()}
    for _, node in graph.nodes():
        if not isinstance(node, Map):
            continue
        for data in sorted(data_of(node, writes=True)):
            others = readers.get(data, set()) - {node.id}
            if len(others) != 1 or not graph.arrays[data].transient:
                continue
            other = kinds[others.pop()]
            if isinstance(other, Map):
                yield MapFusion(node.id, other.id)
            elif getattr(other, "kind", "") == "reduce":
                yield MapReduceFusion(node.id, other.id)
