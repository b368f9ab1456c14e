"""Making the layers of `flax.nnx` observable within a network."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from hpcjax.layers import Padding
from hpcjax.models.modules import Observable


class ObservableLinear(Observable, nnx.Linear):
    """`nnx.Linear` that a tap can observe."""

    kind = "dense"

    def __call__(self, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Applies `nnx.Linear`."""
        return self.apply_tap(inputs, super().__call__(inputs, *args, **kwargs))


class ObservableConv(Observable, nnx.Conv):
    """Two-dimensional `nnx.Conv` that a tap can observe."""

    kind = "conv"

    def __call__(self, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Applies `nnx.Conv`."""
        return self.apply_tap(inputs, super().__call__(inputs, *args, **kwargs))

    def options(self) -> dict[str, Any]:
        """Returns the layer's sizes and geometry."""
        return super().options() | {
            "kernel_size": _pair(self.kernel_size),
            "strides": _pair(self.strides),
            "padding": _padding(self.padding),
            "dilation": _pair(self.kernel_dilation),
            "groups": self.feature_group_count,
        }


def make_observable(module: nnx.Module) -> None:
    """Makes each `nnx.Linear` and `nnx.Conv` of a network observable, in place.

    Variables and their paths stay the same. Subclasses of these layers, stacks of them,
    and convolutions for which K-FAC has no statistics are left alone.
    """
    for _, node in nnx.iter_graph(module):
        if type(node) is nnx.Linear and node.kernel.ndim == 2:
            observable = ObservableLinear
        elif type(node) is nnx.Conv and _is_plain(node):
            observable = ObservableConv
        else:
            continue
        # The subclass adds no variables, so changing the class of the object suffices;
        # `nnx.Module.__setattr__` would treat the assignment as a new attribute.
        object.__setattr__(node, "__class__", observable)
        node.inputs, node.outputs = node.in_features, node.out_features


def _is_plain(conv: nnx.Conv) -> bool:
    """Returns whether a convolution is 2-D, unmasked, and of a padding we have."""
    plain = conv.kernel.ndim == 4 and conv.mask is None
    return (
        plain and _pair(conv.input_dilation) == (1, 1) and bool(_padding(conv.padding))
    )


def _pair(value: int | Sequence[int] | None) -> tuple[int, int]:
    """Returns flax's number, pair or None as a pair; None means 1."""
    if value is None or isinstance(value, int):
        return (value or 1, value or 1)
    first, second = value
    return (first, second)


def _padding(value: Any) -> Padding | None:
    """Returns the padding in the form of `layers.conv`; None if that has no such."""
    if isinstance(value, str):
        return value if value in ("SAME", "VALID") else None
    both = (value, value) if isinstance(value, int) else value
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in both)
