"""The mesh axes along which a value may differ between devices, inside `shard_map`.

With `check_vma=True` JAX tracks these axes in the types of values ("varying manual
axes", vma) and refuses a result that may differ where the out specification promises a
replicated one. With `check_vma=False` no type carries them, and these functions change
nothing.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Axes = str | tuple[str, ...]


def axis_names(axes: Axes) -> tuple[str, ...]:
    """Returns one axis name, or several, as a tuple.

    Examples:
      >>> axis_names("data")
      ('data',)
    """
    return (axes,) if isinstance(axes, str) else tuple(axes)


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
