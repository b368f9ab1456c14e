"""A network that corrects an ensemble's mean, with a head that knows each place."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import GlobePadding, double_globe
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._postprocess import Gaussian, check_inputs, describe_members
from hpcjax.models._spread_nets import PLACE, check_sides, halve
from hpcjax.models.globe_conv import FieldNorm, GlobeConv
from hpcjax.models.modules import FLOAT32, HE_FAN_OUT, ZEROS, loss, param
from hpcjax.models.postprocess_config import BY_PLACE, LcnConfig


class _PlaceHead(nnx.Module):
    """o(p) = Σ_c w(c, p) u(c, p) + b(p), and what w and b of neighbours differ by."""

    def __init__(
        self, features: int, sides: tuple[int, int], lcn: LcnConfig, policy: Policy
    ):
        window = (lcn.kernel, lcn.kernel, features, 1)
        self.kernel = param((*sides, *window), ZEROS, policy.param)
        self.bias = param(sides, ZEROS, policy.param)
        self.lcn, self.compute = lcn, policy.compute
        self.added = loss() if lcn.alpha or lcn.paper_code else None

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        kernel, bias = self.kernel[...], self.bias[...]
        if self.added is not None and train:
            self.added.set_value(_penalise(kernel, bias, self.lcn))
        y = layers.locally_connected(
            x.astype(self.compute), kernel, compute=self.compute
        )
        return y[..., 0].astype(jnp.float32) + bias.astype(jnp.float32)


def _penalise(kernel: jax.Array, bias: jax.Array, lcn: LcnConfig) -> jax.Array:
    """Returns α times the differences of w and of b over 2 k² + 2.

    The published code leaves α out, and has the poles for neighbours.
    """
    wrap = lcn.lat_wrap or lcn.paper_code
    first, second = (
        layers.difference_of_places(each.astype(jnp.float32), wrap_height=wrap)
        for each in (kernel, bias)
    )
    alpha = 1.0 if lcn.paper_code else lcn.alpha
    return alpha * (first + second) / (2 * lcn.kernel**2 + 2)


class _BiasUNet(nnx.Module):
    """The network of `bias_unet`."""

    def __init__(
        self,
        inputs: int,
        sides: tuple[int, int],
        *,
        levels: int,
        filters: int,
        features: int,
        lcn: LcnConfig | None,
        norm: FieldNorm,
        padding: GlobePadding,
        coordinates: bool,
        policy: Policy,
    ):
        self.sides, self.levels = sides, levels
        self.padding, self.coordinates = padding, coordinates
        options: Any = {"padding": padding, "policy": policy}
        for name, widths in _size_steps(inputs, levels, filters).items():
            for at, pair in enumerate(itertools.pairwise(widths)):
                step = GlobeConv(*pair, norm=norm, **options)
                setattr(self, f"{name}{'ab'[at]}", step)
        # A head of zeros needs features that are not zero, or neither would learn.
        first = HE_FAN_OUT if lcn else ZEROS
        wide = features if lcn else 1
        options |= {"size": 1, "last": True, "initializer": first}
        self.out = GlobeConv(2 * filters, wide, **options)
        self.head = _PlaceHead(features, sides, lcn, policy) if lcn else None

    def _convolve(self, name: str, x: jax.Array, train: bool) -> jax.Array:
        for each in "ab":
            if hasattr(self, name + each):
                x = getattr(self, name + each)(x, train=train)
        return x

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del key
        rows, columns = self.sides
        y = x["fields"][:, :rows, :columns]
        y = y if self.coordinates else y[..., :-PLACE]
        skips = []
        for at in range(self.levels + 1):
            y = self._convolve(f"down_{at}", halve(y) if at else y, train)
            skips.append(y)
        for at in reversed(range(max(self.levels, 1))):
            if self.levels:
                y = double_globe(y, self.padding)
                y = self._convolve(f"double_{at}", y, train)
                y = jnp.concatenate([y, skips[at]], -1)
            y = self._convolve(f"up_{at}", y, train)
        y = self.out(y, train=train)
        o = y[..., 0] if self.head is None else self.head(y, train=train)
        mean, std = describe_members(x)
        return Gaussian(mean.at[:, :rows, :columns].add(o.astype(jnp.float32)), std)


def _size_steps(inputs: int, levels: int, filters: int) -> dict[str, tuple[int, ...]]:
    """Returns the channels before, between and after the convolutions of each step."""
    found: dict[str, tuple[int, ...]] = {}
    for at in range(levels + 1):
        width = filters * 2**at
        found[f"down_{at}"] = (width if at else inputs, width, 2 * width)
    if not levels:
        return found | {"up_0": (2 * filters,) * 3}
    for at in range(levels):
        below, own = filters * 2 ** (at + 2), filters * 2 ** (at + 1)
        found[f"double_{at}"] = (below, below)
        found[f"up_{at}"] = (below + own, own, own)
    return found


def bias_unet(  # noqa: PLR0913 - a field of the config each
    inputs: Any,
    outputs: int,
    *,
    levels: int = 2,
    filters: int = 32,
    features: int = 7,
    lcn: LcnConfig | None = BY_PLACE,
    norm: FieldNorm = "batch",
    padding: GlobePadding = "periodic",
    coordinates: bool = False,
    crop: bool = False,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a U-Net that adds to the members' mean; the deviation stays theirs.

    μ = m + o, with o of the U-Net's only output; or, with `lcn`, o(p) = Σ_c w(c, p)
    u(c, p) + b(p) of several outputs u, w and b being zero at first. What neighbours'
    w and b differ by is an added loss. Without levels there are four convolutions; a
    level halves the sides and doubles the channels. Convolutions are 3×3, which the
    paper's 3×3×3 are of one level in depth.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      levels: halvings, from 0 to 3.
      filters: channels of the first convolution.
      features: outputs of the U-Net that the head by place weighs.
      lcn: the head by place; None for none.
      norm: before each ReLU.
      padding: of longitudes; the paper's is "zero".
      coordinates: whether convolutions see the place; the paper's do not.
      crop: whether the last rows and columns that do not divide stay as they are.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: sides that do not divide by 2 to the levels.

    References:
      Grönquist et al., Deep learning for post-processing ensemble weather forecasts,
      Phil. Trans. R. Soc. A 379, 2021.

    Examples:
      >>> shapes = {"members": (4, 8, 5, 1), "fields": (4, 8, 5)}
      >>> params, _ = bias_unet(shapes, 2, levels=0).init(jax.random.key(0))
      >>> params["head"]["kernel"].shape
      (4, 8, 1, 1, 7, 1)
    """
    del outputs
    shape = check_inputs(inputs)["fields"]
    checks.require(0 <= levels <= 3, "levels must be from 0 to 3", levels=levels)
    sides = check_sides(shape, levels, crop)
    channels = shape[-1] if coordinates else shape[-1] - PLACE
    rule = "fields must have channels beside the place's, or model.coordinates be true"
    checks.require(channels > 0, rule, channels=shape[-1])
    options: Any = {"levels": levels, "filters": filters, "features": features}
    options |= {"lcn": lcn, "norm": norm, "padding": padding, "policy": policy}
    return from_nnx(
        lambda: _BiasUNet(channels, sides, coordinates=coordinates, **options)
    )
