"""A network of inception blocks that predicts the spread of an ensemble."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import GlobePadding
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._postprocess import Gaussian, check_inputs, describe_members
from hpcjax.models._spread_nets import PLACE, Positive, predict_spread
from hpcjax.models.globe_conv import FieldNorm, GlobeConv, field_norm
from hpcjax.models.modules import FLOAT32, HE_FAN_OUT, ZEROS, param

Variant = Literal["resnet2d", "simple"]
# Channels of the blocks of "simple", in halves of the base.
_SIMPLE = (4, 5, 7, 7, 5, 4)
_COMPRESSED, _LAST, _HEAD = 3, 8, 4
_KINDS = ("mean", "deviation", "control", "analysis")


class _Branches(nnx.Module):
    """Convolutions of several sizes beside each other, see `layers.inception`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        sizes: Sequence[int],
        padding: GlobePadding,
        policy: Policy,
    ):
        self.sizes, self.padding, self.compute = tuple(sizes), padding, policy.compute
        for size in sizes:
            shape = (size, size, inputs, outputs)
            setattr(self, f"kernel_{size}", param(shape, HE_FAN_OUT, policy.param))
            setattr(self, f"bias_{size}", param((outputs,), ZEROS, policy.param))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernels, biases = (
            [getattr(self, f"{name}_{size}")[...] for size in self.sizes]
            for name in ("kernel", "bias")
        )
        x = x.astype(self.compute)
        return layers.inception(
            x, kernels, biases, padding=self.padding, compute=self.compute
        )


class _Block(nnx.Module):
    """Branches of 3, 5 and 7 points with norm and ReLU, and one of single points.

    In "resnet2d" that takes what the others put out and the block's input; in "simple"
    the input alone, and stands beside the others, a quarter of the channels each.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        variant: Variant,
        norm: FieldNorm,
        padding: GlobePadding,
        policy: Policy,
    ):
        self.simple = variant == "simple"
        each = outputs // 4 if self.simple else outputs
        self.branches = _Branches(inputs, each, (3, 5, 7), padding, policy)
        self.norm = field_norm(norm, 3 * each, policy)
        self.points = GlobeConv(
            inputs if self.simple else inputs + 3 * each,
            each,
            size=1,
            padding=padding,
            policy=policy,
            last=True,
            initializer=HE_FAN_OUT,
        )

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = self.branches(x)
        y = jax.nn.relu(y if self.norm is None else self.norm(y, train=train))
        if self.simple:
            return jnp.concatenate([y, self.points(x, train=train)], -1)
        return self.points(jnp.concatenate([y, x], -1), train=train)


class _SpreadNet(nnx.Module):
    """The network of `spread_net`."""

    def __init__(
        self,
        channels: tuple[list[int], list[int]],
        widths: tuple[int, ...],
        *,
        variant: Variant,
        base: int,
        positive: Positive,
        norm: FieldNorm,
        padding: GlobePadding,
        remat: bool,
        policy: Policy,
    ):
        self.own, self.spreads = map(tuple, channels)
        self.simple, self.blocks = variant == "simple", len(widths)
        self.positive, self.remat = positive, remat
        options: Any = {"norm": norm, "padding": padding, "policy": policy}
        own, spreads = map(len, channels)
        if self.simple:
            self.first = GlobeConv(own + spreads, base, **options)
            self.second = GlobeConv(base, base * 3 // 2, **options)
            beside, wide = 0, base * 3 // 2 + 1
        else:
            self.compress = GlobeConv(own, _COMPRESSED, size=1, **options)
            beside = spreads + _COMPRESSED
            self.first = GlobeConv(beside, base, **options)
            wide = base
        for at, width in enumerate(widths):
            block = _Block(wide + beside, width, variant, norm, padding, policy)
            setattr(self, f"block_{at}", block)
            wide = width
        last: Any = {"size": 1, "last": True, "padding": padding, "policy": policy}
        if not self.simple:
            self.join = GlobeConv(base + wide, _LAST, **options)
            self.narrow = GlobeConv(_LAST, _HEAD, initializer=HE_FAN_OUT, **last)
            wide = _HEAD
        self.head = GlobeConv(wide + 1, 1, **last)

    def _through(self, y: jax.Array, beside: list[jax.Array], train: bool) -> jax.Array:
        def apply(block: _Block, y: jax.Array) -> jax.Array:
            return block(y, train)

        step = nnx.remat(apply) if self.remat else apply
        for at in range(self.blocks):
            wide = jnp.concatenate([y, *beside], -1) if beside else y
            y = step(getattr(self, f"block_{at}"), wide)
        return y

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del key
        fields, raw = x["fields"], describe_members(x)[1][..., None]
        own, spreads = (fields[..., list(each)] for each in (self.own, self.spreads))
        if self.simple:
            y = self.first(jnp.concatenate([own, spreads], -1), train=train)
            y = jnp.concatenate([self.second(y, train=train), raw], -1)
            y = self._through(y, [], train)
        else:
            inputs = [spreads, self.compress(own, train=train)]
            first = self.first(jnp.concatenate(inputs, -1), train=train)
            y = jnp.concatenate([first, self._through(first, inputs, train)], -1)
            y = self.narrow(self.join(y, train=train), train=train)
        o = self.head(jnp.concatenate([y, raw], -1), train=train)[..., 0]
        return predict_spread(x, o, self.positive)


def _choose(channels: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns the channels of the control, or the members' means, and of deviations."""
    # What is before is of lead and level, what is behind a variable's name.
    found = [[word for word in name.split() if word in _KINDS] for name in channels]
    rule = f"channels must each say one of {', '.join(_KINDS)}"
    checks.require(all(found), rule, channels=tuple(channels))
    said = [words[0] for words in found]
    own = "control" if "control" in said else "mean"
    first, second = (
        [at for at, each in enumerate(said) if each == kind]
        for kind in (own, "deviation")
    )
    return first, second


