"""What a valid graph fulfils; errors name state and edge."""

import ast
import itertools
import math
from collections.abc import Collection, Iterator

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.ir import affine
from hpcjax.ir.overlap import countable, meeting
from hpcjax.ir.propagation import least, propagate
from hpcjax.ir.sdfg import (
    REDUCERS,
    SDFG,
    SPECIAL,
    Access,
    Code,
    Map,
    Nested,
    Node,
    accesses,
    parse,
)

_SYNTAX = (
    *(ast.Module, ast.Assign, ast.Name, ast.expr_context, ast.Constant, ast.Call),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.Compare, ast.Lt, ast.LtE, ast.Eq, ast.Gt, ast.GtE, ast.NotEq),
    *(ast.UnaryOp, ast.USub),
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
    for name, each in graph.arrays.items():
        try:
            np.dtype(each.dtype)
        except TypeError:
            raise ConfigError(f"{name}: no dtype {each.dtype!r}") from None
        for size in each.shape:
            _check_defined(f"container {name}", size.names, graph.symbols)
    for place, node in graph.nodes():
        where = f"graph {graph.name!r}, {graph.states[place].name}"
        try:
            _check_node(graph, node, (*graph.symbols,), seen)
            for each in accesses(node):
                _check_access(graph, each._replace(ranges=(*ranges, *each.ranges)))
            for inner, around in _maps(node):
                _check_races(inner, (*ranges, *around))
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
    if node.times < 0:
        raise ConfigError(f"{node.id}: times must be at least 0: got {node.times}")
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
        _check_tasklet(node, known)
    else:
        _check_shapes(node)


def _check_tasklet(node: Code, known: Collection[str]) -> None:
    tree = parse(node.code)
    parts = [*ast.walk(tree)]
    lines = [line for line in tree.body if isinstance(line, ast.Assign)]
    if (
        len(lines) < len(tree.body)
        or not all(isinstance(each, _SYNTAX) for each in parts)
        or any(len(each.ops) > 1 for each in parts if isinstance(each, ast.Compare))
        or any(isinstance(getattr(each, "value", None), str) for each in parts)
    ):
        raise ConfigError(f"{node.id}: must be assignments of calls: {node.code!r}")
    called = [each.func for each in parts if isinstance(each, ast.Call)]
    for name in map(ast.unparse, called):
        elementwise = isinstance(getattr(np, name, None), np.ufunc)
        elementwise = elementwise or name in ("where", *SPECIAL)
        if name in known or not elementwise:
            raise ConfigError(f"{node.id}: no elementwise function {name!r}")
    here = {*known, *(name for name, _ in node.inputs)}
    for line in lines:
        names = {n.id for n in ast.walk(line.value) if isinstance(n, ast.Name)}
        names -= {*map(ast.unparse, called), "inf", "nan", "pi"}
        _check_defined(node.id, names, sorted(here))
        here |= {ast.unparse(target) for target in line.targets}
    edges = {name for name, _ in (*node.inputs, *node.outputs)}
    _check_defined(node.id, edges, sorted(here))
    for name in sorted((edges | (here - {*known})) & {*known}):
        raise ConfigError(f"{node.id}: {name!r} is a parameter, and no edge's name")


def _check_shapes(node: Code) -> None:
    """Compares what a node makes with where it goes, if sizes are numbers."""
    shapes = [
        tuple(_length(own) for own in memlet.subset)
        for _, memlet in (*node.inputs, *node.outputs)
    ]
    if node.kind == "library" and "->" not in node.code:
        return
    made, wanted = _made(node, shapes[: len(node.inputs)]), shapes[-1]
    if any(-1 in shape for shape in shapes):
        return
    if node.kind == "copy":
        same = math.prod(made) == math.prod(wanted)
    else:
        same = [n for n in made if n != 1] == [n for n in wanted if n != 1]
    if not same:
        target = node.outputs[0][1]
        raise ConfigError(f"{node.id}: {target} must be of shape {made}: is {wanted}")


def _length(own: affine.Range) -> int:
    """Returns the number of integers in a range, -1 if it depends on names."""
    gap = (own.ends[0] - own.start).number
    known = gap is not None and len(own.ends) == 1
    return max(gap // own.step + 1, 0) if gap is not None and known else -1


def _made(node: Code, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of what a copy, a reduction or an einsum makes."""
    if node.kind == "copy":
        return shapes[0]
    if node.kind == "reduce":
        rank = len(shapes[0])
        left = [axis for axis in range(rank) if not {axis, axis - rank} & {*node.axes}]
        if len(left) + len(node.axes) != rank:
            raise ConfigError(f"{node.id}: axes {node.axes} are not {rank} axes' own")
        return tuple(shapes[0][axis] for axis in left)
    letters, _, kept = node.code.partition("->")
    operands, sizes = letters.split(","), dict[str, int]()
    good = [*map(len, operands)] == [*map(len, shapes)] and {*kept} <= {*letters}
    for letter, n in zip("".join(operands), itertools.chain(*shapes), strict=False):
        good &= sizes.setdefault(letter, n) in (n, -1) or n == -1
    if not good:
        raise ConfigError(f"{node.id}: {node.code!r} is not for shapes {shapes}")
    return tuple(sizes[letter] for letter in kept)


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
