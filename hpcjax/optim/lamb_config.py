"""Config of LAMB; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.core.config import Decay, Float32, NotNegative, PathRules, Patterns
from hpcjax.optim.optimizer_config import DECAY_ALL, OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambConfig(OptimizerConfig):
    """LAMB, and with `clip_norm=1.0` NVLAMB.

    Attributes:
      weight_decay: decoupled coefficient, inside what the trust ratio scales.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root of the second moment.
      trust_rules: as `decay_rules`: which parameters have a trust ratio.
      stacked: parameters that are stacks of layers, see `JorgeOptions`.
    """

    factory: ClassVar[str] = "hpcjax.optim._lamb:lamb"

    lr: Float32 = 1e-3
    weight_decay: NotNegative = 1e-2
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: NotNegative = 1e-6
    trust_rules: PathRules = DECAY_ALL
    stacked: Patterns = ()
