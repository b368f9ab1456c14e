"""Groups of layers that share a store: one number for each layer, in their order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.core import checks

if TYPE_CHECKING:
    from hpcjax.compress.sharing._plan import Layer


def group_all(layers: Sequence["Layer"]) -> tuple[int, ...]:
    """Puts all layers into one group."""
    return (0,) * len(layers)


def group_alone(layers: Sequence["Layer"]) -> tuple[int, ...]:
    """Gives each layer a group of its own: nothing is shared."""
    return tuple(range(len(layers)))


def group_by_shape(layers: Sequence["Layer"]) -> tuple[int, ...]:
    """Puts layers of one shape into one group, as ALBERT ties its blocks."""
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(numbers.setdefault(layer.shape, len(numbers)) for layer in layers)


def group_at_random(
    layers: Sequence["Layer"], groups: int, seed: int
) -> tuple[int, ...]:
    """Draws a group for each layer; no group is empty.

    Raises:
      ConfigError: fewer layers than groups.
    """
    rule = f"groups must be from 1 to the number of layers, {len(layers)}"
    checks.require(1 <= groups <= len(layers), rule, groups=groups)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(groups, size=len(layers))
    # One layer of each group is drawn for it, so that none is empty.
    drawn[rng.permutation(len(layers))[:groups]] = np.arange(groups)
    return tuple(map(int, drawn))
