"""Where the kept values of a pruned parameter are, and moving values there and back.

A parameter is cut into parts, each with positions of its own: the layers of a stack, so
that a scan can slice them, and the shards of a sharded array, so that devices need no
values of each other. A part's positions are those of its flattened elements, in rising
order. All parts have room for as many values as the fullest one keeps; positions that
another part has too many lie behind its end, and their values are zero and never used.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hpcjax.core import checks
from hpcjax.core.structs import pytree, static
from hpcjax.core.varying import axis_names, vary_like
from hpcjax.optim.sparse_state.options import INDICES, Index

LARGEST_PART = 2**31
Shape = tuple[int, ...]


@pytree
class Positions:
    """The positions of the kept values of one parameter.

    Attributes:
      places: int32 `[*stack, *shards, kept]`, or a bitmap, uint8 `[*stack, *shards,
        ceil(size / 8)]`; `shards` is no axis if there is but one.
      kept: the number of values that each part has room for.
      block: the shape of one part, of `size` elements.
      grid: the number of shards along each axis of `block`.
      by_layer: whether a stack may be walked layer by layer: not if its layers are
        shared out among devices, which would gather them, nor on explicit mesh axes.
    """

    places: Any
    kept: int = static()
    block: Shape = static()
    grid: Shape = static()
    by_layer: bool = static(default=True)

    @property
    def size(self) -> int:
        """The number of elements of a part."""
        return math.prod(self.block)

    @property
    def lead(self) -> Shape:
        """The leading axes of values: of the stack, and of shards."""
        return self.places.shape[:-1]

    @property
    def stack(self) -> Shape:
        """The length of the stack; nothing without one, or inside its scan."""
        return self.lead[:-1] if math.prod(self.grid) > 1 else self.lead

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        pairs = zip(self.grid, self.block, strict=True)
        return (*self.stack, *(shards * length for shards, length in pairs))

    def indices(self) -> Int[Array, "*lead kept"]:
        """Returns the positions as numbers."""
        if self.places.dtype != jnp.uint8:
            return self.places
        bits = jnp.unpackbits(self.places, axis=-1, count=self.size)
        return _list_true(bits, self.kept)

    # One program each where they are not traced, as when a state is made.
    @functools.partial(jax.jit, inline=True)
    def gather(self, dense: Float[Array, "..."]) -> Float[Array, "*lead kept"]:
        """Returns the kept values of a parameter."""
        if self.stack and self.by_layer:
            return jax.lax.map(lambda pair: pair[0].gather(pair[1]), (self, dense))

        def take(row: Array, at: Array) -> Array:
            return row.at[at].get(
                mode="fill",
                fill_value=0,
                unique_indices=True,
                indices_are_sorted=True,
            )

        rows = _cut(dense, self.stack, self.grid, self.block)
        return _over_parts(take, self.lead)(rows, self.indices())

    @functools.partial(jax.jit, inline=True)
    def write(
        self, dense: Float[Array, "..."], values: Float[Array, "*lead kept"]
    ) -> Float[Array, "..."]:
        """Returns the parameter with other kept values.

        A stack is written layer by layer: XLA then does so in the array's own memory,
        if it is donated, where one scatter would be sorted and copied as a whole.
        """
        if not self.by_layer:
            return self.expand(values)
        if self.stack:

            def put_layer(layer: Array, whole: Array) -> Array:
                at = jax.tree.map(lambda places: places[layer], self)
                new = at.write(whole[layer], values[layer])
                return jax.lax.dynamic_update_index_in_dim(whole, new, layer, 0)

            whole = vary_like(dense, (values, self.places))
            return jax.lax.fori_loop(0, self.stack[0], put_layer, whole)

        rows = _cut(dense, (), self.grid, self.block)
        rows = _over_parts(_put, self.lead)(rows, values, self.indices())
        return _join(rows, (), self.grid, self.block)

    @functools.partial(jax.jit, inline=True)
    def expand(self, values: Float[Array, "*lead kept"]) -> Float[Array, "..."]:
        """Returns the parameter with these values, and zeros where it is pruned."""
        if self.by_layer:
            return self.write(jnp.zeros(self.shape, values.dtype), values)

        def put(values: Array, at: Array) -> Array:
            return _put(jnp.zeros(self.size, values.dtype), values, at)

        rows = _over_parts(put, self.lead)(values, self.indices())
        return _join(rows, self.stack, self.grid, self.block)


def _put(row: Array, values: Array, at: Array) -> Array:
    """Returns a flattened part with other values at some positions."""
    return row.at[at].set(
        values, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def locate(
    path: str,
    mask: ArrayLike,
    *,
    kept: int | None = None,
    index: Index = "int32",
    stacked: bool = False,
    sharding: Sharding | None = None,
) -> Positions:
    """Returns the positions at which a mask is true.

    Args:
      path: of the parameter, for messages.
      mask: bool, with the parameter's shape.
      kept: number of true values of the fullest part; needed for a traced mask.
      index: how positions are stored, see `SparseStateConfig`.
      stacked: whether axis 0 is a stack of layers, which a scan slices.
      sharding: of the parameter.

    Raises:
      ConfigError: an unknown index, a part of 2³¹ or more elements, a mask that is not
        bool, or a traced one without `kept`.
    """
    checks.require_choice("index", index, INDICES)
    shape, dtype = np.shape(mask), jnp.result_type(mask)
    rule = f"the mask of {path} must be bool"
    checks.require(dtype == jnp.bool_, rule, dtype=str(dtype))
    stack, inner = (shape[:1], shape[1:]) if stacked else ((), shape)
    grid = _count_shards(shape, sharding)[len(stack) :]
    block = tuple(n // shards for n, shards in zip(inner, grid, strict=True))
    rule = f"{path}: int32 positions need a part of less than 2**31 elements"
    checks.require(math.prod(block) < LARGEST_PART, rule, size=math.prod(block))
    mask = mask if isinstance(mask, jax.core.Tracer) else np.asarray(mask)
    bits = _cut(mask, stack, grid, block)
    if kept is None:
        rule = f"{path}: a traced mask needs the number that it keeps"
        checks.require(isinstance(bits, np.ndarray), rule, kept=kept)
        kept = int(np.sum(bits, axis=-1).max(initial=0))
    if index == "bitmap":
        places = jnp.packbits(jnp.asarray(bits), axis=-1)
    elif isinstance(bits, np.ndarray):
        places = jnp.asarray(_list_on_host(bits, kept))
    else:
        places = _list_true(bits, kept)
    if isinstance(sharding, NamedSharding):
        spec = _spec_of_values(sharding, len(shape), len(stack))
        places = jax.device_put(places, NamedSharding(sharding.mesh, spec))
    return Positions(
        places=places,
        kept=kept,
        block=block,
        grid=grid,
        by_layer=_can_walk(sharding, stacked),
    )


def _can_walk(sharding: Sharding | None, stacked: bool) -> bool:
    """Says whether an array's layers are all on every device, on implicit axes."""
    if not isinstance(sharding, NamedSharding):
        return True
    if AxisType.Explicit in sharding.mesh.axis_types:
        return False
    return not (stacked and sharding.spec and sharding.spec[0])