def spread_net(  # noqa: PLR0913 - a field of the config each
    inputs: Any,
    outputs: int,
    *,
    variant: Variant = "resnet2d",
    base: int = 64,
    blocks: int | None = None,
    positive: Positive = "softplus",
    norm: FieldNorm = "batch",
    padding: GlobePadding = "periodic",
    remat: bool = False,
    channels: Sequence[str] = (),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a network of inception blocks of 3×3, 5×5, 7×7 and 1×1, of σ alone.

    "resnet2d" compresses the fields of the control member, or of the members' mean
    where it is no input, to three channels. These and the deviations go into each
    block; block i has base + 4 i channels. "simple" takes all of them at once. The
    members' own deviation of the target joins before the last layer, which is zero at
    first: σ is then theirs. The mean is the members'.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      variant: "resnet2d", the paper's, or "simple", its later one.
      base: channels of the first convolution.
      blocks: how many; None for the variant's, ten or six.
      positive: "softplus" of s' + o; "abs" of s + o, the paper's; "none" for o.
      norm: before each ReLU.
      padding: of longitudes; the paper's is "zero".
      remat: whether the blocks' activations are computed again for gradients.
      channels: names of those of "fields" but for the place's, which choose inputs.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: channels that are not named, or a base that "simple" cannot share.

    References:
      Grönquist et al., Deep learning for post-processing ensemble weather forecasts,
      Phil. Trans. R. Soc. A 379, 2021, and its code.

    Examples:
      >>> from hpcjax import models
      >>> shapes = {"members": (8, 8, 5, 1), "fields": (8, 8, 6)}
      >>> names = ["mean t", "deviation t", "control t"]
      >>> models.num_params(spread_net(shapes, 2, base=8, blocks=1, channels=names))
      9878
    """
    del outputs
    shape = check_inputs(inputs)["fields"]
    rule = "channels must name those of fields, but for the place's, which data has"
    good = len(channels) == shape[-1] - PLACE
    checks.require(good, rule, channels=len(channels), fields=shape[-1] - PLACE)
    widths: tuple[int, ...] = tuple(base + 4 * at for at in range(blocks or 10))
    if variant == "simple":
        checks.require(base % 8 == 0, "base must divide by 8 for simple", base=base)
        most = len(_SIMPLE)
        rule = f"blocks must be at most {most} for simple"
        checks.require((blocks or 0) <= most, rule, blocks=blocks)
        widths = tuple(base // 2 * each for each in _SIMPLE[: blocks or most])
    options: Any = {"variant": variant, "base": base, "positive": positive}
    options |= {"norm": norm, "padding": padding, "remat": remat, "policy": policy}
    return from_nnx(lambda: _SpreadNet(_choose(channels), widths, **options))
