"""What is pruned together: weights, groups, blocks, vectors, channels; how many.

A structure turns the scores of weights into those of its units, and the mask of units
back into the masks of weights. Kernels are `[..., inputs, outputs]`, whose inputs are
the axis of contraction. Importing this module imports no JAX.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Size
from hpcjax.core.errors import ConfigError, nearest

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def count_kept(size: int, sparsity: float | Fraction) -> int:
    """Returns how many of `size` entries are kept: (1 − sparsity)·size, at least one.

    Exact, with halves rounded up: in float64, (1 − 0.9)·5 is less than one half.

    Examples:
      >>> count_kept(5, 0.9), count_kept(5, 0.7), count_kept(4, 1.0)
      (1, 2, 1)
    """
    checks.require(0 <= sparsity <= 1, "sparsity must be in [0, 1]", sparsity=sparsity)
    kept = (1 - Fraction(str(sparsity))) * size
    return min(size, max(1, math.floor(kept + Fraction(1, 2))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure(Config):
    """A structure whose units each lie in one parameter.

    The methods take and return what is keyed by paths of parameters; `Channels` keys
    its units by names of its own.
    """

    def unit_shapes(self, shapes: Shapes) -> dict[str, Shape]:
        """Returns the shapes of the arrays of units.

        Raises:
          ConfigError: a parameter cannot be cut into units; names it and its shape.
        """
        return {path: self.count(path, tuple(shape)) for path, shape in shapes.items()}

    def pool(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the scores of the units, from those of the weights."""
        self.unit_shapes({path: leaf.shape for path, leaf in scores.items()})
        return {path: self.pool_leaf(leaf) for path, leaf in scores.items()}

    def spread(self, kept: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
        """Returns the masks of parameters of these shapes, from those of the units."""
        return {path: self.spread_leaf(kept[path]) for path in shapes}

    def sizes(self, shapes: Shapes) -> dict[str, int]:
        """Returns the number of weights in a unit."""
        units = self.unit_shapes(shapes)
        return {
            path: math.prod(shape) // max(1, math.prod(units[path]))
            for path, shape in shapes.items()
        }

    def count(self, path: str, shape: Shape) -> Shape:
        """Returns the shape of the units of one parameter."""
        del path
        return shape

    def pool_leaf(self, scores: Any) -> Any:
        """Returns the scores of one parameter's units."""
        return scores

    def spread_leaf(self, kept: Any) -> Any:
        """Returns the mask of one parameter."""
        return kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unstructured(Structure):
    """Every weight is a unit of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NM(Structure):
    """At most n of every m neighbouring inputs of an output are kept.

    Attributes:
      n: how many are kept.
      m: of how many; divides the inputs.
    """

    n: Size = 2
    m: Size = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(self.n <= self.m, "n must be at most m", n=self.n, m=self.m)

    def count(self, path: str, shape: Shape) -> Shape:
        """Returns the shape itself: the best of each group are chosen, not groups."""
        _cut(path, shape, (self.m, 1), self)
        return shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(Structure):
    """Blocks of a kernel's last two axes are kept or removed as a whole.

    Attributes:
      inputs: height of a block; divides the inputs.
      outputs: width of a block; divides the outputs.
      pooling: whether a block's score is the sum or the largest of its weights'.
    """

    inputs: Size = 4
    outputs: Size = 4
    pooling: Literal["sum", "max"] = "sum"

    def count(self, path: str, shape: Shape) -> Shape:
        """Returns the number of blocks along each axis."""
        return _cut(path, shape, (self.inputs, self.outputs), self)

    def pool_leaf(self, scores: Any) -> Any:
        """Returns the sum or maximum over each block."""
        *lead, rows, columns = scores.shape
        height, width = self.inputs, self.outputs
        blocks = scores.reshape(*lead, rows // height, height, columns // width, width)
        return getattr(blocks, self.pooling)(axis=(-3, -1))

    def spread_leaf(self, kept: Any) -> Any:
        """Repeats the mask of a block over its weights."""
        return kept.repeat(self.inputs, axis=-2).repeat(self.outputs, axis=-1)


def vector(length: int, pooling: Literal["sum", "max"] = "sum") -> Block:
    """Returns vectors of neighbouring outputs of one input, as sparse kernels take.

    Seen as the matrix [outputs, inputs] that is multiplied by activations, they are
    columns of height `length` and width 1.

    Examples:
      >>> vector(8)
      Block(inputs=1, outputs=8, pooling='sum')
    """
    return Block(inputs=1, outputs=length, pooling=pooling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member(Config):
    """An axis of a parameter that belongs to a group of channels.

    The axis is [repeats, units, inner], flattened: a head has `inner` features; a dense
    layer behind flattened images has `repeats` inputs, the pixels, of each channel.

    Attributes:
      path: of the parameter.
      axis: its number, from the end if negative.
      inner: neighbouring entries of one unit.
      scored: whether the member's scores count; its mask is the group's in any case.
    """

    path: str
    axis: int = -1
    inner: Size = 1
    scored: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group(Config):
    """Channels, neurons or heads that are removed from all members at once.

    Attributes:
      name: of the group.
      units: their number.
      members: where they are: a kernel's outputs, its bias, a norm's scale, the inputs
        of the next kernel.
    """

    name: str
    units: Size
    members: tuple[Member, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channels(Structure):
    """Channels, neurons and heads, with all that depends on them.

    A unit's score is the sum over its members'. A kernel whose inputs and outputs are
    in two groups keeps what both of them keep.

    Attributes:
      groups: what belongs together.
    """

    groups: tuple[Group, ...] = ()

    def unit_shapes(self, shapes: Shapes) -> dict[str, Shape]:
        """Returns the number of units of each group."""
        for group in self.groups:
            for member in group.members:
                _split(group, member, shapes)
        members = {member.path for group in self.groups for member in group.members}
        lonely = sorted(set(shapes) - members)
        checks.require(not lonely, "every pruned parameter needs a group", none=lonely)
        return {group.name: (group.units,) for group in self.groups}

    def sizes(self, shapes: Shapes) -> dict[str, int]:
        """Returns the number of weights in a unit of each group."""
        return {
            group.name: sum(
                math.prod(shapes[member.path]) // group.units
                for member in group.members
            )
            for group in self.groups
        }

    def pool(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the scores of the units of each group."""
        shapes = {path: leaf.shape for path, leaf in scores.items()}
        self.unit_shapes(shapes)
        return {
            group.name: sum(
                scores[member.path]
                .reshape(_split(group, member, shapes))
                .sum(axis=(0, 1, 3, 4))
                for member in group.members
                if member.scored
            )
            for group in self.groups
        }

    def spread(self, kept: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
        """Returns the masks of the members."""
        masks: dict[str, Any] = {}
        for group in self.groups:
            for member in group.members:
                split = _split(group, member, shapes)
                # The units stand alone on their axis; the mask is repeated over others.
                mask = kept[group.name].reshape(1, 1, -1, 1, 1)
                for axis in (0, 1, 3, 4):
                    mask = mask.repeat(split[axis], axis=axis)
                mask = mask.reshape(shapes[member.path])
                others = masks.get(member.path)
                masks[member.path] = mask if others is None else mask & others
        return masks


def _cut(path: str, shape: Shape, size: Iterable[int], what: Structure) -> Shape:
    """Returns how many pieces of a size the last two axes of a shape have."""
    height, width = size
    fits = len(shape) > 1 and not shape[-2] % height and not shape[-1] % width
    if not fits:
        raise ConfigError(
            f"{path}: {type(what).__name__} must divide its inputs and outputs: got "
            f"{what}, shape={list(shape)}"
        )
    return (*shape[:-2], shape[-2] // height, shape[-1] // width)


def _split(group: Group, member: Member, shapes: Shapes) -> Shape:
    """Returns a member's shape as [before, repeats, units, inner, after]."""
    if member.path not in shapes:
        hint = nearest(member.path, shapes)
        raise ConfigError(
            f"group {group.name!r} has the member {member.path!r}, which is no pruned "
            f"parameter{hint}"
        )
    shape = tuple(shapes[member.path])
    axis = member.axis % max(1, len(shape))
    one = group.units * member.inner
    if not -len(shape) <= member.axis < len(shape) or shape[axis] % one:
        raise ConfigError(
            f"axis {member.axis} of {member.path} must be a multiple of units · inner "
            f"of group {group.name!r}: got units={group.units}, inner={member.inner}, "
            f"shape={list(shape)}"
        )
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return before, shape[axis] // one, group.units, member.inner, after
