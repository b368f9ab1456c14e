"""CosmoFlow, which tells the parameters of a universe from a cube of it."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

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
from hpcjax.models.dropout import drop
from hpcjax.models.modules import FLOAT32, Dense, gather_thin
from hpcjax.models.volume_config import CosmoFlowConfig
from hpcjax.models.volumes import GLOROT, HE_FAN_IN, VolumeConv

Variant = Literal["tpds", "v2", "mlperf"]


class _Form(NamedTuple):
    """What a variant is made of, besides its convolutions."""

    hidden: tuple[int, int]  # of the fully connected layers
    slope: float  # of LeakyReLU below zero
    dropout: float  # the probability that an element is dropped
    pool: tuple[int, Literal["max", "mean"], int]  # window, kind, padding
    bias: bool  # of convolutions
    first_bias: float  # of fully connected layers
    bounded: bool  # whether outputs are 1.2 tanh
    drops_first: bool  # whether dropout is before the first of these layers, too


_FORMS = {
    "tpds": _Form((2048, 256), 0.01, 0.2, (3, "mean", 1), False, 0.1, False, True),
    "v2": _Form((2048, 256), 0.01, 0.5, (3, "mean", 1), False, 0.0, True, True),
    "mlperf": _Form((128, 64), 0.3, 0.5, (2, "max", 0), True, 0.0, True, False),
}


class _Layer(NamedTuple):
    """A convolution, and whether a pool follows."""

    inputs: int
    outputs: int
    stride: int
    pools: bool


def _plan(
    variant: str, side: int, channels: int, divisor: int
) -> tuple[list[_Layer], int]:
    """Returns the convolutions, and the side of what the last puts out."""
    if variant == "tpds":
        widths = [16, 32, 64, 128, 256, 256, 256]
    else:
        first, most = (16, 256) if variant == "v2" else (32, 512)
        pairs = side.bit_length() - 3  # log2(side) - 2
        widths = [min(first * 2**i, most) for i in range(pairs)]
    found: list[_Layer] = []
    for number, width in enumerate(widths):
        stride = 2 if variant == "tpds" and number == 3 else 1
        side = -(-side // stride)
        pools = side > 2 or variant != "tpds"
        found.append(_Layer(channels, width // divisor, stride, pools))
        channels, side = width // divisor, side // 2 if pools else side
    return found, side


class _CosmoFlow(nnx.Module):
    """The network of `cosmoflow`."""

    def __init__(
        self,
        plan: list[_Layer],
        points: int,
        outputs: int,
        divisor: int,
        form: _Form,
        space: Space,
        policy: Policy,
    ):
        self.form, self.space, self.output = nnx.static(form), space, policy.output
        self.pools = tuple(each.pools for each in plan)
        start = GLOROT if form.first_bias else HE_FAN_IN
        for number, each in enumerate(plan, 1):
            conv = VolumeConv(
                each.inputs,
                each.outputs,
                name=f"conv_{number}",
                stride=each.stride,
                use_bias=form.bias,
                initializer=start,
                policy=policy,
            )
            setattr(self, f"conv_{number}", conv)
        sizes = [width // divisor for width in form.hidden]
        sizes = [points * plan[-1].outputs, *sizes, outputs]
        for number in range(3):
            dense = Dense(*sizes[number : number + 2], initializer=start, policy=policy)
            if form.first_bias and dense.bias is not None:
                constant = nnx.initializers.constant(form.first_bias)
                dense.bias.set_metadata(initializer=constant)
            setattr(self, f"fc_{number + 1}", dense)

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        space = self.space
        for conv, pools in zip(self._convolutions(), self.pools, strict=True):
            x, space = gather_thin(x, space, *conv.window)
            x = jax.nn.leaky_relu(conv(x, space=space), self.form.slope)
            if pools:
                x, space = self._pool(x, space)
        x = layers.gather_space(x, space) if any(space) else x
        if train and self.form.dropout and key is None:
            raise errors.ConfigError(
                f"a training pass with dropout={self.form.dropout} needs a key: got "
                "none"
            )
        return self._connect(x.reshape(len(x), -1), key if train else None)

    def _convolutions(self) -> Iterator[Any]:
        for number in range(1, len(self.pools) + 1):
            yield getattr(self, f"conv_{number}")

    def _pool(self, x: jax.Array, space: Space) -> tuple[jax.Array, Space]:
        """Returns pools of blocks, or of all if they are too thin, and their cut."""
        size, kind, pad = self.form.pool
        window, strides, padding = (size,) * 3, (2,) * 3, ((pad, pad),) * 3
        x, space = gather_thin(x, space, window, strides, padding, (1, 1, 1))
        y = layers.pool(x, window, kind, strides=strides, padding=padding, space=space)
        return y, space

    def _connect(self, x: jax.Array, key: Key | None) -> jax.Array:
        """Returns outputs of what all devices of a sample have alike."""
        for number in (1, 2, 3):
            if number > 1 or self.form.drops_first:
                x = drop(x, self.form.dropout, key, f"fc_{number}")
            x = getattr(self, f"fc_{number}")(x)
            x = jax.nn.leaky_relu(x, self.form.slope) if number < 3 else x
        x = x.astype(self.output)
        return 1.2 * jnp.tanh(x) if self.form.bounded else x


def cosmoflow(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    variant: Variant = "tpds",
    width_divisor: int = 1,
    dropout: float | None = None,
    space: Space = (),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns CosmoFlow on cubes `[batch, side, side, side, channels]`.

    "tpds" has seven 3³ convolutions of 16, 32, 64, 128, 256, 256 and 256 channels, the
    fourth with stride 2, each with a LeakyReLU (slope 0.01) and, where the side is
    above 2 then, an average of 3³ with stride 2; and fully connected layers of 2048,
    256 and `outputs`. "v2" has log2(side) − 2 pairs of min(16 · 2^i, 256) channels, and
    outputs 1.2 tanh; "mlperf" those of min(32 · 2^i, 512) with biases, maxima of 2³,
    and fully connected layers of 128 and 64.

    Cut in space, blocks are gathered before the first layer that cannot take them; only
    behind that is dropout, so that all devices of a sample have one mask.

    Args:
      inputs: (side, side, side, channels); the side is a power of two.
      outputs: how many numbers are told.
      variant: "tpds", "v2" or "mlperf".
      width_divisor: what channels are divided by, but for inputs and outputs.
      dropout: probability that an input of a fully connected layer is dropped; None for
        the variant's, 0.2 and 0.5.
      space: mesh axes over which space is cut, see `layers.conv`; `apply` takes this
        device's block then, and gives outputs of whole samples.
      policy: dtypes of parameters, products and outputs.

    Raises:
      ConfigError: inputs that are no cubes of such a side, or a divisor that does not
        divide the channels.

    References:
      Oyama et al., The Case for Strong Scaling in Deep Learning, IEEE TPDS 2020.

    Examples:
      >>> from hpcjax import models
      >>> models.num_params(cosmoflow((128, 128, 128, 4), 4))
      9437636
    """
    check_fields(
        CosmoFlowConfig, variant=variant, width_divisor=width_divisor, dropout=dropout
    )
    side = inputs[0] if inputs else 0
    if len(inputs) != 4 or inputs[:3] != (side,) * 3 or min(*inputs, outputs) < 1:
        raise errors.ConfigError(
            "inputs must be (side, side, side, channels) and outputs at least 1: got "
            f"inputs={inputs}, outputs={outputs}"
        )
    rule = "the side of cubes must be a power of two, at least 8"
    checks.require(side >= 8 and side & (side - 1) == 0, rule, side=side)
    first, form = 32 if variant == "mlperf" else 16, _FORMS[variant]
    rule = f"width_divisor must divide the {first} channels of the first layer"
    checks.require(first % width_divisor == 0, rule, width_divisor=width_divisor)
    if dropout is not None:
        form = form._replace(dropout=dropout)
    plan, left = _plan(variant, side, inputs[-1], width_divisor)
    return from_nnx(
        lambda: _CosmoFlow(plan, left**3, outputs, width_divisor, form, space, policy)
    )
