"""ENS-10's U-Net, for fields on the globe."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import GlobePadding
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._postprocess import Gaussian, check_inputs, correct
from hpcjax.models.globe_conv import GlobeConv
from hpcjax.models.modules import FLOAT32

LEVELS = 2


class _FieldUNet(nnx.Module):
    """The network of `field_unet`."""

    def __init__(
        self, channels: int, width: int, padding: GlobePadding, policy: Policy
    ):
        first, second, third = (width * 2**level for level in range(LEVELS + 1))
        steps = {
            **{"down_0a": (channels, first), "down_0b": (first, first)},
            **{"down_1a": (first, second), "down_1b": (second, second)},
            **{"down_2a": (second, third), "down_2b": (third, third)},
            **{"up_1a": (third, third), "up_1b": (third, second)},
            **{"up_0a": (2 * second, second), "up_0b": (second, first)},
            **{"out_a": (2 * first, first), "out_b": (first, first)},
        }
        for name, sizes in steps.items():
            step = GlobeConv(*sizes, padding=padding, policy=policy)
            setattr(self, name, step)
        self.head = GlobeConv(first, 2, padding=padding, policy=policy, last=True)

    def _twice(self, name: str, x: jax.Array, train: bool) -> jax.Array:
        first, second = getattr(self, f"{name}a"), getattr(self, f"{name}b")
        return second(first(x, train=train), train=train)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del key
        fine = self._twice("down_0", x["fields"], train)
        half = self._twice("down_1", _halve(fine), train)
        y = self._twice("down_2", _halve(half), train)
        y = self._twice("up_1", y, train)
        y = self._twice("up_0", jnp.concatenate([_double(y, half), half], -1), train)
        y = self._twice("out_", jnp.concatenate([_double(y, fine), fine], -1), train)
        return correct(x, self.head(y, train=train))


def _halve(x: jax.Array) -> jax.Array:
    return nnx.max_pool(x, (2, 2), strides=(2, 2))


def _double(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns x with twice the sides, and its first row or column twice if need be."""
    batch, height, width, channels = x.shape
    shape = (batch, 2 * height, 2 * width, channels)
    y = jax.image.resize(x, shape, "bilinear")
    rows, columns = (like.shape[axis] - y.shape[axis] for axis in (1, 2))
    return jnp.pad(y, ((0, 0), (rows, 0), (columns, 0), (0, 0)), mode="edge")


def field_unet(
    inputs: Any,
    outputs: int,
    *,
    width: int = 32,
    padding: GlobePadding = "periodic",
    policy: Policy = FLOAT32,
) -> Model:
    """Returns ENS-10's U-Net: two halvings, bilinear doubling, batch norms.

    Convolutions are 3×3 with bias; the last starts at zero, and the network as the raw
    ensemble. Odd sides lose their last row or column where they
    are halved, and the first is there twice where they are doubled.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      width: channels of the first level.
      padding: of longitudes; "zero" is ENS-10's.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: a side of fewer than four points.

    References:
      Ashkboos et al., ENS-10, NeurIPS 2022, and its code.

    Examples:
      >>> from hpcjax import models
      >>> shapes = {"members": (9, 8, 10, 7), "fields": (9, 8, 14)}
      >>> models.num_params(field_unet(shapes, 2))
      633698
    """
    del outputs
    shape = check_inputs(inputs)["fields"]
    if min(shape[:2]) < 2**LEVELS:
        raise ConfigError(
            f"fields must have at least {2**LEVELS} points on a side to be halved "
            f"{LEVELS} times: got {shape[:2]}"
        )
    return from_nnx(lambda: _FieldUNet(shape[-1], width, padding, policy))
