"""A model's layers in the order of its forward pass, cut into blocks of equal cost."""

import itertools
import logging
import math
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import Model

log = logging.getLogger(__name__)

# What each variable that is made of parameters alone is made of.
Names = dict[Var, frozenset[str]]


class Layer(NamedTuple):
    """Parameters below one path, in the forward pass.

    Attributes:
      name: the path that they have in common, such as `"stage_0/block_0/conv1"`.
      paths: theirs.
      first: number of the first operation that uses one of them; -1 if none does.
      last: number of the last one.
    """

    name: str
    paths: tuple[str, ...]
    first: int
    last: int


class Blocks(NamedTuple):
    """Parameters by block, from the input to the output.

    Attributes:
      paths: of each block, disjoint.

    Examples:
      >>> Blocks((("embed/table",), ("head/kernel", "head/bias"))).numbers()
      {'embed/table': 1, 'head/kernel': 2, 'head/bias': 2}
    """

    paths: tuple[tuple[str, ...], ...]

    def numbers(self) -> dict[str, int]:
        """Returns the number of each parameter's block, from 1."""
        return {p: j for j, paths in enumerate(self.paths, 1) for p in paths}

    def check(self, params: Any) -> None:
        """Raises ConfigError unless every parameter is in one block and no other is."""
        given = list(itertools.chain(*self.paths))
        twice = sorted({path for path in given if given.count(path) > 1})
        checks.require(not twice, "a parameter must be in one block", twice=twice)
        own = set(trees.flatten(params))
        if own != set(given):
            raise ConfigError(
                f"blocks must hold the model's parameters: missing "
                f"{sorted(own - set(given))}, not in the model "
                f"{sorted(set(given) - own)}"
            )


def layers_of(
    function: Callable[..., Any], params: Any, *arguments: Any
) -> tuple[Layer, ...]:
    """Returns the layers of a function in the order in which it first uses them.

    A layer is what has a path up to the last component in common. Parameters that are
    stacked for a scan are one layer, as the scan uses them all at once; those that
    nothing uses come first.

    Args:
      function: `(params, *arguments)`; it is traced, not run.
      params: parameters, or their shapes.
      *arguments: its others, or their shapes.

    Examples:
      >>> import jax.numpy as jnp
      >>> shapes = {"a": {"w": jnp.ones((2, 2))}, "b": {"w": jnp.ones((2, 2))}}
      >>> def forward(p, x):
      ...     return x @ p["b"]["w"] @ p["a"]["w"]
      >>> [layer.name for layer in layers_of(forward, shapes, jnp.ones(2))]
      ['b', 'a']
    """
    closed = jax.make_jaxpr(function)(params, *arguments)
    paths = list(trees.flatten(params))
    named = zip(closed.jaxpr.invars, paths, strict=False)
    names = {variable: frozenset({path}) for variable, path in named}
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
    return tuple(_joined(layers[first]) for first in sorted(layers))


def layers_of_model(model: Model, x: Any) -> tuple[Layer, ...]:
    """Returns `layers_of` a model's forward pass in training.

    Args:
      model: the network.
      x: a batch of inputs, or its shapes.
    """

    def forward(params: Any, state: Any, x: Any, key: jax.Array) -> Any:
        return model.apply(params, state, x, train=True, key=key)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    return layers_of(forward, *jax.eval_shape(model.init, key), x, key)


def _joined(layers: Sequence[Layer]) -> Layer:
    """Returns as one what one operation begins to use."""
    return Layer(
        posixpath.commonpath([layer.name for layer in layers]),
        tuple(path for layer in layers for path in layer.paths),
        layers[0].first,
        max(layer.last for layer in layers),
    )


def _uses(
    jaxpr: Jaxpr, names: Names, count: Iterator[int]
) -> Iterator[tuple[int, str]]:
    """Yields the number of each operation and a parameter that it uses.

    What is made of parameters alone stands for them and is added to `names`: a model
    that casts them all at its beginning does not use them there.
    """
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and isinstance(
            inner, ClosedJaxpr
        ):
            inside: Names = {}
            _hand_over(names, equation.invars, inside, inner.jaxpr.invars)
            yield from _uses(inner.jaxpr, inside, count)
            _hand_over(inside, inner.jaxpr.outvars, names, equation.outvars)
            continue
        given = [v for v in equation.invars if isinstance(v, Var)]
        paths = frozenset().union(*(names.get(v, ()) for v in given))
        if paths and all(v in names for v in given):
            names.update(dict.fromkeys(equation.outvars, paths))
            continue
        number = next(count)
        yield from ((number, path) for path in paths)


def _hand_over(
    names: Names, given: Sequence[Any], inside: Names, taken: Sequence[Var]
) -> None:
    """Names variables that are the given ones, of which some are literals."""
    for variable, own in zip(given, taken, strict=True):
        if isinstance(variable, Var) and variable in names:
            inside[own] = names[variable]


def partition(block_costs: Sequence[int | float], k: int) -> tuple[int, ...]:
    """Returns where to cut a row of costs into k contiguous parts, as equal as can be.

    The sum of squares of the parts' costs is the least there is.

    Args:
      block_costs: such as the backward cost of each layer.
      k: how many parts.

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
    # The best cuts of the first n entries into so many parts.
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
    """Returns the blocks between cuts.

    A parameter that is used in two blocks, as a tied table is, belongs to the one
    nearest the input: roles that stop above it leave out its gradient, also that of its
    later use. This is warned about.

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
