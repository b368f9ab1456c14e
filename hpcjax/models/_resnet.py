"""Residual networks for small images (CIFAR) and for full-size ones (ImageNet)."""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.collectives.halo import Space
from hpcjax.core import checks, errors
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.modules import (
    FLOAT32,
    ONES,
    ZEROS,
    BatchNorm,
    Conv,
    Dense,
    GroupNorm,
    HeadInit,
    NormKind,
    axes_of_space,
    gather_thin,
    head_initializer,
)
from hpcjax.models.resnet_config import ResNetConfig

Shortcut = Literal["A", "B"]
GROUP_SIZE = 16


class _Form(NamedTuple):
    """What follows from the depth: blocks per stage, block, stem, width, shortcut."""

    stages: tuple[int, ...]
    bottleneck: bool
    small_images: bool
    width: int
    shortcut: Shortcut


FORMS = {
    8: _Form((1, 1, 1), False, True, 16, "A"),
    20: _Form((3, 3, 3), False, True, 16, "A"),
    32: _Form((5, 5, 5), False, True, 16, "A"),
    44: _Form((7, 7, 7), False, True, 16, "A"),
    18: _Form((2, 2, 2, 2), False, False, 64, "B"),
    50: _Form((3, 4, 6, 3), True, False, 64, "B"),
    101: _Form((3, 4, 23, 3), True, False, 64, "B"),
}


class _Options(NamedTuple):
    """Settings that all blocks share."""

    norm: NormKind
    shortcut: Shortcut
    sync_axis: str | None
    zero_init_residual: bool
    policy: Policy


def _norm(channels: int, options: _Options, *, last: bool = False) -> nnx.Module:
    """Returns a norm; `last` is that in front of a block's addition."""
    scale_init = ZEROS if last and options.zero_init_residual else ONES
    if options.norm == "batch":
        return BatchNorm(
            channels,
            policy=options.policy,
            sync_axis=options.sync_axis,
            scale_init=scale_init,
        )
    # Groups of 16 channels, or of the largest power of two up to 16 that divides them.
    groups = channels // math.gcd(channels, GROUP_SIZE)
    return GroupNorm(
        channels, groups=groups, policy=options.policy, scale_init=scale_init
    )


def _pad_shortcut(x: jax.Array, channels: int, stride: int) -> jax.Array:
    """Returns shortcut A: every `stride`-th pixel, with zero channels appended."""
    missing = channels - x.shape[-1]
    return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, missing)))


