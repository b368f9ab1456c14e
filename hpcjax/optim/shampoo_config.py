"""Configs of Shampoo; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from hpcjax.core.config import Config, Decay, Patterns, Positive, Size, Within
from hpcjax.optim.optimizer_config import GraftedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooOptions(Config):
    """What `scale_by_shampoo` can be told.

    Attributes:
      b1: decay β₁ of the momentum of the preconditioned gradient.
      b2: decay β₂ of the statistics; 1 sums them.
      eps: ε, both the start of the statistics and their damping by ε·λ_max.
      root: `"eigh"`, or `"newton"`: the coupled iteration of matrix products.
      root_damping: `"floor"` or `"ridge"`, see `inverse_root_eigh`; Newton's is a
        ridge whatever this says.
      stats_every: steps between updates of the statistics.
      roots_every: steps between updates of the roots.
      block_size: sides are cut into pieces of at most this length; None cuts nothing.
      exponent_override: p of L^(−1/p); None for 4.
      stacked: regexes of parameters whose first axis is a stack of layers.
      axis_name: mesh axis over which the roots are shared out: each device computes
        those it owns, balanced by their cost, and broadcasts them. Everything else, and
        the result, is the same on all devices.
    """

    factory: ClassVar[str] = "hpcjax.optim._shampoo:scale_by_shampoo"

    b1: Decay = 0.9
    b2: Annotated[float, Within("(0, 1]")] = 0.999
    eps: Positive = 1e-6
    root: Literal["eigh", "newton"] = "eigh"
    root_damping: Literal["floor", "ridge"] = "floor"
    stats_every: Size = 1
    roots_every: Size = 50
    block_size: Size | None = 1024
    exponent_override: Size | None = None
    stacked: Patterns = ()
    axis_name: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooConfig(ShampooOptions, GraftedConfig):
    """Shampoo with SGD grafting and decoupled weight decay.

    The fields of `ShampooOptions` are fields of this config too.
    """

    factory: ClassVar[str] = "hpcjax.optim.second_order:shampoo"
