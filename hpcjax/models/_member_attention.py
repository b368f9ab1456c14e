"""A Transformer across the members of an ensemble."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import GlobePadding, pad_globe
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._postprocess import LEAST, Gaussian, check_inputs, describe_members
from hpcjax.models.modules import FLOAT32, ZEROS, Conv, Dense, GroupNorm


class MemberBlock(nnx.Module):
    """Attention in which whole members look at each other, one matrix for each head.

    G_ij = softmax_i Σ_hw K_i Q_j / √(H W), and member j becomes V_j + Σ_i G_ij (V_i −
    mean V), then a dense layer that starts at zero, the residual and a ReLU.
    """

    def __init__(self, width: int, policy: Policy):
        """Declares the parameters of `width` channels, each a head."""
        self.norm = GroupNorm(width, groups=1, policy=policy)
        self.query, self.key, self.value = (
            Dense(width, width, use_bias=False, policy=policy) for _ in range(3)
        )
        self.output = Dense(width, width, policy=policy, initializer=ZEROS)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Maps members `[batch, member, latitude, longitude, width]` to the same."""
        batch, members, *grid, width = x.shape
        flat = x.reshape(batch * members, *grid, width)
        y = self.norm(flat, train=train).reshape(batch, members, -1, width)
        query, key = jax.nn.relu(self.query(y)), jax.nn.relu(self.key(y))
        value = self.value(y)
        likeness = jnp.einsum(
            "bipc,bjpc->bcij", key, query, preferred_element_type="float32"
        )
        share = jax.nn.softmax(likeness / math.sqrt(math.prod(grid)), axis=2)
        others = value - value.mean(1, keepdims=True)
        moved = value + jnp.einsum("bcij,bipc->bjpc", share.astype(value.dtype), others)
        return jax.nn.relu(x + self.output(moved).reshape(x.shape))


class _MemberAttention(nnx.Module):
    """The network of `member_attention`."""

    def __init__(
        self,
        channels: int,
        width: int,
        blocks: int,
        padding: GlobePadding,
        policy: Policy,
    ):
        self.padding, self.blocks = padding, blocks
        valid = {"kernel_size": 5, "padding": "VALID", "use_bias": True}
        for index, inputs in enumerate((channels, width, width)):
            setattr(self, f"conv_{index}", Conv(inputs, width, policy=policy, **valid))
        for index in range(blocks):
            setattr(self, f"block_{index}", MemberBlock(width, policy))
        self.head = Dense(width, 1, policy=policy, initializer=ZEROS)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> Gaussian:
        del key
        # [batch, latitude, longitude, member, variable] → each member a field, beside
        # what is the same for all: the ensemble's statistics, and places.
        members = jnp.moveaxis(x["members"], 3, 1)
        common = jnp.broadcast_to(
            x["fields"][:, None], (*members.shape[:4], x["fields"].shape[-1])
        )
        y = jnp.concatenate([members, common], axis=-1)
        y = y.reshape(-1, *y.shape[2:])
        for index in range(3):
            conv = getattr(self, f"conv_{index}")
            y = jax.nn.relu(conv(pad_globe(y, 2, self.padding)))
        y = y.reshape(*members.shape[:4], -1)
        for index in range(self.blocks):
            y = getattr(self, f"block_{index}")(y, train=train)
        # In units of the spread, which is what corrections are like.
        moved = describe_members(x)[1][:, None] * self.head(y)[..., 0]
        target = members[..., 0].astype(jnp.float32) + moved.astype(jnp.float32)
        std = jnp.sqrt(jnp.maximum(target.var(1, ddof=1), LEAST**2))
        return Gaussian(target.mean(1), std)


def member_attention(
    inputs: Any,
    outputs: int,
    *,
    width: int = 64,
    blocks: int = 1,
    padding: GlobePadding = "periodic",
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a Transformer across members: each is corrected in view of the others.

    Three 5×5 convolutions embed each member, with the fields that all have in common;
    blocks of `MemberBlock` follow, and a dense layer says what is added to the member's
    target, in units of the ensemble's deviation. The Gaussian is that of the corrected
    members, with M − 1. It does not depend on the members' order.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      width: channels, each a head of the attention.
      blocks: of attention.
      padding: of longitudes.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: a single member.

    References:
      Finn, Self-attentive ensemble Transformer, arXiv 2106.13924, 2021, whose network
      puts out members without the residual.

    Examples:
      >>> shapes = {"members": (6, 8, 10, 2), "fields": (6, 8, 7)}
      >>> sorted(member_attention(shapes, 2, width=2).init(jax.random.key(0))[0])
      ['block_0', 'conv_0', 'conv_1', 'conv_2', 'head']
    """
    del outputs
    shape = check_inputs(inputs)["members"]
    if shape[2] < 2:
        raise ConfigError(f"members must be at least 2: got {shape[2]}")
    channels = shape[-1] + inputs["fields"][-1]
    return from_nnx(lambda: _MemberAttention(channels, width, blocks, padding, policy))
