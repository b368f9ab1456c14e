"""How gates of spatial experts learn; importing this module imports no JAX."""

import dataclasses

from hpcjax.core.config import Config, NotNegative, Positive, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingLoss(Config):
    """Gates learn which experts serve a place well, as a classification.

    Of each example, the outputs whose error is at most the quantile count as right.

    Attributes:
      quantile: q, the share of an example's outputs that are right.
      eps: what an error may be above the quantile. Where errors of an example differ by
        less than this, all are right, and gates stay.
      relative: whether `eps` is in units of an example's mean error. In inner layers,
        and of losses other than the squared error, errors are known up to a factor.
      weight: of this loss beside that of the task.
    """

    quantile: Share = 0.3
    eps: NotNegative = 1e-5
    relative: bool = False
    weight: Positive = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damping(Config):
    """Experts learn less, or nothing, from the places where errors are large.

    Attributes:
      factor: by which their gradients are multiplied there.
      quantile: as of `RoutingLoss`.
      eps: likewise.
      relative: likewise.
    """

    factor: NotNegative = 0.0
    quantile: Share = 0.3
    eps: NotNegative = 1e-3
    relative: bool = False
