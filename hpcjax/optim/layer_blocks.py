"""Cutting a model into blocks of layers, in the order of its forward pass."""

import itertools
import logging
import math
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import DATA_AXIS
from hpcjax.core.model import Model

log = logging.getLogger(__name__)

# For each variable that no data went into: the paths of the parameters that did.
Names = dict[Var, frozenset[str]]


class Layer(NamedTuple):
    """The parameters of one layer, and when the forward pass uses them.

    Attributes:
      name: the common path of the parameters, such as `"stage_0/block_0/conv1"`.
      paths: the paths of the parameters.
      first: number of the first operation that uses one of them; -1 if none does.
      last: number of the last operation that does.
    """

    name: str
    paths: tuple[str, ...]
    first: int
    last: int


class Blocks(NamedTuple):
    """A model's parameters in blocks, from the input to the output.

    Attributes:
      paths: the paths of each block's parameters; blocks are disjoint.

    Examples:
      >>> Blocks((("embed/table",), ("head/kernel", "head/bias"))).numbers()
      {'embed/table': 1, 'head/kernel': 2, 'head/bias': 2}
    """

    paths: tuple[tuple[str, ...], ...]

    def numbers(self) -> dict[str, int]:
        """Returns `{path: number of its block}`, counted from 1."""
        return {p: j for j, paths in enumerate(self.paths, 1) for p in paths}

    def check(self, params: Any) -> None:
        """Raises ConfigError unless the blocks hold just these parameters, each once.

        A parameter that `optax.masked` has taken out counts as present, and an empty
        tree is accepted, since `optax.tree_map_params` calls `init` with one.
        """
        held = list(itertools.chain(*self.paths))
        twice = sorted({path for path in held if held.count(path) > 1})
        checks.require(not twice, "a parameter must be in one block", twice=twice)
        own, named = set(trees.flatten(params)), set(trees.paths(params))
        missing, unknown = sorted(own - set(held)), sorted(set(held) - named)
        if named and (missing or unknown):
            raise ConfigError(
                f"blocks must hold the model's parameters: missing {missing}, not in "
                f"the model {unknown}"
            )


def layers_of(
    function: Callable[..., Any], params: Any, *arguments: Any
) -> tuple[Layer, ...]:
    """Returns the layers of a function in the order in which it first uses them.

    Parameters whose paths differ in the last component only belong to one layer. Layers
    that one operation begins to use are merged, as the stacked parameters of a scan
    are. Parameters that nothing uses come first.

    Args:
      function: `function(params, *arguments)`; it is traced, not run.
      params: parameters, or their shapes.
      *arguments: the other arguments, or their shapes.

    Examples:
      >>> import jax.numpy as jnp
      >>> shapes = {"a": {"w": jnp.ones((2, 2))}, "b": {"w": jnp.ones((2, 2))}}
      >>> def forward(p, x):
      ...     return x @ p["b"]["w"] @ p["a"]["w"]
      >>> [layer.name for layer in layers_of(forward, shapes, jnp.ones(2))]
      ['b', 'a']
    """
    return _find_layers(lambda p, _, *rest: function(p, *rest), params, (), *arguments)


def _find_layers(
    function: Callable[..., Any], params: Any, drawn: Any, *arguments: Any
) -> tuple[Layer, ...]:
    """Returns `layers_of`, where what comes of `drawn`, such as keys, is no data."""
    # Batch statistics may be of all devices: here of one.
    traced = jax.make_jaxpr(function, axis_env=[(DATA_AXIS, 1)])
    closed = traced(params, drawn, *arguments)
    paths = list(trees.flatten(params))
    own = [frozenset({path}) for path in paths]
    own += [frozenset()] * len(jax.tree.leaves(drawn))
    names = dict(zip(closed.jaxpr.invars, own, strict=False))
    # Numbers, such as bounds of a search, are no data either.
    numbers = [v for v in closed.jaxpr.constvars if v.aval.size == 1]
    names |= dict.fromkeys(numbers, frozenset())
    uses: dict[str, list[int]] = {path: [] for path in paths}
    for number, path in _uses(closed.jaxpr, names, itertools.count()):
        uses[path].append(number)
    parts: dict[str, list[str]] = {}
    for path in paths:
        parts.setdefault(path.rpartition("/")[0] or path, []).append(path)
    layers: dict[int, list[Layer]] = {}
    for name, own in parts.items():
        places = [place for path in own for place in uses[path]] or [-1]
        layer = Layer(name, tuple(own), min(places), max(places))
        layers.setdefault(layer.first, []).append(layer)
    return tuple(_join(layers[first]) for first in sorted(layers))


def layers_of_model(model: Model, x: Any) -> tuple[Layer, ...]:
    """Returns `layers_of` a model's forward pass in training.

    Args:
      model: the network.
      x: a batch of inputs, or its shapes.
    """

    def forward(params: Any, key: jax.Array, state: Any, x: Any) -> Any:
        return model.apply(params, state, x, train=True, key=key)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    params, state = jax.eval_shape(model.init, key)
    return _find_layers(forward, params, key, state, x)


