"""The mesh axes along which a value may differ between devices, inside `shard_map`.

With `check_vma=True` JAX tracks these axes in the types of values ("varying manual
axes", vma) and refuses a result that may differ where the out specification promises a
replicated one. With `check_vma=False` no type carries them, and these functions change
nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from hpcjax.core.errors import ConfigError

Axes = str | tuple[str, ...]


def axis_names(axes: Axes) -> tuple[str, ...]:
    """Returns one axis name, or several, as a tuple.

    Examples:
      >>> axis_names("data")
      ('data',)
    """
    return (axes,) if isinstance(axes, str) else tuple(axes)


def require_axes(axes: Axes, who: str) -> None:
    """Checks that the code is traced inside a `shard_map`, or `vmap`, over mesh axes.

    Args:
      axes: names.
      who: what communicates over them, for the message.

    Raises:
      ConfigError: an axis is not there; names those that are.
    """
    lost = []
    for axis in axis_names(axes):
        try:
            jax.lax.axis_size(axis)
        except NameError:
            lost.append(axis)
    if lost:
        there = sorted(jax.sharding.get_abstract_mesh().manual_axes)
        raise ConfigError(
            f"{who} communicates over the mesh axes {axis_names(axes)}: call it inside "
            f"jax.shard_map over them, for {lost} is not among the axes here, {there}"
        )


def varying_axes(leaf: Any) -> frozenset[str]:
    """Returns the manual mesh axes along which `leaf` may differ."""
    return frozenset(jax.typeof(leaf).manual_axis_type.varying)


def vary(tree: Any, axes: Axes) -> Any:
    """Marks every leaf as differing along `axes`; values are unchanged.

    Axis names of `jax.vmap` are ignored: they are not part of a value's type.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    named = [axis for axis in axis_names(axes) if axis in manual]

    def mark(leaf: Any) -> Any:
        missing = tuple(axis for axis in named if axis not in varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def vary_like(tree: Any, example: Any) -> Any:
    """Marks every leaf as differing wherever any array of `example` does."""
    arrays = [leaf for leaf in jax.tree.leaves(example) if isinstance(leaf, jax.Array)]
    axes = frozenset().union(*map(varying_axes, arrays))
    return vary(tree, tuple(sorted(axes)))


def assume_equal(tree: Any, axes: Axes) -> Any:
    """Marks every leaf as equal along `axes`, which nobody checks; moves no data.

    For values that are equal by construction although their type says otherwise, such
    as the result of a broadcast by `ppermute`. If they are not equal, replicated values
    drift apart without any error.
    """

    def mark(leaf: Any) -> Any:
        known = tuple(axis for axis in axis_names(axes) if axis in varying_axes(leaf))
        return _equal.bind(leaf, axes=known) if known else leaf

    return jax.tree.map(mark, tree)


def after(tree: Any, earlier: Any) -> Any:
    """Makes every array depend on `earlier`; values and types are unchanged.

    All devices have to run a step's collectives in one order. Simulated devices of a
    busy processor do not always, where one of two collectives is in a branch of a
    `cond` and none needs the other's result (seen with jaxlib 0.10.2): one device waits
    in a `psum`, another in the branch's `ppermute`, until XLA ends the process after 40
    seconds. What depends on the other cannot overtake it.

    `jax.lax.optimization_barrier` is gone before XLA orders anything. So this selects
    by a comparison that the compiler cannot decide: whether a number of `earlier` is
    one certain NaN, of the 2**24 - 2 that float32 has. Operations make another.

    Args:
      tree: arrays of numbers.
      earlier: what a collective or `cond` returned; arrays of numbers. Of each the
        first number is looked at, for the whole array comes at once.

    Examples:
      >>> after({"w": jnp.array([1.0, jnp.nan])}, jnp.zeros(3))["w"].tolist()
      [1.0, nan]
    """
    known = [leaf for leaf in jax.tree.leaves(earlier) if leaf.size]
    if not known:
        return tree
    first = jnp.stack([leaf.reshape(-1)[0].astype(jnp.float32) for leaf in known])
    never = jnp.any(jax.lax.bitcast_convert_type(first, jnp.int32) == _NEVER)
    axes = tuple(sorted(varying_axes(never)))

    def depend(leaf: Any) -> Any:
        known = varying_axes(leaf)
        chosen = jnp.where(never, jnp.zeros_like(leaf), leaf)
        return assume_equal(chosen, tuple(axis for axis in axes if axis not in known))

    return jax.tree.map(depend, tree)


# The bits of a quiet NaN with a payload. NaNs that operations make have none: they are
# 0x7FC00000 or 0xFFC00000. No float16 or bfloat16 becomes this one, for the lower bits
# of theirs are zero.
_NEVER = 0x7FC0BEEF

# JAX has no operation from varying to replicated that moves no data: `pcast` goes the
# other way and `psum` communicates. This primitive changes the type alone; it lowers to
# its operand.
_equal = Primitive("assume_equal")


def _equal_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    kind = aval.manual_axis_type
    varying = frozenset(kind.varying) - set(axes)
    return aval.update(manual_axis_type=kind.update(varying=varying))


_equal.def_abstract_eval(_equal_type)
_equal.def_impl(lambda x, **_: x)
mlir.register_lowering(_equal, lambda _, x, **__: [x])
batching.primitive_batchers[_equal] = lambda arguments, dimensions, *, axes: (
    _equal.bind(arguments[0], axes=axes),
    dimensions[0],
)
