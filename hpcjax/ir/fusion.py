"""Which operators of a program can be one kernel, and the program with these kernels.

Two operators can share a kernel if they read the same tensor, or one reads what the
other writes, and

- neither is a contraction, a change of layout or a view;
- they iterate over the same space, and do not reduce it along different axes, so that
  what one of them reduces is at hand where the other needs it;
- there is no other path between them: an operator outside of the kernel would have to
  run between its parts.

What is written for others stays written: a tensor is dropped if nothing outside of the
kernel reads it and it is no output of the program.

References:
  Ivanov et al., Data Movement Is All You Need, MLSys 2021, §5.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

import networkx as nx

from hpcjax.core.errors import ConfigError
from hpcjax.ir.graph import Dataflow, Kind, Operator

_FUSED: tuple[Kind, ...] = ("statistical", "elementwise")
Groups = Mapping[str, Collection[str]]


class Candidate(NamedTuple):
    """Two operators that could be one.

    Attributes:
      first: the one that comes first in the program.
      second: the other.
      rule: "producer" if the second reads what the first writes, "sibling" if both read
        a tensor.
      saved: words that need not be moved.
    """

    first: str
    second: str
    rule: Literal["producer", "sibling"]
    saved: int


def fusion_candidates(flow: Dataflow) -> list[Candidate]:
    """Returns the pairs of operators that could be one kernel.

    Examples:
      >>> from hpcjax import ir
      >>> layer = ir.encoder_layer(ir.encoder_sizes(), backward=False)
      >>> [c[:3] for c in fusion_candidates(layer) if c.first == "ReLU"]
      [('ReLU', 'lin1 dropout', 'producer')]
    """
    found = []
    for first, second in _pairs(flow):
        pair = (first, second)
        if _difference(flow, pair) or _separated(flow.graph, *pair):
            continue
        merged = fuse(flow, {"both": (first, second)})
        apart = flow.moved(first).words + flow.moved(second).words
        rule = "producer" if flow.graph.has_edge(first, second) else "sibling"
        saved = apart - merged.moved("both").words
        found.append(Candidate(first, second, rule, saved))
    return found


def fusion_groups(flow: Dataflow) -> list[tuple[str, ...]]:
    """Returns the operators of the largest kernels that pairs grow to.

    Pairs are taken in the order of the program, those that end first before others, and
    each is added to the kernels of its members if these can then be one.
    """
    kernel = {each.name: each.name for each in flow.operators}
    members: dict[str, tuple[str, ...]] = {name: (name,) for name in kernel}
    merged = flow.graph.copy()
    for first, second in _pairs(flow):
        one, other = kernel[first], kernel[second]
        both = members[one] + members[other]
        if one == other or _difference(flow, both) or _separated(merged, one, other):
            continue
        nx.contracted_nodes(merged, one, other, self_loops=False, copy=False)
        members[one] = both
        kernel |= dict.fromkeys(members.pop(other), one)
    order = {each.name: place for place, each in enumerate(flow.operators)}
    grown = (sorted(group, key=order.__getitem__) for group in members.values())
    return [tuple(group) for group in grown if len(group) > 1]


def fuse(flow: Dataflow, groups: Groups) -> Dataflow:
    """Returns the program with kernels in the place of their operators.

    Args:
      flow: the program.
      groups: operators by the name of the kernel; one without others is renamed.

    Raises:
      ConfigError: an operator that there is not, or is in two groups; operators that
        cannot be one kernel, with the reason.

    Examples:
      >>> from hpcjax import ir
      >>> layer = ir.encoder_layer(ir.encoder_sizes(), backward=False)
      >>> fused = fuse(layer, ir.fused_kernels(layer))
      >>> fused.total().words // 2**20
      396
    """
    kernel = {each.name: each.name for each in flow.operators}
    merged = flow.graph.copy()
    for name, group in groups.items():
        for member in group:
            flow.operator(member)
            if kernel[member] != member:
                raise ConfigError(f"{member!r} is in {kernel[member]!r} and {name!r}")
            kernel[member] = name
        _check(flow, merged, name, tuple(group))
    order = {each.name: place for place, each in enumerate(flow.operators)}
    kernels = [
        _merge(flow, name, [o for o in flow.operators if kernel[o.name] == name])
        for name in dict.fromkeys(kernel.values())
    ]
    fused = dataclasses.replace(flow, operators=tuple(kernels))
    first = {
        name: min(order[m] for m in kernel if kernel[m] == name) for name in fused.graph
    }
    sequence = nx.lexicographical_topological_sort(fused.graph, key=first.__getitem__)
    return dataclasses.replace(
        fused, operators=tuple(fused.operator(name) for name in sequence)
    )


def _check(
    flow: Dataflow, merged: nx.DiGraph, name: str, group: tuple[str, ...]
) -> None:
    """Raises ConfigError for operators that cannot be one; joins them in a graph."""
    reason = _difference(flow, group)
    pairs = nx.Graph(pair for pair in _pairs(flow) if set(pair) <= set(group))
    pairs.add_nodes_from(group)
    if not reason and not nx.is_connected(pairs):
        parts = [sorted(part) for part in nx.connected_components(pairs)]
        reason = f"they share no tensors: {parts}"
    first, *others = group
    for other in others:
        nx.contracted_nodes(merged, first, other, self_loops=False, copy=False)
    if not reason and not nx.is_directed_acyclic_graph(merged):
        step = nx.find_cycle(merged, first)[0][1]
        reason = f"{step!r} lies between its operators"
    if reason:
        raise ConfigError(f"{name!r} cannot be one kernel: {reason}")


def _pairs(flow: Dataflow) -> Iterator[tuple[str, str]]:
    """Yields operators that share a tensor, in the order of the later, then earlier."""
    touching: dict[str, list[Operator]] = {}
    for second in flow.operators:
        if second.kind not in _FUSED:
            continue
        own = (*second.inputs, *second.outputs)
        before = {o.name for t in second.inputs for o in touching.get(t, ())}
        order = [o.name for o in flow.operators if o.name in before]
        yield from ((first, second.name) for first in order)
        for tensor in own:
            touching.setdefault(tensor, []).append(second)


def _difference(flow: Dataflow, members: Collection[str]) -> str:
    """Returns why operators cannot share a loop; empty if they can."""
    parts = [flow.operator(name) for name in members]
    for part in parts:
        if part.kind not in _FUSED:
            return f"{part.name!r} is a {part.kind}"
        if part.space != parts[0].space or part.times != parts[0].times:
            return f"{part.name!r} iterates over another space than {parts[0].name!r}"
    reducing = {part.reduced: part.name for part in parts if part.reduced}
    if len(reducing) > 1:
        return f"{sorted(reducing.values())} reduce along different axes"
    return ""


def _separated(graph: nx.DiGraph, one: str, other: str) -> bool:
    """Whether a path between two nodes passes through others."""
    return any(
        nx.has_path(graph, step, end)
        for start, end in ((one, other), (other, one))
        for step in graph.successors(start)
        if step != end
    )


def _merge(flow: Dataflow, name: str, parts: list[Operator]) -> Operator:
    """Returns the kernel of operators in their order; one operator keeps all."""
    if len(parts) == 1:
        return parts[0]._replace(name=name)
    names = {part.name for part in parts}
    written = dict.fromkeys(t for part in parts for t in part.outputs)
    read = dict.fromkeys(t for part in parts for t in part.inputs)
    statistical = any(part.kind == "statistical" for part in parts)
    inputs = tuple(t for t in read if t not in written)
    outputs = tuple(
        t for t in written if t in flow.outputs or flow.consumers(t) - names
    )
    # What parts read of one tensor is at hand: the kernel reads the most that one does.
    moved = [part.volume_of(flow.tensors) for part in parts]
    volumes = (max(own.get(t, 0) for own in moved) for t in (*inputs, *outputs))
    return Operator(
        name=name,
        kind="statistical" if statistical else "elementwise",
        inputs=inputs,
        outputs=outputs,
        flops=sum(part.flops for part in parts),
        space=parts[0].space,
        reduced=max(part.reduced for part in parts),
        times=parts[0].times,
        volumes=tuple(volumes) if any(part.volumes for part in parts) else (),
    )
