"""What a plan comes to: numbers of parameters, and how often stores are used."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hpcjax.compress.sharing._plan import (
    CANDIDATES,
    Layer,
    Plan,
    Window,
    template_shape,
)

# From the first number to the one behind the last.
Range = tuple[int, int]


class LayerUse(NamedTuple):
    """What a layer reads.

    Attributes:
      name: of the layer.
      group: number of its group.
      kind: see `Window`.
      templates: how many are combined.
      start: where its window begins.
      numbers: how many of the store it reads.
      sharing: layers of the group that read some of the same numbers, itself included.
    """

    name: str
    group: int
    kind: str
    templates: int
    start: int
    numbers: int
    sharing: int


class Report(NamedTuple):
    """What a plan comes to.

    Attributes:
      weights: numbers in stores and own kernels; the budget.
      unshared: weights of the network without sharing.
      unused: of each group, the share of the store that no layer reads.
      layers: what each layer reads.
    """

    weights: int
    unshared: int
    unused: dict[int, float]
    layers: tuple[LayerUse, ...]


def report(plan: Plan) -> Report:
    """Returns what a plan comes to.

    Examples:
      >>> from hpcjax.compress.sharing import make_plan
      >>> layers = [Layer("a", (10, 6)), Layer("b", (10, 6))]
      >>> report(make_plan(layers, (0, 0), 100)).unused
      {0: 0.4}
    """
    reads = [read_ranges(plan, layer, window) for layer, window in plan]
    unused = {}
    for group, numbers in plan.stores:
        own = [r for (_, w), r in zip(plan, reads, strict=True) if w.group == group]
        used = _count_covered([piece for ranges in own for piece in ranges])
        unused[group] = 1 - used / numbers
    uses = [
        LayerUse(
            layer.name,
            window.group,
            window.kind,
            window.templates,
            window.start,
            layer.size if window.kind == "own" else _count_covered(ranges),
            _count_sharing(plan, reads, window.group, ranges),
        )
        for (layer, window), ranges in zip(plan, reads, strict=True)
    ]
    unshared = sum(layer.size for layer in plan.layers)
    return Report(plan.weights, unshared, unused, tuple(uses))


def read_ranges(plan: Plan, layer: Layer, window: Window) -> list[Range]:
    """Returns the ranges of the store that a layer reads; none of an own kernel."""
    if window.kind == "own":
        return []
    numbers = dict(plan.stores)[window.group]
    if window.kind == "templates":
        end = window.start + window.templates * layer.size
        ranges = [(window.start, min(end, numbers)), (0, max(0, end - numbers))]
        return [(start, stop) for start, stop in ranges if start < stop]
    if window.kind == "inter":
        return [(0, math.prod(window.reduced))]
    if window.kind == "candidates":
        used, part = math.prod(template_shape(layer, numbers)), numbers // CANDIDATES
        return [(i * part, i * part + used) for i in range(CANDIDATES)]
    # The layer is larger than the store, of which an incomplete unit is left out.
    unit = {"repeat": 1, "mask": plan.options.mask_window, "wavg": 2}[window.kind]
    return [(0, numbers // unit * unit)]


def _count_covered(ranges: Sequence[Range]) -> int:
    """Returns how many numbers are in at least one of the ranges."""
    covered = end = 0
    for start, stop in sorted(ranges):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _count_sharing(
    plan: Plan, reads: Sequence[Sequence[Range]], group: int, ranges: Sequence[Range]
) -> int:
    """Returns the layers of a group that read a number of these ranges, at least 1."""
    meet = [
        any(a < d and c < b for a, b in ranges for c, d in other)
        for window, other in zip(plan.windows, reads, strict=True)
        if window.group == group
    ]
    return max(1, sum(meet))
