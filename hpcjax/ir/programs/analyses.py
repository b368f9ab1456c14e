"""Data-flow analyses of program graphs, which label vertices for a root.

Cummins et al.: ProGraML, ICML 2021, appendix A. Steps are those that an iterative
analysis takes, by which examples are chosen.
"""

import collections
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.ir.programs.graph import (
    CONTROL,
    DATA,
    INSTRUCTION,
    VARIABLE,
    ProgramGraph,
)

UPDATES = 1000  # of dominators, after which an analysis is given up
ROOTS = 10  # of a graph at most
_COMMUTATIVE = ("add", "fadd", "mul", "fmul", "and", "or", "xor")


class NotConverged(ConfigError):
    """An analysis needs more updates than it may make."""


class Labels(NamedTuple):
    """What an analysis says.

    Attributes:
      values: bool [vertices], those that it finds.
      steps: how many it takes.
    """

    values: np.ndarray
    steps: int


Analysis = Callable[[ProgramGraph, int], Labels]


def _label(graph: ProgramGraph, found: Iterable[int], steps: int) -> Labels:
    values = np.zeros(len(graph.texts), bool)
    values[list(found)] = True
    return Labels(values, steps)


def _require(graph: ProgramGraph, root: int, roots: list[int], what: str) -> None:
    """Raises ConfigError unless a vertex can be the root of an analysis."""
    count = len(graph.texts)
    checks.require(0 <= root < count, f"root must be in [0, {count})", root=root)
    if root not in roots:
        told = graph.texts[root]
        checks.require(False, f"root must be {what}", root=root, text=told)


def _levels(lists: Iterable[list[list[int]]], root: int) -> dict[int, int]:
    """Returns the distances from a root, whose own is 1, nearest first."""
    lists = tuple(lists)
    found, waiting = {root: 1}, collections.deque([root])
    while waiting:
        vertex = waiting.popleft()
        for each in lists:
            for other in each[vertex]:
                if other not in found:
                    found[other] = found[vertex] + 1
                    waiting.append(other)
    return found


def _instructions(graph: ProgramGraph) -> list[int]:
    """Returns the instructions that are in functions with a body."""
    own = (graph.kinds == INSTRUCTION) & (graph.functions >= 0)
    return np.flatnonzero(own).tolist()


def _made_variables(graph: ProgramGraph) -> list[int]:
    """Returns the variables that an instruction makes."""
    variables = np.flatnonzero(graph.kinds == VARIABLE).tolist()
    return [each for each in variables if graph.preceding[DATA][each]]


def reachability(graph: ProgramGraph, root: int) -> Labels:
    """Labels the instructions that control reaches from one, itself among them.

    Steps are the levels of a search in breadth.

    Raises:
      ConfigError: the root is no instruction of a function.
    """
    _require(graph, root, _instructions(graph), "an instruction of a function")
    levels = _levels([graph.following[CONTROL]], root)
    return _label(graph, levels, max(levels.values()))


def dominance(graph: ProgramGraph, root: int) -> Labels:
    """Labels the instructions that control reaches only through the root.

    Dom(n) = {n} ∪ ⋂ Dom(p) over the predecessors p of n, the greatest solution in the
    root's function; what has no predecessor is dominated by itself alone, in dead code
    too. Steps are updates of sets, from a list of the instructions in their order, at
    whose end the successors of one that changed are put.

    Raises:
      ConfigError: the root is no instruction of a function.
      NotConverged: the sets need more than 1,000 updates.
    """
    _require(graph, root, _instructions(graph), "an instruction of a function")
    function = graph.functions[root]
    own = [n for n in _instructions(graph) if graph.functions[n] == function]
    bit = {vertex: 1 << place for place, vertex in enumerate(own)}
    before = {n: graph.preceding[CONTROL][n] for n in own}
    whole = (1 << len(own)) - 1
    # The entry is dominated by itself, whatever leads back to it.
    fixed = {n for n in own if n == own[0] or not before[n]}
    found = {n: bit[n] if n in fixed else whole for n in own}
    waiting, steps = collections.deque(n for n in own if n not in fixed), 0
    while waiting:
        vertex = waiting.popleft()
        new = whole
        for other in before[vertex]:
            new &= found[other]
        new |= bit[vertex]
        if new != found[vertex] and vertex not in fixed:
            found[vertex], steps = new, steps + 1
            if steps > UPDATES:
                rule = f"dominators must be found in {UPDATES} updates of sets"
                raise NotConverged(f"{rule}: got {root=}, instructions={len(own)}")
            waiting += graph.following[CONTROL][vertex]
    return _label(graph, [n for n in own if found[n] & bit[root]], steps)


