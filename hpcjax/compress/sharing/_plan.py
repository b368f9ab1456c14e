"""Plans: which layers share a store, how large it is, and what each layer reads of it.

A plan holds numbers and texts only: it can be hashed, compared, and written as JSON.

Sources:
  Plummer, Dryden, Frost, Hoefler and Saenko, Neural Parameter Allocation Search, ICLR
  2022 (Shapeshifter Networks), and the authors' code where the paper is silent.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from hpcjax.compress.sharing import _upsampling, _windows
from hpcjax.compress.sharing.options import SharingOptions
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

CANDIDATES = 4

Kind = Literal["own", "templates", "inter", "repeat", "mask", "wavg", "candidates"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that may share its weights.

    Attributes:
      path: of its kernel among the model's parameters.
      shape: `(outputs, inputs, height, width)` of a convolution, `(outputs, inputs)` of
        a dense layer: the order in which its weights lie in a store.
      index: number within a stack of layers; None if the kernel is one layer's.
    """

    path: str
    shape: tuple[int, ...]
    index: int | None = None

    @property
    def name(self) -> str:
        """The path, with the number within a stack."""
        return self.path if self.index is None else f"{self.path}[{self.index}]"

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Window:
    """What a layer reads of its group's store.

    Attributes:
      group: number of the group.
      kind: "own": the layer is alone in its group and keeps its own kernel.
        "templates": a window of so many templates. "inter", "repeat", "mask" or "wavg":
        the store is too small, see `SharingOptions.upsample`. "candidates": templates
        that are each a part of the whole store, resized, see `plan_candidates`.
      templates: how many are combined.
      start: where the window begins; it goes on at the store's beginning after the end.
      reduced: shape that "inter" reads.
    """

    group: int
    kind: Kind
    templates: int = 1
    start: int = 0
    reduced: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How layers get their weights.

    Attributes:
      layers: all layers that the budget is for.
      windows: what each reads.
      stores: `(group, numbers)` of each group with several layers.
      options: how weights are made.
    """

    layers: tuple[Layer, ...]
    windows: tuple[Window, ...]
    stores: tuple[tuple[int, int], ...]
    options: SharingOptions

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits, the same for equal plans in any process."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def weights(self) -> int:
        """The numbers in stores and in kernels of layers that share nothing."""
        own = sum(layer.size for layer, window in self if window.kind == "own")
        return own + sum(numbers for _, numbers in self.stores)

    def __iter__(self) -> Iterator[tuple[Layer, Window]]:
        """Goes through the layers with their windows."""
        return iter(zip(self.layers, self.windows, strict=True))


def make_plan(
    layers: Sequence[Layer],
    groups: Sequence[int],
    budget: int,
    options: SharingOptions | None = None,
) -> Plan:
    """Plans the weights of layers within a budget.

    A layer that is alone in its group keeps a kernel of its own. What these leave of
    the budget is shared out to the other groups in proportion to their layers' weights,
    exactly: the rounded parts add up to it.

    Args:
      layers: from `list_layers`.
      groups: the group of each, see `group_all` and the like.
      budget: numbers that the weights may have in all.
      options: how weights are made; None for the defaults.

    Raises:
      ConfigError: no layers, not one group for each, or a budget that is no whole
        number or too small; the message gives the least that is enough.

    Examples:
      >>> layers = [Layer("a", (4, 8)), Layer("b", (4, 8)), Layer("c", (2, 2))]
      >>> make_plan(layers, (0, 0, 1), 44).stores
      ((0, 40),)
    """
    options = options or SharingOptions()
    layers = tuple(layers)
    checks.require(bool(layers), "a plan needs at least one layer", layers=layers)
    rule = f"groups must be one number for each of the {len(layers)} layers"
    checks.require(len(groups) == len(layers), rule, groups=tuple(groups))
    whole = isinstance(budget, int)
    checks.require(whole, "budget must be a whole number", budget=budget)
    members = _by_group(layers, groups)
    stores = _divide(members, budget, options)
    windows: dict[Layer, Window] = {}
    for group, own in members.items():
        if group in stores:
            places = _place(own, stores[group], options)
            windows |= {
                layer: dataclasses.replace(window, group=group)
                for layer, window in zip(own, places, strict=True)
            }
        else:
            windows[own[0]] = Window(group, "own")
    ordered = tuple(windows[layer] for layer in layers)
    return Plan(layers, ordered, tuple(stores.items()), options)


def plan_candidates(
    layers: Sequence[Layer], numbers: int, options: SharingOptions | None = None
) -> Plan:
    """Plans one store from which all layers combine the same templates, resized.

    Of a quarter of the store each of four templates is a matrix that is resized to the
    layer's. Layers that come to similar coefficients can share: `cluster_layers`.

    Args:
      layers: from `list_layers`.
      numbers: in the store.
      options: `combine` must be "wavg" or "emb".

    Raises:
      ConfigError: another `combine`, fewer than two layers, or a store too small for a
        template of one row and column of each layer.
    """
    options = options or SharingOptions()
    rule = "groups are learned from combine='wavg' or 'emb'"
    checks.require(options.combine != "avg", rule, combine=options.combine)
    checks.require(len(layers) > 1, "groups need at least two layers", layers=layers)
    for layer in layers:
        rule = f"the store is too small for candidates of {layer.name}, {layer.shape}"
        checks.require(min(template_shape(layer, numbers)) > 0, rule, numbers=numbers)
    window = Window(0, "candidates", CANDIDATES)
    every = (window,) * len(layers)
    return Plan(tuple(layers), every, ((0, numbers),), options)


def template_shape(layer: Layer, numbers: int) -> tuple[int, int]:
    """Returns the rows and columns of a candidate, about in proportion to the layer's.

    Examples:
      >>> template_shape(Layer("a", (4, 8)), 4 * 32)
      (4, 8)
    """
    part = numbers // CANDIDATES
    rows, columns = layer.shape[0], math.prod(layer.shape[1:])
    height = math.isqrt(part * rows // columns)
    return height, part // height if height else 0


def _by_group(layers: Sequence[Layer], groups: Sequence[int]) -> dict[int, list[Layer]]:
    members: dict[int, list[Layer]] = {}
    for layer, group in zip(layers, groups, strict=True):
        members.setdefault(group, []).append(layer)
    return dict(sorted(members.items()))


def _divide(
    members: dict[int, list[Layer]], budget: int, options: SharingOptions
) -> dict[int, int]:
    """Returns the numbers in the store of each group with several layers."""
    shared = {group: own for group, own in members.items() if len(own) > 1}
    sizes = {group: sum(x.size for x in own) for group, own in shared.items()}
    alone = sum(own[0].size for own in members.values() if len(own) == 1)
    least = {g: max(_least(x, options) for x in own) for g, own in shared.items()}
    rest = budget - alone
    stores = _in_proportion(sizes, max(rest, 0))
    small = [group for group in shared if stores[group] < least[group]]
    if rest < 0 or small:
        enough = alone + _least_rest(sizes, least)
        raise ConfigError(
            f"the budget must be at least {enough:,}, of which {alone:,} are kernels "
            f"of layers that share nothing: got budget={budget:,}"
            + (f", too small for groups {small}" if small else "")
        )
    return stores


def _least_rest(sizes: dict[int, int], least: dict[int, int]) -> int:
    """Returns the smallest number that gives each group its least."""
    whole = sum(sizes.values())
    rest = max((-(-least[g] * whole // sizes[g]) for g in sizes), default=0)
    # Where a group's part is rounded up, a little less is enough.
    while rest:
        parts = _in_proportion(sizes, rest - 1)
        if any(parts[group] < least[group] for group in sizes):
            break
        rest -= 1
    return rest


def _in_proportion(sizes: dict[int, int], whole: int) -> dict[int, int]:
    """Divides a number by the largest remainder; of equal ones the first group's."""
    total = sum(sizes.values()) or 1
    parts = {group: whole * size // total for group, size in sizes.items()}
    order = sorted(sizes, key=lambda group: -(whole * sizes[group] % total))
    for group in order[: whole - sum(parts.values())]:
        parts[group] += 1
    return parts


def _least(layer: Layer, options: SharingOptions) -> int:
    """Returns the smallest store from which the layer can be made."""
    smallest = math.prod(_upsampling.reduced_shapes(layer.shape)[-1])
    least = {
        "none": layer.size,
        "inter": smallest,
        "repeat": 1,
        "mask": options.mask_window,
        "wavg": 2,
    }
    return min(layer.size, least[options.upsample])


def _place(
    layers: Sequence[Layer], numbers: int, options: SharingOptions
) -> list[Window]:
    """Returns the windows of a group's layers."""
    counts = [min(numbers // layer.size, options.templates) for layer in layers]
    if options.combine == "emb":
        _check_embeddings(layers, counts)
    fitting = [i for i, count in enumerate(counts) if count]
    sizes = [counts[i] * layers[i].size for i in fitting]
    if options.placement == "circular":
        starts = _windows.place_circular(sizes, numbers)
    else:
        shapes = [layers[i].shape for i in fitting]
        starts = _windows.place_aligned(shapes, sizes, numbers)
    start_of = dict(zip(fitting, starts, strict=True))
    return [
        Window(0, "templates", counts[i], start_of[i])
        if counts[i]
        else _enlarge(layer, numbers, options)
        for i, layer in enumerate(layers)
    ]


def _enlarge(layer: Layer, numbers: int, options: SharingOptions) -> Window:
    """Returns the window of a layer that is larger than the store."""
    if options.upsample != "inter":
        return Window(0, cast("Kind", options.upsample))
    reduced = _upsampling.fit_reduced(layer.shape, numbers)
    return Window(0, "inter", reduced=reduced or ())


def _check_embeddings(layers: Sequence[Layer], counts: Sequence[int]) -> None:
    """Raises ConfigError if a map of embeddings would be for one layer only."""
    for count in {count for count in counts if count > 1}:
        alone = [x.name for x, c in zip(layers, counts, strict=True) if c == count]
        rule = (
            "combine='emb' needs several layers with equally many templates; only "
            f"{alone[0]} has {count}"
        )
        checks.require(len(alone) > 1, rule, layers=len(alone))