def layer_counts(
    layers: Sequence[Layer], params: Any, stacked: frozenset[str]
) -> list[int]:
    """Returns how many layers each is: a stack as many as it has, any other one.

    Args:
      layers: of the parameters.
      params: parameters, or their shapes.
      stacked: paths of those that are stacks of layers, along their first dimension.
    """
    leaves = trees.flatten(params)
    return [
        max((len(leaves[p]) for p in layer.paths if p in stacked), default=1)
        for layer in layers
    ]


def _join(layers: Sequence[Layer]) -> Layer:
    """Merges layers that the same operation is the first to use."""
    return Layer(
        posixpath.commonpath([layer.name for layer in layers]),
        tuple(path for layer in layers for path in layer.paths),
        layers[0].first,
        max(layer.last for layer in layers),
    )


def _uses(
    jaxpr: Jaxpr, names: Names, count: Iterator[int]
) -> Iterator[tuple[int, str]]:
    """Yields (number of an operation, path of a parameter that it uses).

    Operations on parameters without data, such as a cast of all of them at the start of
    the model, or a random mask, do not count as uses. Their results stand for the
    parameters: they are added to `names`, with which the operations that combine them
    with data are found. Comparisons and the like have no gradient, and stand for none.
    """
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and isinstance(
            inner, ClosedJaxpr
        ):
            # Walked through with its own variables, as if the call were inlined.
            inside: Names = {}
            _hand_over(names, equation.invars, inside, inner.jaxpr.invars)
            yield from _uses(inner.jaxpr, inside, count)
            _hand_over(inside, inner.jaxpr.outvars, names, equation.outvars)
            continue
        inputs = [v for v in equation.invars if isinstance(v, Var)]
        paths = frozenset().union(*(names.get(v, ()) for v in inputs))
        if all(v in names for v in inputs):
            for v in equation.outvars:
                inexact = jnp.issubdtype(getattr(v.aval, "dtype", int), jnp.inexact)
                names[v] = paths if inexact else frozenset()
            continue
        number = next(count)
        yield from ((number, path) for path in paths)


def _hand_over(
    names: Names, outer: Sequence[Any], inside: Names, inner: Sequence[Var]
) -> None:
    """Gives each inner variable the entry of the outer one that it is bound to.

    Outer ones may also be literals, which are no data.
    """
    for variable, own in zip(outer, inner, strict=True):
        if not isinstance(variable, Var):
            inside[own] = frozenset()
        elif variable in names:
            inside[own] = names[variable]


def partition(block_costs: Sequence[int | float], k: int) -> tuple[int, ...]:
    """Returns where to cut a sequence of costs into k contiguous parts of equal cost.

    Of all cuts it returns the one with the least sum of squares of the parts' costs.

    Args:
      block_costs: such as the backward cost of each layer.
      k: number of parts.

    Returns:
      The number of the first entry of each part but the first.

    Raises:
      ConfigError: fewer costs than parts, or a cost that is negative or not finite.

    Examples:
      >>> partition([1, 1, 1, 1, 2], 3)
      (2, 4)
    """
    checks.require_count(1, k=k)
    count = len(block_costs)
    checks.require(k <= count, f"k must be at most the {count} blocks there are", k=k)
    for cost in block_costs:
        checks.require_finite(0.0, cost=cost)
    ends = [0.0, *itertools.accumulate(map(float, block_costs))]
    # Dynamic programming: best[n] is (least sum of squares, cuts) of the first n
    # entries in p parts, where p grows from 1 to k. The last part begins at `cut`, and
    # its cost is a difference of prefix sums. No entries cannot be a part, hence
    # infinity.
    best = [(end**2, ()) for end in ends]
    best[0] = (math.inf, ())
    for _ in range(k - 1):
        best = [
            min(
                (
                    (best[cut][0] + (end - ends[cut]) ** 2, (*best[cut][1], cut))
                    for cut in range(1, n)
                ),
                default=(math.inf, ()),
            )
            for n, end in enumerate(ends)
        ]
    return best[-1][1]


def cut_layers(layers: Sequence[Layer], cuts: Sequence[int]) -> Blocks:
    """Returns the blocks into which cuts divide layers.

    A parameter that is used in two blocks, such as a tied embedding, belongs to the one
    nearer the input. Workers whose backward pass stops above that block then have no
    gradient of it, not even of its later use. A warning is logged.

    Args:
      layers: from `layers_of`.
      cuts: from `partition`: the first layer of each block but the first.

    Raises:
      ConfigError: cuts that do not increase or leave a block empty.

    Examples:
      >>> layers = [Layer(name, (f"{name}/w",), n, n) for n, name in enumerate("abc")]
      >>> cut_layers(layers, (1,)).paths
      (('a/w',), ('b/w', 'c/w'))
    """
    edges = [0, *cuts, len(layers)]
    rising = all(a < b for a, b in itertools.pairwise(edges))
    rule = f"cuts must increase and lie between 0 and {len(layers)}"
    checks.require(rising, rule, cuts=tuple(cuts))
    blocks = [layers[a:b] for a, b in itertools.pairwise(edges)]
    for block, after in itertools.pairwise(blocks):
        tied = [layer.name for layer in block if layer.last >= after[0].first]
        if tied:
            log.warning("used in two blocks, assigned to the first: %s", tied)
    return Blocks(
        tuple(tuple(p for layer in block for p in layer.paths) for block in blocks)
    )