def data_dependence(graph: ProgramGraph, root: int) -> Labels:
    """Labels the instructions that the value of a variable depends on.

    Steps are the levels of a search in breadth, against edges of data.

    Raises:
      ConfigError: the root is no variable that an instruction makes.
    """
    known = _made_variables(graph)
    _require(graph, root, known, "a variable that an instruction makes")
    levels = _levels([graph.preceding[DATA]], root)
    found = [n for n in levels if graph.kinds[n] == INSTRUCTION]
    return _label(graph, found, max(levels.values()))


def liveness(graph: ProgramGraph, root: int) -> Labels:
    """Labels the variables that are live after an instruction.

    LiveOut(n) = ⋃ LiveIn(s) over the successors s of n and LiveIn(n) = uses(n) ∪
    (LiveOut(n) − defs(n)): the least solution over the instructions from which control
    reaches an exit of the function; of others both are empty. A phi uses all values
    that come in, whatever the edge taken. Steps are the largest distance to a live
    variable, along edges of control and data in any direction.

    Raises:
      ConfigError: the root is no instruction of a function, or nothing is live there.
    """
    live = _live_out(graph)
    known = [n for n in _instructions(graph) if live[n]]
    _require(graph, root, known, "an instruction after which a variable is live")
    sides = (graph.following, graph.preceding)
    lists = [side[flow] for side in sides for flow in (CONTROL, DATA)]
    levels = _levels(lists, root)
    return _label(graph, live[root], max(levels[each] for each in live[root]))


@functools.lru_cache(1)
def _live_out(graph: ProgramGraph) -> dict[int, frozenset[int]]:
    """Returns what is live after each instruction."""
    after, before = graph.following[CONTROL], graph.preceding[CONTROL]
    own = _instructions(graph)
    leaves: set[int] = set()
    for end in (n for n in own if not after[n]):
        leaves |= _levels([before], end).keys()
    uses, makes = {}, {}
    for n in own:
        operands = graph.preceding[DATA][n]
        uses[n] = {v for v in operands if graph.kinds[v] == VARIABLE}
        makes[n] = set(graph.following[DATA][n])
    out: dict[int, frozenset[int]] = dict.fromkeys(own, frozenset())
    waiting = collections.deque(reversed([n for n in own if n in leaves]))
    while waiting:
        n = waiting.popleft()
        into = frozenset(uses[n] | (out[n] - makes[n]))
        for other in before[n]:
            if not into <= out[other]:
                out[other] |= into
                waiting.append(other)
    return out


def _key(graph: ProgramGraph, vertex: int) -> tuple[Any, ...] | None:
    """Returns what equal expressions have in common; None without operands."""
    operands, opcode = graph.preceding[DATA][vertex], graph.texts[vertex]
    if opcode in _COMMUTATIVE:
        operands = sorted(operands)
    return (opcode, *operands) if operands else None


@functools.lru_cache(1)
def _expressions(graph: ProgramGraph) -> dict[int, list[int]]:
    """Returns the set of each instruction that is not alone in it."""
    sets = collections.defaultdict(list)
    for vertex in _instructions(graph):
        if key := _key(graph, vertex):
            sets[key].append(vertex)
    return {n: own for own in sets.values() if len(own) > 1 for n in own}


def subexpressions(graph: ProgramGraph, root: int) -> Labels:
    """Labels the instructions that compute what the root does, in the whole module.

    They have its opcode and its operands, in any order where this does not matter.
    Predicates, types, flags and callees are not compared. Steps are 2.

    Raises:
      ConfigError: the root is no instruction that has such another.
    """
    sets = _expressions(graph)
    _require(graph, root, [*sets], "an instruction with a common subexpression")
    return _label(graph, sets[root], 2)


def _live_roots(graph: ProgramGraph) -> list[int]:
    return [n for n, live in _live_out(graph).items() if live]


ANALYSES: Mapping[str, Analysis] = types.MappingProxyType(
    {
        "reachability": reachability,
        "dominance": dominance,
        "data_dependence": data_dependence,
        "liveness": liveness,
        "subexpressions": subexpressions,
    }
)
_ROOTS: Mapping[str, Callable[[ProgramGraph], Iterable[int]]] = {
    "reachability": _instructions,
    "dominance": _instructions,
    "data_dependence": _made_variables,
    "liveness": _live_roots,
    "subexpressions": _expressions,
}


def draw_roots(graph: ProgramGraph, task: str, rng: np.random.Generator) -> list[int]:
    """Returns roots of an analysis: a tenth of those that there are, at most ten.

    Args:
      graph: of a program.
      task: the name of an analysis.
      rng: for the draw.

    Raises:
      ConfigError: an unknown analysis.
    """
    checks.require_choice("task", task, tuple(_ROOTS))
    known = sorted(_ROOTS[task](graph))
    count = min(-(-len(known) // ROOTS), ROOTS)
    return rng.permutation(known)[:count].tolist()
