"""The paper's selection of layouts: shortest paths through the program.

A vertex is a place in the sequence of operators with the layouts of the tensors that
are used before and behind it; an edge is an operator with its fastest configuration
that fits both ends.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import networkx as nx

from hpcjax.core.errors import ConfigError
from hpcjax.ir.layouts import Binding, Pairs, Problem, Times, make_problem

State = tuple[tuple[str, str], ...]


def select_by_paths(
    times: Times, same: Pairs = (), *, parts: Sequence[Sequence[str]] = ()
) -> Binding:
    """Returns layouts by shortest paths, which may not be the best ones.

    Parts of the program are bound one after the other; what one has bound is kept by
    the next. Within a part, a tensor that must be equal to one of before is not
    remembered between the two: where the path has chosen other layouts for it, the
    first is kept and a new path found. Without parts and with no such tensor the path
    is the best.

    Args:
      times: configurations of each operator, in an order of execution.
      same: pairs of tensors that must have the same layout.
      parts: operators of each part, in order: forward operators first, or those of the
        backward pass (the paper's `fp_first` and `bp_first`); empty for one part
        (`combined`).

    Raises:
      ConfigError: as `select_layouts`; parts that are not all operators; or what is
        bound leaves no path, even if other layouts would fit.

    Examples:
      >>> from hpcjax.ir import Configuration
      >>> either = [Configuration({"x": "ab"}, 1.0), Configuration({"x": "ba"}, 2.0)]
      >>> times = {"first": either, "second": [Configuration({"x": "ba"}, 1.0)]}
      >>> select_by_paths(times).seconds
      3.0
    """
    problem = make_problem(times, same)
    parts = parts or (tuple(times),)
    if sorted(name for part in parts for name in part) != sorted(times):
        raise ConfigError(
            f"parts must have every operator once: got {parts}, operators={list(times)}"
        )
    bound: dict[str, str] = {}
    for part in parts:
        bound = _bind(problem, times, tuple(part), bound)
    return problem.bind(bound, float("-inf"))


def _bind(
    problem: Problem, times: Times, part: tuple[str, ...], bound: Mapping[str, str]
) -> dict[str, str]:
    """Returns the layouts of before and those of a part's variables."""
    bound = dict(bound)
    while True:
        chosen = dict(bound)
        torn = None
        for operator, key in _shortest(problem, times, part, bound):
            for name, layout in zip(problem.variables[operator], key, strict=True):
                if chosen.setdefault(name, layout) != layout:
                    torn = torn or name
        if torn is None:
            return chosen
        bound[torn] = chosen[torn]


def _shortest(
    problem: Problem, times: Times, part: tuple[str, ...], bound: Mapping[str, str]
) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the operators of a part with the layouts of their variables."""
    graph: nx.DiGraph = nx.DiGraph()
    states: set[State] = {()}
    graph.add_node((0, ()))
    for place, operator in enumerate(part):
        crossing = _crossing(problem, times, part, place + 1)
        after = set()
        for state in states:
            for key, seconds, end in _steps(problem, operator, state, bound, crossing):
                one, other = (place, state), (place + 1, end)
                old = graph.get_edge_data(one, other)
                if old is None or seconds < old["weight"]:
                    graph.add_edge(one, other, weight=seconds, key=key)
                after.add(end)
        states = after
    last = (len(part), ())
    if last not in graph:
        raise ConfigError(
            f"no path through {list(part)} fits what is bound: {dict(bound)}"
        )
    path = nx.dijkstra_path(graph, (0, ()), last)
    keys = [graph.edges[one, other]["key"] for one, other in itertools.pairwise(path)]
    return list(zip(part, keys, strict=True))


def _crossing(
    problem: Problem, times: Times, part: tuple[str, ...], place: int
) -> frozenset[str]:
    """Returns the variables of tensors that are used before and behind a place."""
    used = [
        {t for o in own for t in times[o][0].layouts}
        for own in (part[:place], part[place:])
    ]
    return frozenset(problem.of[tensor] for tensor in used[0] & used[1])


def _steps(
    problem: Problem,
    operator: str,
    state: State,
    bound: Mapping[str, str],
    crossing: frozenset[str],
) -> Iterator[tuple[tuple[str, ...], float, State]]:
    """Yields configurations that fit a state: layouts, time and the state behind."""
    known = {**dict(state), **bound}
    names = problem.variables[operator]
    for key, configuration in problem.operators[operator].items():
        own = dict(zip(names, key, strict=True))
        if all(known.get(name, layout) == layout for name, layout in own.items()):
            behind: dict[str, Any] = {**dict(state), **own}
            kept = tuple(sorted((n, own) for n, own in behind.items() if n in crossing))
            yield key, configuration.seconds, kept
