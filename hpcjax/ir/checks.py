"""What a valid graph fulfils; errors name state and edge."""

import ast
from collections.abc import Collection, Iterator

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.ir import affine
from hpcjax.ir.overlap import countable, meeting
from hpcjax.ir.propagation import least, propagate
from hpcjax.ir.sdfg import REDUCERS, SDFG, Access, Code, Map, Nested, Node, accesses

_SYNTAX = (
    *(ast.Module, ast.Assign, ast.Name, ast.expr_context, ast.Constant, ast.Call),
    *(ast.BinOp, ast.operator, ast.Compare, ast.cmpop, ast.UnaryOp, ast.USub),
)


def check(graph: SDFG, ranges: affine.Ranges = ()) -> None:
    """Raises ConfigError unless a graph is valid.

    Subsets are within their containers, names are defined and unique, and no two
    iterations of a map write one element, or read what another writes, unless a
    resolution of conflicts is named. Races that depend on symbols are found when these
    have values.

    Args:
      graph: what is checked.
      ranges: of symbols that do not take all positive values, such as a counter.
    """
    seen: set[str] = set()
    for place, node in graph.nodes():
        where = f"graph {graph.name!r}, {graph.states[place].name}"
        try:
            _check_node(graph, node, (*graph.symbols,), seen)
            for each in accesses(node):
                _check_access(graph, each._replace(ranges=(*ranges, *each.ranges)))
            for inner, around in _maps(node):
                _check_races(inner, around)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def _check_node(
    graph: SDFG, node: Node, known: Collection[str], seen: set[str]
) -> None:
    """Checks names, from outside in."""
    if node.id in seen:
        raise ConfigError(f"two nodes have the id {node.id!r}")
    seen.add(node.id)
    if isinstance(node, Nested):
        return _check_nested(graph, node, known)
    if isinstance(node, Code):
        return _check_code(graph, node, known)
    for name, own in node.ranges:
        if name in known or name in graph.arrays:
            raise ConfigError(f"{node.id}: parameter {name!r} has the name of another")
        _check_defined(node.id, own.names, known)
        known = (*known, name)
    for inner in node.body:
        if isinstance(inner, Nested):
            raise ConfigError(f"{inner.id}: a nested graph cannot be in a map")
        _check_node(graph, inner, known, seen)
    return None


def _check_defined(where: str, names: Collection[str], known: Collection[str]) -> None:
    for name in sorted(set(names) - set(known)):
        raise ConfigError(f"{where}: undefined symbol {name!r}; defined: {[*known]}")


def _check_nested(graph: SDFG, node: Nested, known: Collection[str]) -> None:
    runs = affine.Range.of(f"0:{node.times}")
    counted = [(node.counter, runs)] if node.counter else []
    check(node.graph.put(dict(node.symbols)), counted)
    inner, given = node.graph.arrays, dict(node.arguments)
    values = dict(node.symbols)
    wanted = {name for name, each in inner.items() if not each.transient}
    symbols = {*values, *([node.counter] if node.counter else [])}
    if len(given) != len({*given.values()}):
        raise ConfigError(f"{node.id}: two arguments are one container: {given}")
    if wanted != set(given) or symbols != set(node.graph.symbols):
        wanted |= set(node.graph.symbols)
        raise ConfigError(f"{node.id}: arguments must be {sorted(wanted)}")
    for name, outer in given.items():
        shape = tuple(size.put(values) for size in inner[name].shape)
        if outer not in graph.arrays or graph.arrays[outer].shape != shape:
            raise ConfigError(f"{node.id}: {outer!r} has not the shape of {name!r}")
    for own in values.values():
        _check_defined(node.id, own.names, known)
    sized = [each for array in inner.values() for each in array.shape]
    sized += [
        end - own.start
        for _, part in node.graph.nodes()
        for each in accesses(part)
        for own in (*(r for _, r in each.ranges), *each.memlet.subset)
        for end in own.ends
    ]
    if any(node.counter in each.names for each in sized):
        raise ConfigError(f"{node.id}: sizes depend on the counter {node.counter!r}")


