"""The graph of a program: instructions, variables and constants, and their relations.

Cummins et al.: ProGraML, ICML 2021, section 3.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpcjax.core import checks

KINDS = ("instruction", "variable", "constant")
INSTRUCTION = 0
VARIABLE = 1
CONSTANT = 2
FLOWS = ("control", "data", "call")
CONTROL = 0
DATA = 1
CALL = 2
_SHAPES = (("[", "]"), ("(", ")"), ("{{", "}}"))  # of kinds in a flow chart
_ARROWS = ("-->", "-.->", "==>")  # of flows
EXTERNAL = "[external]"  # who calls
UNDEFINED = "; undefined function"  # one that is only declared


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProgramGraph:
    """A directed multigraph; vertex 0 is the instruction "[external]", who calls.

    The instructions of a function are numbered in their order, its entry first.

    Attributes:
      kinds: int32 [vertices], numbers in `KINDS`.
      texts: of vertices: the opcode of an instruction, the type of the others.
      functions: int32 [vertices], the number of its function; -1 for none.
      flow: int32 [edges], numbers in `FLOWS`.
      position: int32 [edges], which successor, or which operand, from 0.
      source: int32 [edges], a vertex.
      target: int32 [edges], a vertex.

    Raises:
      ConfigError: arrays of other lengths, or numbers of no kind, flow or vertex.
    """

    kinds: np.ndarray
    texts: tuple[str, ...]
    functions: np.ndarray
    flow: np.ndarray
    position: np.ndarray
    source: np.ndarray
    target: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.texts)
        per_edge = (self.flow, self.position, self.source, self.target)
        sizes = {len(self.kinds), len(self.functions), count}
        lengths = {len(each) for each in per_edge}
        rule = "a graph's arrays must have an entry for each vertex, or each edge"
        good = len(sizes) == 1 and len(lengths) == 1
        checks.require(good, rule, vertices=sorted(sizes), edges=sorted(lengths))
        bounds = {"kinds": len(KINDS), "flow": len(FLOWS), "position": 2**31}
        for name, above in {**bounds, "source": count, "target": count}.items():
            values = getattr(self, name)
            outside = values[(values < 0) | (values >= above)]
            rule = f"{name} must be in [0, {above})"
            checks.require(not len(outside), rule, first=outside[:1].tolist())

    def count(self, kind: int) -> int:
        """Returns how many vertices are of a kind."""
        return int(np.sum(self.kinds == kind))

    def edges(self, flow: int) -> list[tuple[int, int, int]]:
        """Returns (position, source, target) of the edges of a flow, sorted."""
        own = self.flow == flow
        columns = (self.position[own], self.source[own], self.target[own])
        return sorted(zip(*(each.tolist() for each in columns), strict=True))

    @functools.cached_property
    def following(self) -> tuple[list[list[int]], ...]:
        """For each flow the targets of a vertex's edges, by position."""
        return self._list(0)

    @functools.cached_property
    def preceding(self) -> tuple[list[list[int]], ...]:
        """For each flow the sources of a vertex's edges, by position."""
        return self._list(1)

    def _list(self, end: int) -> tuple[list[list[int]], ...]:
        lists = tuple([[] for _ in self.texts] for _ in FLOWS)
        for flow in range(len(FLOWS)):
            for _, *ends in self.edges(flow):
                lists[flow][ends[end]].append(ends[1 - end])
        return lists

    def numbers(self, words: Iterable[str]) -> np.ndarray:
        """Returns each text's place in a vocabulary, int32; its length if unknown."""
        places = {word: place for place, word in enumerate(words)}
        found = [places.get(text, len(places)) for text in self.texts]
        return np.array(found, np.int32)

    def to_json(self) -> str:
        """Returns the graph in the node-link form that NetworkX reads."""
        vertices = zip(self.kinds.tolist(), self.texts, self.functions, strict=True)
        nodes = [
            {"id": number, "type": kind, "text": text, "function": int(function)}
            for number, (kind, text, function) in enumerate(vertices)
        ]
        columns = (self.flow, self.position, self.source, self.target)
        names = ("flow", "position", "source", "target")
        rows = zip(*(each.tolist() for each in columns), strict=True)
        links = [
            dict(zip(names, row, strict=True), key=key) for key, row in enumerate(rows)
        ]
        form = {"directed": True, "multigraph": True, "graph": {}}
        return json.dumps({**form, "nodes": nodes, "links": links})

    def to_mermaid(self) -> str:
        """Returns a flow chart of the graph, as Markdown's viewers draw it.

        Instructions have corners, variables are round, constants hexagons; control is a
        line, data dots, a call thick, and the numbers are positions.
        """
        lines = ["flowchart LR"]
        for number, (kind, text) in enumerate(zip(self.kinds, self.texts, strict=True)):
            begin, end = _SHAPES[kind]
            lines.append(f"  {number}{begin}{_quote(text)}{end}")
        for flow, arrow in enumerate(_ARROWS):
            lines += [f"  {a} {arrow}|{at}| {b}" for at, a, b in self.edges(flow)]
        return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Returns a label between quotes, with what would end it, or be markup, coded."""
    special = {ord(letter): f"#{ord(letter)};" for letter in '#"<>'}
    return f'"{text.translate(special)}"'


class Builder:
    """The lists of a graph that grows; keys of constants and functions are any."""

    def __init__(self) -> None:
        self.vertices: list[tuple[int, str, int]] = [(INSTRUCTION, EXTERNAL, -1)]
        self.edges: list[tuple[int, int, int, int]] = []
        self.constants: dict[Any, int] = {}
        self.entries: dict[Any, int] = {}
        self.exits: dict[Any, list[int]] = collections.defaultdict(list)
        self.sites: list[tuple[int, Any]] = []

    def add(self, kind: int, text: str, function: int = -1) -> int:
        """Adds a vertex, and returns its number."""
        self.vertices.append((kind, text, function))
        return len(self.vertices) - 1

    def join(self, called: Iterable[Any]) -> ProgramGraph:
        """Adds all calls, from outside of some functions, and returns the graph."""
        for site, callee in (*self.sites, *((0, each) for each in called)):
            self.edges.append((CALL, 0, site, self.entries[callee]))
            self.edges += [(CALL, 0, end, site) for end in self.exits[callee]]
        return from_rows(self.vertices, self.edges)


def from_rows(vertices: Sequence[Any], edges: Sequence[Any]) -> ProgramGraph:
    """Returns the graph of (kind, text, function), and flow to target, of each."""
    kinds, texts, functions = zip(*vertices, strict=True)
    flow, position, source, target = np.array(edges, np.int32).reshape(-1, 4).T
    return ProgramGraph(
        kinds=np.array(kinds, np.int32),
        texts=texts,
        functions=np.array(functions, np.int32),
        flow=flow,
        position=position,
        source=source,
        target=target,
    )


def vocabulary(graphs: Iterable[ProgramGraph]) -> tuple[str, ...]:
    """Returns all texts of graphs, the most frequent first, equals by alphabet."""
    counts = collections.Counter(text for graph in graphs for text in graph.texts)
    return tuple(sorted(counts, key=lambda text: (-counts[text], text)))


def cdfg(graph: ProgramGraph) -> tuple[ProgramGraph, np.ndarray]:
    """Returns the control and data flow graph, and which vertices it keeps.

    It has instructions alone: edges of control, and of data from the instruction that
    makes a value to those that use it, at the position of the operand.
    """
    kept = np.flatnonzero(graph.kinds == INSTRUCTION)
    place = np.full(len(graph.texts), -1)
    place[kept] = np.arange(len(kept))
    makers = graph.preceding[DATA]
    edges = [(CONTROL, *edge) for edge in graph.edges(CONTROL)]
    for position, source, target in graph.edges(DATA):
        if graph.kinds[target] == INSTRUCTION:
            edges += [(DATA, position, maker, target) for maker in makers[source]]
    flow, position, source, target = np.array(edges, np.int32).reshape(-1, 4).T
    smaller = ProgramGraph(
        kinds=graph.kinds[kept],
        texts=tuple(graph.texts[number] for number in kept),
        functions=graph.functions[kept],
        flow=flow,
        position=position,
        source=place[source].astype(np.int32),
        target=place[target].astype(np.int32),
    )
    return smaller, kept