class _Block(nnx.Module):
    """A residual block of two 3×3 convolutions, or a bottleneck of three.

    A bottleneck has 1×1, strided 3×3 and 1×1 convolutions, the last with four times the
    width.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, bottleneck: bool, options: _Options
    ):
        outputs = 4 * width if bottleneck else width
        conv = functools.partial(Conv, policy=options.policy)
        if bottleneck:
            plan = [
                (conv(inputs, width, kernel_size=1), width),
                (conv(width, width, kernel_size=3, stride=stride), width),
                (conv(width, outputs, kernel_size=1), outputs),
            ]
        else:
            plan = [
                (conv(inputs, width, kernel_size=3, stride=stride), width),
                (conv(width, width, kernel_size=3), width),
            ]
        self.depth, self.stride, self.outputs = len(plan), stride, outputs
        for number, (layer, channels) in enumerate(plan, 1):
            last = number == len(plan)
            setattr(self, f"conv{number}", layer)
            setattr(self, f"norm{number}", _norm(channels, options, last=last))
        changes = stride > 1 or inputs != outputs
        self.projects = changes and options.shortcut == "B"
        self.pads = changes and not self.projects
        if self.projects:
            self.shortcut = conv(inputs, outputs, kernel_size=1, stride=stride)
            self.shortcut_norm = _norm(outputs, options)

    def __call__(
        self, x: jax.Array, *, train: bool, space: Space
    ) -> tuple[jax.Array, Space]:
        if self.projects:
            x, space = gather_thin(x, space, *self.shortcut.window)
        cut = {"train": train, "space": space}
        y = x
        for number in range(1, self.depth + 1):
            y = getattr(self, f"conv{number}")(y, space=space)
            y = getattr(self, f"norm{number}")(y, **cut)
            y = jax.nn.relu(y) if number < self.depth else y
        if self.projects:
            x = self.shortcut_norm(self.shortcut(x, space=space), **cut)
        elif self.pads:
            x = _pad_shortcut(x, self.outputs, self.stride)
        return jax.nn.relu(x + y), space


class _Stage(nnx.Module):
    """Blocks of one width; `block(index)` makes them."""

    def __init__(self, blocks: int, block: Callable[[int], _Block]):
        self.blocks = blocks
        for index in range(blocks):
            setattr(self, f"block_{index}", block(index))

    def __call__(
        self, x: jax.Array, *, train: bool, space: Space
    ) -> tuple[jax.Array, Space]:
        for index in range(self.blocks):
            x, space = getattr(self, f"block_{index}")(x, train=train, space=space)
        return x, space


class _ResNet(nnx.Module):
    """The network of `resnet`."""

    def __init__(
        self,
        channels: int,
        outputs: int,
        form: _Form,
        options: _Options,
        head_init: HeadInit,
        space: Space,
    ):
        self.small_images, self.stages = form.small_images, len(form.stages)
        self.space = space
        kernel, stride = (3, 1) if form.small_images else (7, 2)
        self.conv_in = Conv(
            channels,
            form.width,
            kernel_size=kernel,
            stride=stride,
            policy=options.policy,
        )
        self.norm_in = _norm(form.width, options)
        inputs = form.width
        for index, blocks in enumerate(form.stages):
            width = form.width * 2**index
            stage = functools.partial(self._block, inputs, width, index, form, options)
            setattr(self, f"stage_{index}", _Stage(blocks, stage))
            inputs = 4 * width if form.bottleneck else width
        self.head = Dense(
            inputs,
            outputs,
            policy=options.policy,
            initializer=head_initializer(head_init),
            output=options.policy.output,
        )

    @staticmethod
    def _block(
        inputs: int, width: int, stage: int, form: _Form, options: _Options, index: int
    ) -> _Block:
        stride = 2 if stage > 0 and index == 0 else 1
        wide = 4 * width if form.bottleneck else width
        first = inputs if index == 0 else wide
        return _Block(first, width, stride, form.bottleneck, options)

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        del key
        x, space = gather_thin(x, self.space, *self.conv_in.window)
        x = self.norm_in(self.conv_in(x, space=space), train=train, space=space)
        x = jax.nn.relu(x)
        if not self.small_images:
            window = {"strides": (2, 2), "padding": ((1, 1), (1, 1))}
            x, space = gather_thin(x, space, (3, 3), *window.values(), (1, 1))
            x = layers.pool(x, (3, 3), **window, space=space)
        for index in range(self.stages):
            x, space = getattr(self, f"stage_{index}")(x, train=train, space=space)
        # Averaged in float32: bfloat16 sums of a full-size image lose digits.
        pooled = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
        if axes := axes_of_space(space):
            pooled = jax.lax.pmean(pooled, axes)
        return self.head(pooled)


def resnet(  # noqa: PLR0913 - fields of its config
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 8,
    width: int | None = None,
    norm: NormKind = "batch",
    shortcut: Shortcut | None = None,
    sync_axis: str | None = None,
    zero_init_residual: bool = False,
    head_init: HeadInit = "lecun",
    space: Space = (),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a residual network on images `[batch, height, width, channels]`.

    Depths 8, 20, 32 and 44 are for small images. They have 6n + 2 layers: a 3×3 stem,
    three stages of n blocks with `width`, 2·`width` and 4·`width` channels, and a head.
    Depths 18, 50 and 101 are for full-size images: a 7×7 stem of stride 2, max-pooling,
    and four stages, of bottleneck blocks from depth 50 on, whose stride is in the 3×3
    convolution. Convolutions pad half a kernel on every side and are drawn from
    N(0, 2 / fan_out).

    Args:
      inputs: (height, width, channels) of one image.
      outputs: number of classes.
      depth: 8, 20, 32, 44, 18, 50 or 101.
      width: channels of the first stage; None means 16 (small images) or 64.
      norm: "batch", or "group" with 16 channels in a group, which has no state.
      shortcut: the shortcut where the shape changes: "A" drops pixels and appends zero
        channels (default for small images), "B" is a strided 1×1 convolution and a norm
        (default for full-size images).
      sync_axis: mesh axis over which batch statistics are averaged; None takes those of
        one device's examples.
      zero_init_residual: whether the scale of each block's last norm starts at zero, so
        that every block starts as its shortcut.
      head_init: kernel of the last layer `head`: "lecun" or "zeros".
      space: mesh axes over which height and width are cut, see `layers.conv`; `apply`
        takes this device's block then, and gives the whole image's logits. Statistics
        are of whole images. What is too thin for a layer is gathered before it.
      policy: dtypes of parameters, products and logits; norms are float32 at least.

    Raises:
      ConfigError: an unknown depth, norm, shortcut or head_init, a width below 1,
        inputs that are not the shape of an image, or shortcut "A" of cut images.

    References:
      He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2016, §3.3, §4.

    Examples:
      >>> from hpcjax.core import trees
      >>> model = resnet((32, 32, 3), 10, depth=20)
      >>> trees.num_params(jax.eval_shape(model.init, jax.random.key(0))[0])
      269722
    """
    check_fields(ResNetConfig, depth=depth, width=width, norm=norm, shortcut=shortcut)
    form = _form(inputs, depth, width)
    chosen = shortcut or form.shortcut
    rule = "images that are cut in space need shortcut='B'"
    checks.require(chosen == "B" or not any(space), rule, shortcut=chosen)
    options = _Options(norm, chosen, sync_axis, zero_init_residual, policy)
    return from_nnx(
        lambda: _ResNet(inputs[-1], outputs, form, options, head_init, space)
    )


def _form(inputs: tuple[int, ...], depth: int, width: int | None) -> _Form:
    """Returns the form of a network, after checking the shape of its inputs."""
    if len(inputs) != 3 or min(inputs) < 1:
        raise errors.ConfigError(
            f"inputs must be (height, width, channels): got inputs={inputs}"
        )
    form = FORMS[depth]
    return form if width is None else form._replace(width=width)