def _check_code(graph: SDFG, node: Code, known: Collection[str]) -> None:
    for _, memlet in (*node.inputs, *node.outputs):
        for own in memlet.subset:
            _check_defined(f"{node.id}, {memlet}", own.names, known)
            if node.kind == "tasklet" and own.ends != (own.start,):
                raise ConfigError(f"{node.id}: {memlet} must be one element")
        if memlet.wcr and memlet.wcr not in REDUCERS:
            raise ConfigError(f"{node.id}: wcr must be one of {[*REDUCERS]}: {memlet}")
        if len(memlet.subset) != len(graph.arrays[memlet.data].shape):
            raise ConfigError(
                f"{node.id}: {memlet} must have an index for each of "
                f"{len(graph.arrays[memlet.data].shape)} axes"
            )
    if node.kind == "reduce" and node.code not in REDUCERS:
        raise ConfigError(
            f"{node.id}: must reduce by one of {[*REDUCERS]}: {node.code}"
        )
    if node.kind == "tasklet":
        read = {name for name, _ in node.inputs}
        written = {name for name, _ in node.outputs}
        tree = ast.parse(node.code)
        if not all(isinstance(line, ast.Assign) for line in tree.body) or not all(
            isinstance(each, _SYNTAX) for each in ast.walk(tree)
        ):
            raise ConfigError(f"{node.id}: must be assignments of calls: {node.code!r}")
        names = {
            n.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        calls = {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        for name in sorted(name for name in calls if not hasattr(np, name)):
            raise ConfigError(f"{node.id}: numpy and jnp have no function {name!r}")
        made = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - names
        used = names - calls - made - {"inf", "nan", "pi"}
        _check_defined(node.id, used, read | written | set(known))
        for name in sorted((read | written) & set(known)):
            raise ConfigError(f"{node.id}: {name!r} is a parameter, and no edge's name")


def _check_access(graph: SDFG, access: Access) -> None:
    reach = propagate(access.memlet.subset, access.ranges)
    shape = graph.arrays[access.memlet.data].shape
    if reach.subset is None or all(
        least(own.start) >= 0 and any(least(size - 1 - end) >= 0 for end in own.ends)
        for own, size in zip(reach.subset, shape, strict=True)
    ):
        return
    edge = f"{access.node}, {access.memlet}"
    if not countable(access) or any(size.names for size in shape):
        raise ConfigError(f"{edge}: not shown to be within {[*map(str, shape)]}")
    sizes = [size.constant for size in shape]
    for values in affine.iterate(access.ranges, {}):
        for element in affine.elements(access.memlet.subset, values):
            if not all(0 <= i < n for i, n in zip(element, sizes, strict=True)):
                raise ConfigError(
                    f"{edge}: element {element} is not within {sizes}, at {values}"
                )


def _maps(
    node: Node, around: affine.Ranges = ()
) -> Iterator[tuple[Map, affine.Ranges]]:
    """Yields maps, each with the ranges around it."""
    if isinstance(node, Map):
        yield node, around
        for inner in node.body:
            yield from _maps(inner, (*around, *node.ranges))


def _check_races(node: Map, around: affine.Ranges) -> None:
    outer = [name for name, _ in around]
    own = [
        each._replace(ranges=(*around, *each.ranges))
        for each in accesses(node)
        if each.memlet.data not in each.private
    ]
    for place, one in enumerate(own):
        for other in own[place:]:
            resolved = one.memlet.wcr and one.memlet.wcr == other.memlet.wcr
            if (one.writes or other.writes) and not resolved:
                found = meeting(one, other, node.params, outer)
                if found and found.known:
                    what = "written" if one.writes and other.writes else "read, written"
                    raise ConfigError(f"{node.id}: {what} by two iterations: {found}")
