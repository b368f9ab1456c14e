"""Rules that remove containers, reductions and nested graphs."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.ir.affine import Affine, Range, point
from hpcjax.ir.edit import (
    CannotApply,
    connectors,
    data_of,
    find,
    free_params,
    fresh,
    names_of,
    new_id,
    only_in,
    passed,
    replace,
    uncovered,
)
from hpcjax.ir.overlap import countable, touched
from hpcjax.ir.propagation import propagate
from hpcjax.ir.sdfg import (
    REDUCERS,
    SDFG,
    Access,
    Code,
    Map,
    Memlet,
    Nested,
    Node,
    State,
    accesses,
    rename,
    rewrite,
)


@dataclasses.dataclass(frozen=True)
class RedundantArray:
    """Removes a copy of a whole container, and the transient one of its two.

    Attributes:
      copy: a node of this kind.
    """

    copy: str

    @classmethod
    def matches(cls, graph: SDFG) -> list["RedundantArray"]:
        """Returns all copies that are not in maps."""
        return [
            cls(node.id)
            for _, node in graph.nodes()
            if isinstance(node, Code) and node.kind == "copy"
        ]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply unless one container can be the other all the time."""
        self._names(graph)

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph without the copy."""
        names = self._names(graph)
        made = replace(graph, find(graph, self.copy), [])
        states = tuple(
            State(name, tuple(rename(node, names) for node in nodes))
            for name, nodes in made.states
        )
        arrays = {name: a for name, a in graph.arrays.items() if name not in names}
        return dataclasses.replace(made, states=states, arrays=arrays)

    def _names(self, graph: SDFG) -> dict[str, str]:
        """Returns which container takes the place of which."""
        found = find(graph, self.copy)
        if found.around or getattr(found.node, "kind", "") != "copy":
            raise CannotApply(self, "scope", "must be a copy that is not in a map")
        source, target = found.node.inputs[0][1], found.node.outputs[0][1]
        arrays = [graph.arrays[each.data] for each in (source, target)]
        if source.data == target.data:
            raise CannotApply(self, "self copy", source)
        whole = source.subset == target.subset == arrays[0].whole
        if not whole or target.wcr or arrays[0][:2] != arrays[1][:2]:
            raise CannotApply(
                self, "shape", f"{source} and {target} must be whole, alike"
            )
        nodes = [node for _, node in graph.nodes()]
        place = nodes.index(found.node)
        before, after = nodes[:place], nodes[place + 1 :]
        if passed(nodes, source.data) and passed(nodes, target.data):
            raise CannotApply(self, "argument", "nested graphs have both")
        reasons = []
        if arrays[0].transient:
            reasons.append(
                self._source(source.data, target.data, before, after, arrays[0])
            )
            if not reasons[-1]:
                return {source.data: target.data}
        if arrays[1].transient:
            reasons.append(self._target(source.data, target.data, before, after))
            if not reasons[-1]:
                return {target.data: source.data}
        raise CannotApply(
            self, "in use" if reasons else "seen from outside", *reasons[:1]
        )

    def _source(
        self,
        source: str,
        target: str,
        before: Sequence[Node],
        after: Sequence[Node],
        array: Any,
    ) -> str:
        """Returns why the source cannot be the target from the beginning."""
        if _touching(after, source) or passed(after, source):
            return f"{source} is used later"
        users = [_touching([node], source) != [] for node in before]
        first = users.index(True) if True in users else len(before)
        if _touching(before[first:], target):
            return f"{target} is used while {source} is"
        writes = [e for e in _touching(before, source) if e.writes and not e.memlet.wcr]
        whole = Access(Memlet(source, array.whole), False, (), "")
        boxes = [propagate(e.memlet.subset, e.ranges) for e in writes]
        full = any(box.exact and box.subset == array.whole for box in boxes)
        if not full and uncovered([whole], writes, ()):
            return f"{source} is not written as a whole"
        return ""

    def _target(
        self, source: str, target: str, before: Sequence[Node], after: Sequence[Node]
    ) -> str:
        """Returns why the target cannot be the source after the copy."""
        if _touching(before, target) or passed(before, target):
            return f"{target} is used before"
        if any(each.writes for each in _touching(after, target)):
            return f"{target} is written later"
        users = [_touching([node], target) != [] for node in after]
        last = len(users) - users[::-1].index(True) if True in users else 0
        if any(each.writes for each in _touching(after[:last], source)):
            return f"{source} is written before the last use of {target}"
        return ""


def _touching(nodes: Iterable[Node], data: str) -> list[Access]:
    return [e for node in nodes for e in accesses(node) if e.memlet.data == data]


@dataclasses.dataclass(frozen=True)
class DeadDataflow:
    """Removes a container that nothing reads, and what only writes it.

    Attributes:
      data: a transient container.
    """

    data: str

    @classmethod
    def matches(cls, graph: SDFG) -> list["DeadDataflow"]:
        """Returns all transient containers."""
        return [cls(name) for name, each in graph.arrays.items() if each.transient]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply for what is read, seen from outside or has effects."""
        if self.data not in graph.arrays:
            hint = nearest(self.data, graph.arrays)
            raise ConfigError(f"there is no container {self.data!r}{hint}")
        nodes = [node for _, node in graph.nodes()]
        if not graph.arrays[self.data].transient:
            raise CannotApply(self, "seen from outside")
        if passed(nodes, self.data):
            raise CannotApply(self, "effects", "a nested graph has it")
        for each in _touching(nodes, self.data):
            if not each.writes:
                raise CannotApply(self, "read", f"{each.node} reads {each.memlet}")
            writer = find(graph, each.node).node
            if writer.kind == "library" and len(writer.outputs) > 1:
                raise CannotApply(self, "effects", f"{each.node} has other outputs")

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph without the container."""
        states = tuple(
            State(name, tuple(self._live(nodes))) for name, nodes in graph.states
        )
        arrays = {name: a for name, a in graph.arrays.items() if name != self.data}
        return dataclasses.replace(graph, states=states, arrays=arrays)

    def _live(self, nodes: Sequence[Node]) -> Iterator[Node]:
        for node in nodes:
            if isinstance(node, Map):
                private = tuple(name for name in node.private if name != self.data)
                body = tuple(self._live(node.body))
                if body:
                    yield dataclasses.replace(node, body=body, private=private)
            elif isinstance(node, Code):
                left = tuple(e for e in node.outputs if e[1].data != self.data)
                if left:
                    yield dataclasses.replace(node, outputs=left)
            else:
                yield node


@dataclasses.dataclass(frozen=True)
class MapReduceFusion:
    """Makes a map resolve conflicts in the result of the reduction behind it.

    Attributes:
      map: writes a transient container.
      reduce: takes all that the map wrote.
    """

    map: str
    reduce: str

    # Negative controls leave the initialisation out.
    initialises: ClassVar[bool] = True

    @classmethod
    def matches(cls, graph: SDFG) -> list["MapReduceFusion"]:
        """Returns all maps with the reductions that read what they write."""
        return [
            cls(node.id, other.id)
            for state in graph.states
            for place, node in enumerate(state.nodes)
            for other in state.nodes[place + 1 :]
            if isinstance(node, Map) and getattr(other, "kind", "") == "reduce"
            if data_of(node, writes=True) & data_of(other, writes=False)
        ]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply unless the map writes all that is reduced once."""
        one, other = find(graph, self.map), find(graph, self.reduce)
        if (
            not isinstance(one.node, Map)
            or getattr(other.node, "kind", "") != "reduce"
            or one.beside is not other.beside
            or one.around
            or one.place >= other.place
        ):
            raise CannotApply(self, "order", "a map, and a reduction behind it")
        source, target = other.node.inputs[0][1], other.node.outputs[0][1]
        writes = [e for e in _touching([one.node], source.data) if e.writes]
        if not graph.arrays[source.data].transient:
            raise CannotApply(self, "seen from outside", source.data)
        reads = len(writes) < len(_touching([one.node], source.data))
        if reads or not only_in(graph, source.data, one.node, other.node):
            raise CannotApply(self, "used elsewhere", source.data)
        if target.wcr or any(each.memlet.wcr for each in writes):
            raise CannotApply(self, "conflict resolution")
        if _touching(one.beside[: other.place], target.data):
            raise CannotApply(self, "in use", f"{target.data} is used before")
        dtypes = [np.dtype(graph.arrays[e.data].dtype) for e in (source, target)]
        if dtypes[0] != dtypes[1]:
            raise CannotApply(self, "dtype", f"{source} is not of {target.data}'s")
        if other.node.code in ("maximum", "minimum") and dtypes[1].kind != "f":
            raise CannotApply(self, "identity", f"{target.data} has no infinity")
        for each in writes:
            _resolved(self, other.node, each.memlet)
        self._once(writes, source)

    def _once(self, writes: Sequence[Access], source: Memlet) -> None:
        """Raises CannotApply unless all of a subset is written, and nothing twice."""
        if len(writes) == 1 and _spans(writes[0], source.subset):
            return
        reduced = Access(source, False, (), "")
        if not all(map(countable, (*writes, reduced))):
            raise CannotApply(self, "not decided", f"what is written of {source}")
        taken, wanted = touched(writes, ()), touched([reduced], ())
        if sorted(taken) != sorted(wanted):
            raise CannotApply(self, "cover", f"{source} is not what is written, once")

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph with the result initialised in a state before."""
        one, other = find(graph, self.map), find(graph, self.reduce)
        source = other.node.inputs[0][1]

        def resolve(memlet: Memlet) -> Memlet:
            same = memlet.data == source.data
            return _resolved(self, other.node, memlet) if same else memlet

        made = replace(graph, other, [])
        made = replace(made, find(made, self.map), [rewrite(one.node, resolve)])
        arrays = {name: a for name, a in graph.arrays.items() if name != source.data}
        states = list(made.states)
        if self.initialises:
            state = State(f"{states[one.state].name}.init", (_fill(graph, other.node),))
            states.insert(one.state, state)
        return dataclasses.replace(made, arrays=arrays, states=tuple(states))


def _spans(edge: Access, subset: Sequence[Range]) -> bool:
    """Whether each axis has a parameter of its own that runs over all of a subset."""
    left = dict(edge.ranges)
    for own, wanted in zip(edge.memlet.subset, subset, strict=True):
        names = [*own.names]
        if own.ends != (own.start,) or len(names) != 1 or names[0] not in left:
            return False
        ranges = [(names[0], left.pop(names[0]))]
        if own.start.factor(names[0]) != 1 or propagate((own,), ranges).subset != (
            wanted,
        ):
            return False
    return not left


def _resolved(rule: object, reduce: Code, write: Memlet) -> Memlet:
    """Returns the write into a reduction's result of an element that it reduces."""
    (_, source), (_, target) = *reduce.inputs, *reduce.outputs
    rank = len(source.subset)
    kept = [axis for axis in range(rank) if axis not in {a % rank for a in reduce.axes}]
    if len(kept) != len(target.subset):
        raise CannotApply(
            rule, "shape", f"{target} must have an axis for each kept one"
        )
    subset = []
    for axis, to in zip(kept, target.subset, strict=True):
        own, start, step = (
            write.subset[axis],
            source.subset[axis].start,
            source.subset[axis].step,
        )
        offset = own.start - start
        parts = (offset.constant, *(n for _, n in offset.terms))
        if own.ends != (own.start,) or any(n % step for n in parts):
            raise CannotApply(rule, "shape", f"{write} must be one element of {source}")
        terms = tuple((name, n // step) for name, n in offset.terms)
        subset.append(
            point(to.start + Affine(terms, offset.constant // step) * to.step)
        )
    return Memlet(target.data, tuple(subset), reduce.code)


def _fill(graph: SDFG, reduce: Code) -> Node:
    """Returns a node that writes what changes no reduction."""
    ((_, target),) = reduce.outputs
    value = REDUCERS[reduce.code]
    taken = {*graph.symbols, *graph.arrays}
    names = [fresh(f"i{n}", taken) for n in range(len(target.subset))]
    subset = tuple(point(name) for name in names)
    code = Code(
        new_id(graph, "tasklet"),
        "tasklet",
        f"b = {value:g}",
        (),
        (("b", Memlet(target.data, subset)),),
    )
    ranges = tuple(zip(names, target.subset, strict=True))
    return Map(new_id(graph, "map"), ranges, (code,)) if ranges else code


@dataclasses.dataclass(frozen=True)
class InlineNested:
    """Puts the nodes of a nested graph that runs once in its place.

    Attributes:
      nested: the node.
    """

    nested: str

    @classmethod
    def matches(cls, graph: SDFG) -> list["InlineNested"]:
        """Returns all nested graphs."""
        return [cls(n.id) for _, n in graph.nodes() if isinstance(n, Nested)]

    def check(self, graph: SDFG) -> None:
        """Raises CannotApply for loops, and names that would be taken for others."""
        node = find(graph, self.nested).node
        if not isinstance(node, Nested) or node.times != 1 or node.counter:
            raise CannotApply(self, "runs", "must be a nested graph that runs once")
        used = {name for _, own in node.symbols for name in own.names}
        for _, inner in node.graph.nodes():
            if connectors(inner) & used:
                raise CannotApply(self, "names", "an edge has the name of a symbol")

    def apply(self, graph: SDFG) -> SDFG:
        """Returns the graph with the nested states between two parts of its state."""
        found = find(graph, self.nested)
        inner = found.node.graph.put(dict(found.node.symbols))
        arrays, names = dict(graph.arrays), dict(found.node.arguments)
        for name, each in inner.arrays.items():
            if name not in names:
                names[name] = fresh(name, {*arrays, *names_of(graph)})
                arrays[names[name]] = each
        taken = {*graph.symbols, *arrays}
        ids: list[str] = []

        def number(node: Node) -> Node:
            ids.append(new_id(graph, node.id.partition(".")[0], ids))
            node = dataclasses.replace(node, id=ids[-1])
            if isinstance(node, Map):
                body = tuple(number(each) for each in node.body)
                node = dataclasses.replace(node, body=body)
            return node

        def place(node: Node) -> Node:
            return rename(free_params(number(node), taken), names)

        states = [
            State(f"{found.node.id}.{name}", tuple(place(node) for node in nodes))
            for name, nodes in inner.states
        ]
        state = graph.states[found.state]
        parts = [
            state._replace(nodes=found.beside[: found.place]),
            *states,
            State(f"{state.name}.rest", found.beside[found.place + 1 :]),
        ]
        parts = [part for part in parts if part.nodes]
        whole = (*graph.states[: found.state], *parts, *graph.states[found.state + 1 :])
        return dataclasses.replace(graph, states=whole, arrays=arrays)
