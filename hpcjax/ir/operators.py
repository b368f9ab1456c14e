"""The nodes of a graph as operators on tensors, with what they move and compute."""

import ast
from collections.abc import Mapping

from hpcjax.core.errors import ConfigError
from hpcjax.ir import affine
from hpcjax.ir.affine import Ranges, Values
from hpcjax.ir.graph import Dataflow, Kind, Operator, Tensor
from hpcjax.ir.sdfg import SDFG, Array, Code, Map, Nested, accesses, codes, parse

_KINDS: Mapping[str, Kind] = {
    "tasklet": "elementwise",
    "copy": "movement",
    "reduce": "statistical",
    "library": "contraction",
}


def find_operators(graph: SDFG, symbols: Values | None = None) -> Dataflow:
    """Returns the nodes of a graph as operators, whose words are volumes.

    A tensor is a container between two writes. Nodes of nested graphs are operators
    that run several times.

    Args:
      graph: the program.
      symbols: values of its symbols.

    Raises:
      ConfigError: a symbol has no value.
    """
    graph = graph.bind(symbols or {})
    if graph.symbols:
        raise ConfigError(f"symbols without values: {', '.join(graph.symbols)}")
    flow = _Flow(graph)
    flow.read(graph, {name: name for name in graph.arrays}, 1, "", {})
    outputs = (
        flow.latest[name] for name, each in graph.arrays.items() if not each.transient
    )
    written = {t for each in flow.operators for t in each.outputs}
    kept = frozenset(outputs) & written
    return Dataflow(operators=tuple(flow.operators), tensors=flow.tensors, outputs=kept)


class _Flow:
    """Collects the operators of nested graphs."""

    def __init__(self, graph: SDFG) -> None:
        self.operators: list[Operator] = []
        self.tensors: dict[str, Tensor] = {}
        self.latest: dict[str, str] = {}
        for name, each in graph.arrays.items():
            self._add(name, each, {})

    def _add(self, name: str, array: Array, values: Values) -> None:
        self.latest[name] = name
        self.tensors[name] = Tensor(tuple(size.at(values) for size in array.shape))

    def read(
        self,
        graph: SDFG,
        names: Mapping[str, str],
        times: int,
        before: str,
        values: Values,
    ) -> None:
        """Adds a graph's operators, with the names of containers outside."""
        for _, node in graph.nodes():
            if isinstance(node, Nested):
                inner, prefix = node.graph, f"{before}{node.id}/"
                own = {name: prefix + name for name in inner.arrays}
                own |= {name: names[outer] for name, outer in node.arguments}
                put_in = {name: size.at(values) for name, size in node.symbols}
                for name, outer in own.items():
                    if outer not in self.latest:
                        self._add(outer, inner.arrays[name], put_in)
                counter = {node.counter: 0} if node.counter else {}
                self.read(inner, own, times * node.times, prefix, put_in | counter)
            else:
                self._operator(node, names, times, before, values)

    def _operator(
        self,
        node: Code | Map,
        names: Mapping[str, str],
        times: int,
        before: str,
        values: Values,
    ) -> None:
        words: dict[bool, dict[str, int]] = {False: {}, True: {}}
        own = [each for each in accesses(node) if each.memlet.data not in each.private]
        for each in own:
            total, name = words[each.writes], names[each.memlet.data]
            moved = affine.count(each.ranges, each.memlet.subset, values)
            total[name] = total.get(name, 0) + moved
        inputs = tuple(self.latest[name] for name in words[False])
        for name in words[True]:
            fresh = f"{name}.{sum(1 for t in self.tensors if t.startswith(name + '.'))}"
            self.tensors[fresh] = self.tensors[name]
            self.latest[name] = fresh
        resolved = any(each.memlet.wcr for each in own)
        kind = _KINDS[node.kind] if isinstance(node, Code) else "elementwise"
        self.operators.append(
            Operator(
                name=before + node.id,
                kind="statistical" if resolved else kind,
                inputs=inputs,
                outputs=tuple(self.latest[name] for name in words[True]),
                flops=sum(_flops(each, r, values) for each, r in codes(node)),
                space=tuple(len(r.at(values)) for _, r in node.ranges)
                if isinstance(node, Map)
                else (),
                times=times,
                volumes=(*words[False].values(), *words[True].values()),
            )
        )


def _flops(code: Code, ranges: Ranges, values: Values) -> int:
    """Returns operations: one for each call, comparison and sign of arithmetic."""
    if code.kind == "reduce":
        return affine.count(ranges, code.inputs[0][1].subset, values)
    if code.kind == "library" and "->" in code.code:
        letters = code.code.partition("->")[0].split(",")
        sizes = {
            letter: own
            for axes, (_, memlet) in zip(letters, code.inputs, strict=True)
            for letter, own in zip(axes, memlet.subset, strict=True)
        }
        return 2 * affine.count(ranges, tuple(sizes.values()), values)
    counted = ast.BinOp | ast.Call | ast.Compare
    if code.kind != "tasklet":
        return 0
    each = sum(isinstance(n, counted) for n in ast.walk(parse(code.code)))
    return each * affine.count(ranges, (), values)
