"""Networks that predict the spread of an ensemble, of levels in depth or leads in time.

Levels stand in the channels: a 3×3×3 convolution of D levels is one 3×3 convolution of
D · C channels, whose kernel has blocks of the three slices.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import GlobePadding, double_globe, pad_globe
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._postprocess import Gaussian, check_inputs, describe_members
from hpcjax.models.modules import (
    FLOAT32,
    HE_FAN_OUT,
    ZEROS,
    Conv,
    Initializer,
    param,
)

PLACE = 3
Positive = Literal["softplus", "abs", "none"]
# Widths in units of the base, from the finest level to the coarsest.
_DOWN, _UP = (2, 3, 4, 5, 7), (4, 6, 7, 10)


def predict_spread(
    x: Mapping[str, jax.Array], o: jax.Array, positive: Positive
) -> Gaussian:
    """Returns the members' mean, and σ, which o of zero leaves as the members'.

    Where o has no points σ is theirs too; "none" is o itself.
    """
    mean, std = describe_members(x)
    o = o.astype(jnp.float32)
    rows, columns = o.shape[1:]
    if positive == "softplus":
        # log(eˢ − 1), of which softplus is s, without its overflow.
        raw = std + jnp.log(-jnp.expm1(-std))
        o = jax.nn.softplus(raw[:, :rows, :columns] + o)
    elif positive == "abs":
        o = jnp.abs(std[:, :rows, :columns] + o)
    return Gaussian(mean, std.at[:, :rows, :columns].set(o))


def check_sides(shape: tuple[int, ...], poolings: int, crop: bool) -> tuple[int, int]:
    """Returns the sides that are used."""
    part = 2**poolings
    sides = (shape[0] // part * part, shape[1] // part * part)
    checks.require(
        min(sides) > 0 and (crop or sides == tuple(shape[:2])),
        f"latitudes and longitudes must divide by {part}, to be halved {poolings} "
        "times; model.crop=true leaves the last ones as they are",
        sides=tuple(shape[:2]),
    )
    return sides


def _check_channels(channels: int, axes: tuple[int, int]) -> int:
    """Returns the channels of a lead and a level, without the place's."""
    leads, levels = axes
    rule = f"fields must have {PLACE} channels of the place, and as many of each of "
    rule += f"{leads} leads and {levels} levels"
    own, rest = divmod(channels - PLACE, leads * levels)
    checks.require(own > 0 and not rest, rule, channels=channels)
    return own


class _Step(nnx.Module):
    """A 3×3×3 convolution with bias of fields [batch, height, width, levels · C]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        levels: int,
        padding: GlobePadding,
        policy: Policy,
        initializer: Initializer = HE_FAN_OUT,
    ):
        shape = (3, 3, 3, inputs, outputs)
        self.kernel = param(shape, initializer, policy.param)
        self.bias = param((outputs,), ZEROS, policy.param)
        self.levels, self.padding, self.compute = levels, padding, policy.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, every = self.kernel[...], range(self.levels)
        nothing = jnp.zeros_like(kernel[0])
        # y_d = Σ_e K_{1 + e − d} x_e
        blocks = [
            jnp.concatenate(
                [kernel[1 + e - d] if abs(e - d) < 2 else nothing for d in every], -1
            )
            for e in every
        ]
        wide = pad_globe(x.astype(self.compute), 1, self.padding)
        bias = jnp.tile(self.bias[...], self.levels)
        whole = jnp.concatenate(blocks, axis=-2)
        return layers.conv(wide, whole, bias, padding="VALID", compute=self.compute)


def _join(x: jax.Array, y: jax.Array, levels: int) -> jax.Array:
    """Returns the channels of both, level by level."""
    parts = [each.reshape(*each.shape[:3], levels, -1) for each in (x, y)]
    return jnp.concatenate(parts, -1).reshape(*x.shape[:3], -1)


def halve(x: jax.Array) -> jax.Array:
    return nnx.max_pool(x, (2, 2), strides=(2, 2))


class _UNet3d(nnx.Module):
    """The network of `unet3d`."""

    def __init__(
        self,
        inputs: int,
        axes: tuple[int, int],
        sides: tuple[int, int],
        *,
        base: int,
        poolings: int,
        padding: GlobePadding,
        positive: Positive,
        remat: bool,
        policy: Policy,
    ):
        self.axes, self.sides, self.poolings = axes, sides, poolings
        self.padding, self.positive, self.remat = padding, positive, remat
        down = [inputs, *(base * each for each in _DOWN[:poolings])]
        up = [base * each for each in _UP[: poolings - 1]]
        sizes: dict[str, tuple[int, ...]] = {"down_0": (inputs, down[1], down[1])}
        for at in range(1, poolings):
            sizes[f"down_{at}"] = (down[at], down[at + 1])
        below = down[-1]
        for at in reversed(range(1, poolings)):
            sizes[f"up_{at}"] = (below + down[at], up[at - 1], up[at - 1])
            below = up[at - 1]
        sizes["up_0"] = (below + inputs, 4 * base, 2 * base)
        for name, each in sizes.items():
            for at, pair in enumerate(itertools.pairwise(each)):
                step = _Step(*pair, axes[1], padding, policy)
                setattr(self, f"{name}{'ab'[at]}", step)
        self.head = _Step(2 * base, 1, axes[1], padding, policy, ZEROS)

    def _convolve(self, name: str, x: jax.Array) -> jax.Array:
        def convolve(x: jax.Array) -> jax.Array:
            for each in "ab":
                if hasattr(self, name + each):
                    x = jax.nn.relu(getattr(self, name + each)(x))
            return x

        return jax.checkpoint(convolve)(x) if self.remat else convolve(x)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        rows, columns = self.sides
        y = _by_level(x["fields"][:, :rows, :columns], self.axes)
        skips = []
        for at in range(self.poolings):
            skips.append(y)  # the input, and then what is pooled
            y = halve(self._convolve(f"down_{at}", y))
        for at in reversed(range(self.poolings)):
            y = double_globe(y, self.padding)
            y = self._convolve(f"up_{at}", _join(y, skips[at], self.axes[1]))
        return predict_spread(x, self.head(y).mean(-1), self.positive)


def _by_level(fields: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns channels level by level, of all leads, and each time the place."""
    leads, levels = axes
    shape = fields.shape[:3]
    own = fields[..., :-PLACE].reshape(*shape, leads, levels, -1)
    own = jnp.moveaxis(own, 3, 4).reshape(*shape, levels, -1)
    place = jnp.broadcast_to(fields[..., None, -PLACE:], (*shape, levels, PLACE))
    return jnp.concatenate([own, place], -1).reshape(*shape, -1)


