"""Building blocks of networks: NNX modules that hold parameters and call `layers`.

Modules are built without arrays. A parameter is declared by its shape, dtype and
initializer, and drawn later by `from_nnx` with a key derived from its path.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.collectives.halo import Space
from hpcjax.core import errors
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import derive
from hpcjax.core.model import Tap, observe, reuse_error
from hpcjax.layers import Padding

Initializer = Callable[..., jax.Array]
HeadInit = Literal["lecun", "zeros"]
NormKind = Literal["batch", "group"]

ZEROS: Initializer = nnx.initializers.zeros
ONES: Initializer = nnx.initializers.ones
LECUN: Initializer = nnx.initializers.lecun_normal()
HE_FAN_OUT: Initializer = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")

FLOAT32 = Policy()
# Metadata of variables that hold the values of all blocks of a stack.
STACKED = "stacked"


class Observation(nnx.Variable):
    """The tap of a layer, set after `merge`; a scan slices it like the parameters."""


class Record(nnx.Variable):
    """The value that the forward function of a layer's tap returned."""


class Loss(nnx.BatchStat):
    """A weighted loss that a layer adds to the objective; set anew in each pass."""


def param(shape: tuple[int, ...], initializer: Initializer, dtype: str) -> nnx.Param:
    """Declares a parameter `initializer(key, shape, dtype)` without drawing it."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), initializer=initializer)


def statistic(shape: tuple[int, ...], initializer: Initializer) -> nnx.BatchStat:
    """Declares a float32 running statistic with the start value of `initializer`."""
    return nnx.BatchStat(
        jax.ShapeDtypeStruct(shape, "float32"), initializer=initializer
    )


def loss() -> Loss:
    """Declares a loss that a layer adds to the objective, a float32 scalar."""
    return Loss(jax.ShapeDtypeStruct((), "float32"), initializer=ZEROS)


def head_initializer(head_init: HeadInit) -> Initializer:
    """Returns the initializer of a classification head's kernel.

    "lecun" draws from a truncated normal distribution of variance 1/inputs. With
    "zeros" the first loss is exactly log(classes), and the first gradients of all
    layers below the head are exactly zero.

    Raises:
      ConfigError: an unknown name.
    """
    return choice("head_init", head_init, {"lecun": LECUN, "zeros": ZEROS})


def choice(name: str, value: str, allowed: Mapping[str, Any]) -> Any:
    """Returns `allowed[value]`, else raises ConfigError with the nearest key."""
    if value not in allowed:
        hint = errors.nearest(value, allowed)
        raise errors.ConfigError(f"unknown {name}: got {name}={value!r}{hint}")
    return allowed[value]


def require_cuttable(name: str, x: jax.Array, space: Space, *window: Any) -> None:
    """Raises ConfigError if a layer cannot take blocks, see `layers.find_obstacle`."""
    if any(space) and (found := layers.find_obstacle(x, space, *window)):
        what, axis = found
        raise errors.ConfigError(f"{what} at {name}: use fewer devices along {axis}")


def gather_thin(x: jax.Array, space: Space, *window: Any) -> tuple[jax.Array, Space]:
    """Returns blocks, and how they are cut; gathered, and (), if a layer cannot."""
    if any(space) and layers.find_obstacle(x, space, *window):
        return layers.gather_space(x, space), ()
    return x, space


def axes_of_space(space: Space) -> tuple[str, ...]:
    """Returns the mesh axes over which space is cut."""
    return tuple(axis for axis in space if axis)


class Observable(nnx.Module):
    """A layer that a tap can observe."""

    kind = ""
    depth: int | None = None
    inputs: int
    outputs: int
    kernel: nnx.Param
    bias: nnx.Param | None = None
    tap: Observation | None = None
    record: Record | None = None

    def options(self) -> dict[str, Any]:
        """Returns the sizes that are needed to compute the layer's statistics.

        `depth` is the length of the leading axis of parameters and statistics in a
        scanned stack, None outside one.
        """
        return {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "use_bias": self.bias is not None,
            "depth": self.depth,
        }

    def apply_tap(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns the output y, passed through the layer's tap if it has one.

        Args:
          x: inputs of the layer.
          y: outputs of the layer.

        Raises:
          ValueError: the tap records the forward pass, and the layer is used twice.
        """
        if self.tap is None:
            return y
        tap: Tap = self.tap.get_value()
        y, record = observe(tap, x, y)
        if tap.forward is not None:
            if self.record is not None and not tap.overwrites:
                raise reuse_error(self.tap.get_metadata()["path"])
            self.record = nnx.data(Record(record))
        return y


class Dense(Observable):
    """y = x W + b; parameters `kernel` [inputs, outputs] and `bias` [outputs]."""

    kind = "dense"

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        policy: Policy,
        use_bias: bool = True,
        initializer: Initializer = LECUN,
        output: str | None = None,
    ):
        """Declares the parameters; `output` is the result's dtype if not compute's."""
        self.kernel = param((inputs, outputs), initializer, policy.param)
        self.bias = param((outputs,), ZEROS, policy.param) if use_bias else None
        self.compute, self.output = policy.compute, output
        self.inputs, self.outputs = inputs, outputs

    def __call__(self, x: jax.Array, *, add_bias: bool = True) -> jax.Array:
        """Maps `[..., inputs]` to `[..., outputs]`.

        Args:
          x: inputs.
          add_bias: whether the bias is added here, not by what follows; a tap observes
            what is returned.
        """
        x = x.astype(self.compute)
        bias = None
        if self.bias is not None and add_bias:
            bias = self.bias.get_value()
        kernel = self.kernel.get_value()
        y = layers.dense(x, kernel, bias, compute=self.compute, output=self.output)
        return self.apply_tap(x, y)


