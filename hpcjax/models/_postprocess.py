"""Models of single points, and of what is around them, that post-process ensembles.

Each takes the examples of `data.Ens10Config`: "members" [batch, latitude, longitude,
number, variable] in standard units, the target first, and "fields" [batch, latitude,
longitude, channels]. Each puts out a `Gaussian` of the target.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import GlobePadding, pad_globe
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.modules import FLOAT32, ZEROS, Conv, Dense, Initializer, param

EmosVariant = Literal["gneiting2005", "softplus", "ens10", "climatology"]
# A deviation of nothing at all, such as of constants, has no logarithm.
LEAST = 1e-6


class Gaussian(NamedTuple):
    """A predictive distribution of each point, float32.

    Attributes:
      mean: μ `[batch, latitude, longitude]`.
      std: σ, likewise.
      apart: in training, further μ, each of a model to which a part of the dates is
        unknown; None of models that have none.
    """

    mean: jax.Array
    std: jax.Array
    apart: tuple[jax.Array, ...] | None = None


def describe_members(
    x: Mapping[str, jax.Array], ddof: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and deviation of the target's members, float32."""
    target = x["members"][..., 0].astype(jnp.float32)
    return target.mean(-1), jnp.maximum(target.std(-1, ddof=ddof), LEAST)


def correct(x: Mapping[str, jax.Array], outputs: jax.Array) -> Gaussian:
    """Returns μ = m + s o₀ and σ = s exp(o₁), ENS-10's head.

    Args:
      x: an example; m and s are its members' mean and deviation.
      outputs: o `[batch, latitude, longitude, 2]`; zeros leave the ensemble as it is.
        o₁ counts from −10 to 10, so that σ stays finite.
    """
    mean, std = describe_members(x)
    outputs = outputs.astype(jnp.float32)
    width = jnp.exp(jnp.clip(outputs[..., 1], -10, 10))
    return Gaussian(mean + std * outputs[..., 0], std * width)


def check_inputs(inputs: Any) -> Mapping[str, tuple[int, ...]]:
    if isinstance(inputs, Mapping) and set(inputs) == {"members", "fields"}:
        return inputs
    raise ConfigError(
        f"inputs must be the shapes of 'members' and 'fields': got inputs={inputs}"
    )


class _Raw(nnx.Module):
    """The network of `raw_ensemble`, which is none."""

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        return Gaussian(*describe_members(x))


def raw_ensemble(inputs: Any, outputs: int, *, policy: Policy = FLOAT32) -> Model:
    """Returns the model without parameters whose Gaussian is that of the members.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      policy: is not used.

    Examples:
      >>> shapes = {"members": (1, 2, 3, 1), "fields": (1, 2, 5)}
      >>> raw_ensemble(shapes, 2).init(jax.random.key(0))
      ({}, {})
    """
    del outputs, policy
    check_inputs(inputs)
    return from_nnx(_Raw)


def _scatter(start: float, jitter: float) -> Initializer:
    """Returns an initializer of a number plus normal noise of deviation `jitter`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return start + jitter * jax.random.normal(key, shape, dtype)

    return init


class _Gneiting(nnx.Module):
    """μ = a + b m and σ² = c² + d² s²; of all points or each."""

    def __init__(self, grid: tuple[int, ...], jitter: float, policy: Policy):
        self.a, self.b, self.c, self.d = (
            param(grid, _scatter(start, jitter), policy.param)
            for start in (0.0, 1.0, 0.01, 1.0)
        )

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        mean, std = describe_members(x)
        a, b, c, d = (
            each[...].astype(jnp.float32) for each in (self.a, self.b, self.c, self.d)
        )
        variance = c**2 + (d * std) ** 2
        return Gaussian(a + b * mean, jnp.sqrt(jnp.maximum(variance, LEAST**2)))


class _Softplus(nnx.Module):
    """μ = a + b m and σ² = c + d s², with c and d softplus of what is learnt."""

    def __init__(self, grid: tuple[int, ...], jitter: float, policy: Policy):
        self.a, self.b, self.c, self.d = (
            param(grid, _scatter(start, jitter), policy.param)
            # softplus(−2.25) = 0.1, for at less there is no slope; softplus(0.54) = 1
            for start in (0.0, 1.0, -2.25217, 0.541325)
        )

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        mean, std = describe_members(x)
        a, b, c, d = (
            each[...].astype(jnp.float32) for each in (self.a, self.b, self.c, self.d)
        )
        variance = jax.nn.softplus(c) + jax.nn.softplus(d) * std**2
        return Gaussian(a + b * mean, jnp.sqrt(jnp.maximum(variance, LEAST**2)))


class _Climatology(nnx.Module):
    """μ = a and σ = |c|; of all points or each."""

    def __init__(self, grid: tuple[int, ...], jitter: float, policy: Policy):
        self.a, self.c = (
            param(grid, _scatter(start, jitter), policy.param) for start in (0.0, 1.0)
        )

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        shape = x["members"].shape[:3]
        a, c = (
            jnp.broadcast_to(each[...].astype(jnp.float32), shape)
            for each in (self.a, self.c)
        )
        return Gaussian(a, jnp.maximum(jnp.abs(c), LEAST))


class _Ens10Emos(nnx.Module):
    """o₀ = w · x + e and o₁ = f s + g, of members x and their deviation s."""

    def __init__(
        self, grid: tuple[int, ...], members: int, jitter: float, policy: Policy
    ):
        around_zero = _scatter(0.0, jitter)
        self.members = param((*grid, members), around_zero, policy.param)
        self.shift, self.slope, self.width = (
            param(grid, around_zero, policy.param) for _ in range(3)
        )

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        target = x["members"][..., 0].astype(jnp.float32)
        first = jnp.sum(target * self.members[...].astype(jnp.float32), axis=-1)
        second = describe_members(x)[1] * self.slope[...] + self.width[...]
        return correct(x, jnp.stack([first + self.shift[...], second], axis=-1))


def emos(
    inputs: Any,
    outputs: int,
    *,
    variant: EmosVariant = "gneiting2005",
    per_point: bool = False,
    jitter: float = 0.0,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns ensemble model output statistics: a few coefficients, fitted by CRPS.

    "gneiting2005": μ = a + b m and σ² = c² + d² s², m and s² being mean and variance of
    the members; it starts as the raw ensemble but for c = 0.01. "softplus": σ² = c + d
    s², both kept positive by softplus, from c = 0.1 and d = 1. "ens10": μ = m + s (w ·
    x + e), σ = s exp(f s + g), with a weight for each member; it starts as the raw one.
    "climatology": μ = a and σ = |c|, what is to be beaten without any forecast.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      variant: "gneiting2005", "softplus", "ens10" or "climatology".
      per_point: whether each point has its own coefficients, or all the same.
      jitter: deviation of the noise that is added to the first coefficients.
      policy: dtype of parameters; all products are float32.

    References:
      Gneiting, Raftery, Westveld, Goldman, Monthly Weather Review 133, 2005; Ashkboos
      et al., ENS-10, NeurIPS 2022.

    Examples:
      >>> shapes = {"members": (4, 8, 10, 1), "fields": (4, 8, 5)}
      >>> params, _ = emos(shapes, 2, per_point=True).init(jax.random.key(0))
      >>> jax.tree.map(jnp.shape, params)
      {'a': (4, 8), 'b': (4, 8), 'c': (4, 8), 'd': (4, 8)}
    """
    del outputs
    shape = check_inputs(inputs)["members"]
    grid = shape[:2] if per_point else ()
    checks.require_choice("variant", variant, get_args(EmosVariant))
    if variant == "ens10":
        return from_nnx(lambda: _Ens10Emos(grid, shape[2], jitter, policy))
    networks: dict[str, Any] = {"gneiting2005": _Gneiting, "softplus": _Softplus}
    network = networks.get(variant, _Climatology)
    return from_nnx(lambda: network(grid, jitter, policy))


