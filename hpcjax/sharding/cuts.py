"""How the parameters of a model are cut along axes of a mesh, of given sizes."""

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from hpcjax.core import shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import Decoder
from hpcjax.core.patterns import matches_any
from hpcjax.core.shards import Specs
from hpcjax.sharding.parameters import Rules, logical_axes

Sizes = Mapping[str, int]
"""Devices along each mesh axis."""


def cut_decoder(
    decoder: Decoder,
    shapes: Any,
    rules: Rules,
    sizes: Sizes,
    names: Mapping[str, str] | None = None,
) -> Specs:
    """Returns how each parameter of a language model is cut, by rules for meanings.

    Args:
      decoder: of the model.
      shapes: of its parameters.
      rules: mesh axes of logical ones, see `sharding.rules`.
      sizes: of the mesh axes.
      names: what users call the mesh axes, where it is something else.

    Raises:
      ConfigError: devices that cannot have equal parts of a dimension.
    """
    found, leaves = {}, trees.flatten(shapes)
    for path, meanings in logical_axes(shapes).items():
        for meaning, size in zip(meanings, leaves[path].shape, strict=True):
            if meaning in rules:
                axis = rules[meaning]
                called = (names or {}).get(axis, axis)
                _check_size(decoder, meaning, size, called, sizes[axis], path)
        found[path] = PartitionSpec(*[rules.get(each or "") for each in meanings])
    return found


def _check_size(
    decoder: Decoder, meaning: str, size: int, axis: str, parts: int, path: str
) -> None:
    known = {
        "embed": ("width", size),
        "heads": ("heads", decoder.heads),
        "kv": ("kv_heads", decoder.kv_heads),
        "ff": ("mlp_width", size),
        "vocab": ("vocabulary", size),
        "expert": ("experts", size),
    }
    name, count = known[meaning]
    if count % parts:
        raise ConfigError(
            f"{axis} must divide {name}: got {name}={count}, {axis}={parts} ({path})"
        )


def cut_further(
    shapes: Any, specs: Specs, sizes: Sizes, axis: str, stacked: tuple[str, ...]
) -> Specs:
    """Cuts parts along their largest dimension that the devices of an axis divide.

    Args:
      shapes: of parameters.
      specs: how they are cut.
      sizes: of the mesh axes.
      axis: along which to cut; parts that are cut along it already stay as they are.
      stacked: regexes of stacks, which are not cut between their layers.
    """
    found = {}
    for path, leaf in trees.flatten(shapes).items():
        names = [*specs.get(path, ()), *[None] * leaf.ndim][: leaf.ndim]
        parts = [
            size // count_parts(PartitionSpec(name), sizes)
            for size, name in zip(leaf.shape, names, strict=True)
        ]
        first = int(matches_any(stacked, path))
        fitting = [d for d in range(first, leaf.ndim) if parts[d] % sizes[axis] == 0]
        if fitting and axis not in shards.axes_of_spec(PartitionSpec(*names)):
            dim = max(fitting, key=lambda d: parts[d])
            own = shards.axis_names(names[dim]) if names[dim] else ()
            names[dim] = (*own, axis) if own else axis
        if any(names):
            found[path] = PartitionSpec(*names)
    return found


def count_parts(spec: PartitionSpec, sizes: Sizes) -> int:
    """Returns how many parts an array has.

    Examples:
      >>> count_parts(PartitionSpec(None, ("col", "data")), {"col": 2, "data": 3})
      6
    """
    return math.prod(sizes[axis] for axis in shards.axes_of_spec(spec))
