"""Configs of Jorge; importing this module imports no JAX."""

import dataclasses
import math
from typing import ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Decay, Patterns, Positive, Share, Size
from hpcjax.optim.optimizer_config import GraftedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeOptions(Config):
    """What `scale_by_jorge` can be told; the defaults are the paper's.

    Attributes:
      b1: decay β₁ of the momentum of the preconditioned gradient.
      eps: ε; the preconditioners start at ε^(−1/4)·I.
      order: terms kept of the binomial series, 1, 2 or 3.
      beta2: `"dynamic"` is ν/(ν+1), for which the series always converges; a number
        is used as it is, and updates outside the series' range are counted.
      update_every: steps between updates of the preconditioners.
      start_step: the first step at which they are updated.
      max_dim: a longer side of a matrix gets no preconditioner.
      block_size: cuts longer sides into blocks with preconditioners of their own.
      symmetrize: averages with the transpose after each update. Deviates from the
        paper and may turn ascent: an eigenvalue can cross zero.
      max_gain: c of the guard against directions that never see a gradient: a row's
        norm is at most c·ε^(−1/4) times the smallest; None for the paper's none.
      init: `"eps"`, or `"grad"`: (tr(GGᵀ)/m)^(−1/4)·I from the first gradient.
      precision: of the matrix products; below `"highest"` the fourth power breaks.
      stacked: regexes of parameters whose first axis is a stack of layers, such as
        `"^blocks/"` of a scanned Transformer; each layer is a matrix of its own.
      axis_name: mesh axis over which updates of the preconditioners are shared out:
        each device computes those it owns, balanced by their work, and broadcasts them.
        Everything else, and the result, is the same on all devices.
    """

    factory: ClassVar[str] = "hpcjax.optim._jorge:scale_by_jorge"

    b1: Decay = 0.9
    eps: Positive = 1e-6
    order: Literal[1, 2, 3] = 2
    beta2: Share | Literal["dynamic"] = "dynamic"
    update_every: Size = 50
    start_step: Count = 0
    max_dim: Size = 1024
    block_size: Size | None = None
    symmetrize: bool = False
    max_gain: float | None = 1.0
    init: Literal["eps", "grad"] = "eps"
    precision: Literal["default", "high", "highest"] = "highest"
    stacked: Patterns = ()
    axis_name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_gain is not None:
            # Below it even the smallest row would be scaled down at every update.
            allowed = self.eps**0.25 <= self.max_gain < math.inf
            rule = "max_gain must be None or >= eps**0.25"
            checks.require(allowed, rule, max_gain=self.max_gain, eps=self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeConfig(JorgeOptions, GraftedConfig):
    """Jorge with SGD grafting and decoupled weight decay.

    The fields of `JorgeOptions` are fields of this config too.
    """

    factory: ClassVar[str] = "hpcjax.optim.second_order:jorge"