class _PointMlp(nnx.Module):
    """The network of `point_mlp`."""

    def __init__(self, channels: int, widths: tuple[int, ...], policy: Policy):
        self.depth = len(widths)
        sizes = (channels, *widths)
        for index, width in enumerate(widths):
            setattr(self, f"dense_{index}", Dense(sizes[index], width, policy=policy))
        self.head = Dense(sizes[-1], 2, policy=policy, initializer=ZEROS)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        y = x["fields"]
        for index in range(self.depth):
            y = jax.nn.relu(getattr(self, f"dense_{index}")(y))
        return correct(x, self.head(y))


def point_mlp(
    inputs: Any,
    outputs: int,
    *,
    widths: tuple[int, ...] = (128,),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a perceptron of each point's fields and place, one for all points.

    The last layer starts at zero, so that the first prediction is the raw ensemble.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      widths: sizes of the hidden layers, each with a ReLU.
      policy: dtypes of parameters and products.

    Examples:
      >>> from hpcjax import models
      >>> shapes = {"members": (4, 8, 10, 7), "fields": (4, 8, 17)}
      >>> models.num_params(point_mlp(shapes, 2))
      2562
    """
    del outputs
    channels = check_inputs(inputs)["fields"][-1]
    return from_nnx(lambda: _PointMlp(channels, widths, policy))


class _FieldCnn(nnx.Module):
    """The network of `field_cnn`."""

    def __init__(
        self, channels: int, width: int, padding: GlobePadding, policy: Policy
    ):
        self.padding = padding
        valid = {"kernel_size": 5, "padding": "VALID", "use_bias": True}
        self.conv1 = Conv(channels, width, policy=policy, **valid)
        self.conv2 = Conv(width, width, dilation=2, policy=policy, **valid)
        self.dense = Dense(width, 2 * width, policy=policy)
        self.head = Dense(2 * width, 2, policy=policy, initializer=ZEROS)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del train, key
        y = jax.nn.relu(self.conv1(pad_globe(x["fields"], 2, self.padding)))
        y = jax.nn.relu(self.conv2(pad_globe(y, 4, self.padding)))
        return correct(x, self.head(jax.nn.relu(self.dense(y))))


def field_cnn(
    inputs: Any,
    outputs: int,
    *,
    width: int = 32,
    padding: GlobePadding = "periodic",
    policy: Policy = FLOAT32,
) -> Model:
    """Returns two 5×5 convolutions, the second dilated, and a perceptron of each point.

    A point's prediction depends on 13×13 points. In ENS-10's table it stands for the
    LeNet of single patches, whose code is not public: this is made from a description.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      width: channels.
      padding: of longitudes, "periodic" or "zero".
      policy: dtypes of parameters and products.

    Examples:
      >>> shapes = {"members": (6, 8, 10, 1), "fields": (6, 8, 5)}
      >>> sorted(field_cnn(shapes, 2, width=4).init(jax.random.key(0))[0])
      ['conv1', 'conv2', 'dense', 'head']
    """
    del outputs
    channels = check_inputs(inputs)["fields"][-1]
    return from_nnx(lambda: _FieldCnn(channels, width, padding, policy))