def _over_parts(function: Callable[..., Any], lead: Shape) -> Callable[..., Any]:
    """Returns a function of one part for all of them.

    Axes are not merged: one of them may be sharded, and XLA would gather its shards.
    """
    for _ in lead:
        function = jax.vmap(function)
    return function


def _list_true(bits: Array, kept: int) -> Int[Array, "*lead kept"]:
    """Returns where each row is true; what is missing to `kept` lies behind its end."""
    size = bits.shape[-1]

    def find(row: Array) -> Array:
        found = jnp.nonzero(row, size=kept, fill_value=size)[0]
        # No position may occur twice: scatters rely on that.
        return jnp.where(found < size, found, size + jnp.arange(kept))

    return _over_parts(find, bits.shape[:-1])(bits).astype(jnp.int32)


def _list_on_host(bits: np.ndarray, kept: int) -> np.ndarray:
    """Does the same for masks that are there already, and compiles nothing."""
    size = bits.shape[-1]
    places = np.empty((*bits.shape[:-1], kept), np.int32)
    for row in np.ndindex(places.shape[:-1]):
        found = np.flatnonzero(bits[row])
        behind = size + np.arange(kept - found.size)
        places[row] = np.concatenate([found, behind])
    return places


def _cut(dense: Any, stack: Shape, grid: Shape, block: Shape) -> Any:
    """Returns the parts of a parameter, flattened, `[*stack, *shards, size]`."""
    start = len(stack)
    split = [n for pair in zip(grid, block, strict=True) for n in pair]
    outer = [start + 2 * axis for axis in range(len(block))]
    inner = [axis + 1 for axis in outer]
    parts = dense.reshape(*stack, *split).transpose(*range(start), *outer, *inner)
    shards = (math.prod(grid),) if math.prod(grid) > 1 else ()
    return parts.reshape(*stack, *shards, math.prod(block))


def _join(rows: jax.Array, stack: Shape, grid: Shape, block: Shape) -> jax.Array:
    """Returns the parameter with these parts; the inverse of `_cut`."""
    start, axes = len(stack), len(block)
    order = [n for axis in range(start, start + axes) for n in (axis, axis + axes)]
    parts = rows.reshape(*stack, *grid, *block).transpose(*range(start), *order)
    whole = [shards * length for shards, length in zip(grid, block, strict=True)]
    return parts.reshape(*stack, *whole)


def _count_shards(shape: Shape, sharding: Sharding | None) -> Shape:
    """Returns the number of shards along each axis."""
    shard = shape if sharding is None else sharding.shard_shape(shape)
    pairs = zip(shape, shard, strict=True)
    return tuple(whole // part if part else 1 for whole, part in pairs)


def _spec_of_values(sharding: NamedSharding, ndim: int, stack: int) -> PartitionSpec:
    """Returns the specification of an array `[*stack, *shards, kept]`."""
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    shards = [name for axes in spec[stack:] if axes for name in axis_names(axes)]
    return PartitionSpec(*spec[:stack], *([tuple(shards)] if shards else []))