class Conv(Observable):
    """Convolution; `kernel` [height, width, inputs, outputs] and maybe `bias`."""

    kind = "conv"
    name = ""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel_size: int,
        stride: int = 1,
        padding: Padding | None = None,
        dilation: int = 1,
        use_bias: bool = False,
        initializer: Initializer = HE_FAN_OUT,
        policy: Policy,
    ):
        """Declares the parameters; `padding=None` adds half a kernel on all sides."""
        half = dilation * (kernel_size // 2)
        self.kernel = param(
            (kernel_size, kernel_size, inputs, outputs), initializer, policy.param
        )
        self.bias = param((outputs,), ZEROS, policy.param) if use_bias else None
        # For even sides and stride 2, "SAME" would pad on one side only; half a kernel
        # on both is what PyTorch's networks have.
        self.padding = nnx.static(padding or ((half, half), (half, half)))
        self.strides, self.kernel_size = (stride, stride), (kernel_size, kernel_size)
        self.dilation, self.compute = (dilation, dilation), policy.compute
        self.inputs, self.outputs = inputs, outputs

    def options(self) -> dict[str, Any]:
        """Returns the layer's sizes and geometry."""
        return super().options() | {
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "dilation": self.dilation,
        }

    @property
    def window(self) -> tuple[Any, ...]:
        """Its kernel's size, strides, padding and dilation."""
        return self.kernel_size, self.strides, self.padding, self.dilation

    def __call__(self, x: jax.Array, *, space: Space = ()) -> jax.Array:
        """Maps images `[batch, height, width, inputs]` to images of `outputs`.

        Args:
          x: images, or this device's blocks of them.
          space: how they are cut, see `layers.conv`.

        Raises:
          ConfigError: blocks that are too thin, or outputs that do not divide.
        """
        require_cuttable(self.name, x, space, *self.window)
        x = x.astype(self.compute)
        bias = None if self.bias is None else self.bias[...]
        y = layers.conv(
            x,
            self.kernel[...],
            bias,
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
            compute=self.compute,
            space=space,
        )
        return self.apply_tap(x, y)


class BatchNorm(nnx.Module):
    """Batch normalisation; parameters `scale`, `bias`, state `mean`, `variance`."""

    def __init__(
        self,
        channels: int,
        *,
        policy: Policy,
        sync_axis: str | None = None,
        scale_init: Initializer = ONES,
    ):
        """Declares parameters and running statistics of `channels` channels."""
        self.scale = param((channels,), scale_init, policy.param)
        self.bias = param((channels,), ZEROS, policy.param)
        self.mean = statistic((channels,), ZEROS)
        self.variance = statistic((channels,), ONES)
        self.sync_axis = sync_axis

    def __call__(self, x: jax.Array, *, train: bool, space: Space = ()) -> jax.Array:
        """Normalises `[..., channels]`; in training also updates the statistics.

        Those of blocks that are cut by `space` are of whole examples.
        """
        axes = axes_of_space(space)
        if axes and self.sync_axis:
            axes = (self.sync_axis, *axes)
        running = layers.RunningStatistics(self.mean[...], self.variance[...])
        y, running = layers.batch_norm(
            x,
            self.scale[...],
            self.bias[...],
            running,
            train=train,
            axis_name=axes or self.sync_axis,
        )
        if train:
            self.mean.set_value(running.mean)
            self.variance.set_value(running.variance)
        return y


class GroupNorm(nnx.Module):
    """Group normalisation with `groups` groups; parameters `scale`, `bias`."""

    def __init__(
        self,
        channels: int,
        *,
        groups: int,
        policy: Policy,
        scale_init: Initializer = ONES,
    ):
        """Declares the parameters of `channels` channels."""
        self.scale = param((channels,), scale_init, policy.param)
        self.bias = param((channels,), ZEROS, policy.param)
        self.groups = groups

    def __call__(self, x: jax.Array, *, train: bool, space: Space = ()) -> jax.Array:
        """Normalises `[batch, ..., channels]`, the same in training and evaluation."""
        del train
        return layers.group_norm(
            x,
            self.scale[...],
            self.bias[...],
            groups=self.groups,
            axis_name=axes_of_space(space),
        )


def stacked_initializer(initializer: Initializer, depth: int) -> Initializer:
    """Returns an initializer for `[depth, ...]` that draws slice i with key (key, i).

    A deeper stack therefore starts with the same first layers as a shallower one.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        def one(index: jax.Array) -> jax.Array:
            return initializer(derive(key, "layer", index), shape[1:], dtype)

        return jax.vmap(one)(jnp.arange(depth))

    return init