def unet3d(
    inputs: Any,
    outputs: int,
    *,
    base: int = 32,
    poolings: int = 5,
    padding: GlobePadding = "periodic",
    positive: Positive = "softplus",
    crop: bool = False,
    remat: bool = False,
    axes: tuple[int, int] = (1, 1),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a 3-D U-Net of levels, which are never pooled; it predicts σ alone.

    Convolutions are 3×3×3 with bias and ReLU; latitudes and longitudes are halved by
    the largest of 2×2 and doubled bilinearly. What is skipped to is the input and what
    was pooled. The mean is the members'. σ is softplus(s' + o), with softplus(s') the
    members' own, and o zero at first; or o itself, the paper's. o is the mean of what
    the levels put out, so that any of them may be the target's.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      base: a half of the first level's channels.
      poolings: halvings, from 1 to 5, the paper's.
      padding: of longitudes; "zero" is the paper's.
      positive: "softplus", "abs" of s + o, or "none" for o, which may be negative.
      crop: whether the last rows and columns that do not divide stay as they are.
      remat: whether activations are computed again for gradients.
      axes: how many leads and levels the channels of "fields" are of.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: sides or channels that do not divide.

    References:
      Grönquist et al., Predicting weather uncertainty with deep convnets, 2019.

    Examples:
      >>> from hpcjax import models
      >>> shapes = {"members": (32, 32, 5, 7), "fields": (32, 32, 3 * 2 * 13 + 3)}
      >>> models.num_params(unet3d(shapes, 2, base=8, axes=(3, 2)))
      1113065
    """
    del outputs
    shape = check_inputs(inputs)["fields"]
    rule = f"poolings must be from 1 to {len(_DOWN)}"
    checks.require(1 <= poolings <= len(_DOWN), rule, poolings=poolings)
    sides = check_sides(shape, poolings, crop)
    channels = axes[0] * _check_channels(shape[-1], axes) + PLACE
    options: Any = {"padding": padding, "positive": positive, "remat": remat}
    options |= {"base": base, "poolings": poolings, "policy": policy}
    return from_nnx(lambda: _UNet3d(channels, axes, sides, **options))


def conv_lstm_cell(gates: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns memory and output of what the four convolutions say, i, f, o and g."""
    i, f, o, g = jnp.split(gates, 4, axis=-1)
    kept = jax.nn.sigmoid(f + 1) * memory
    memory = kept + jax.nn.sigmoid(i) * jnp.tanh(g)
    return memory, jax.nn.sigmoid(o) * jnp.tanh(memory)


class _ConvLstm(nnx.Module):
    """The network of `conv_lstm`."""

    def __init__(
        self,
        inputs: int,
        axes: tuple[int, int],
        sides: tuple[int, int],
        *,
        width: int,
        poolings: int,
        padding: GlobePadding,
        remat: bool,
        policy: Policy,
    ):
        self.axes, self.sides, self.poolings = axes, sides, poolings
        self.padding, self.remat, self.width = padding, remat, width

        def declare(inputs: int, outputs: int, initializer: Any = HE_FAN_OUT) -> Conv:
            return Conv(
                inputs,
                outputs,
                kernel_size=3,
                padding="VALID",
                use_bias=True,
                initializer=initializer,
                policy=policy,
            )

        self.first = declare(inputs, width)
        for at in range(poolings):
            setattr(self, f"down_{at}", declare(width, width))
            setattr(self, f"up_{at}", declare(2 * width, width))
        self.gates = declare(2 * width, 4 * width)
        self.head = declare(width, 1, ZEROS)

    def _convolve(self, name: str, x: jax.Array) -> jax.Array:
        return getattr(self, name)(pad_globe(x, 1, self.padding))

    def _encode(self, x: jax.Array) -> list[jax.Array]:
        """Returns features of each size, the finest first."""
        found = [jax.nn.relu(self._convolve("first", x))]
        for at in range(self.poolings):
            halved = halve(found[-1])
            found.append(jax.nn.relu(self._convolve(f"down_{at}", halved)))
        return found

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        rows, columns = self.sides
        fields = x["fields"][:, :rows, :columns]
        leads, batch = self.axes[0], len(fields)
        own = fields[..., :-PLACE].reshape(batch, rows, columns, leads, -1)
        place = jnp.broadcast_to(fields[..., None, -PLACE:], (*own.shape[:-1], PLACE))
        times = jnp.moveaxis(jnp.concatenate([own, place], -1), 3, 0)
        encode: Callable[..., Any] = self._encode
        if self.remat:
            encode = jax.checkpoint(encode)
        found = encode(times.reshape(leads * batch, *times.shape[2:]))
        series = found[-1].reshape(leads, batch, *found[-1].shape[1:])

        def advance(state: Any, x: jax.Array) -> tuple[Any, None]:
            memory, h = state
            gates = self._convolve("gates", jnp.concatenate([x, h], -1))
            return conv_lstm_cell(gates, memory), None

        start = jnp.zeros_like(series[0])
        y = jax.lax.scan(advance, (start, start), series)[0][1]
        for at in reversed(range(self.poolings)):
            last = found[at][-batch:]
            y = jnp.concatenate([double_globe(y, self.padding), last], -1)
            y = jax.nn.relu(self._convolve(f"up_{at}", y))
        return predict_spread(x, self._convolve("head", y)[..., 0], "softplus")


def conv_lstm(
    inputs: Any,
    outputs: int,
    *,
    width: int = 64,
    poolings: int = 1,
    padding: GlobePadding = "periodic",
    crop: bool = False,
    remat: bool = False,
    axes: tuple[int, int] = (1, 1),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a convolutional LSTM of leads, one after another; it predicts σ alone.

    c ← σ(f + 1) ∘ c + σ(i) ∘ tanh(g) and h ← σ(o) ∘ tanh(c), with i, f, o and g 3×3
    convolutions of what the encoder makes of a lead, and of h. The last h is doubled,
    with the last lead's features of each size. Levels are channels. The mean is the
    members'; σ is as in `unet3d`.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      width: channels.
      poolings: halvings of the encoder.
      padding: of longitudes.
      crop: whether the last rows and columns that do not divide stay as they are.
      remat: whether the encoder's activations are computed again for gradients.
      axes: how many leads and levels the channels of "fields" are of.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: sides or channels that do not divide.

    References:
      Shi et al., Convolutional LSTM network, NeurIPS 2015.

    Examples:
      >>> shapes = {"members": (4, 8, 5, 1), "fields": (4, 8, 9)}
      >>> sorted(conv_lstm(shapes, 2, width=2).init(jax.random.key(0))[0])
      ['down_0', 'first', 'gates', 'head', 'up_0']
    """
    del outputs
    shape = check_inputs(inputs)["fields"]
    sides = check_sides(shape, poolings, crop)
    channels = axes[1] * _check_channels(shape[-1], axes) + PLACE
    options: Any = {"padding": padding, "remat": remat, "policy": policy}
    options |= {"width": width, "poolings": poolings}
    return from_nnx(lambda: _ConvLstm(channels, axes, sides, **options))
