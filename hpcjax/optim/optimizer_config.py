"""Base classes of optimizers' configs; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core.config import (
    Config,
    Decay,
    Float32,
    NotNegative,
    PathRules,
    Positive,
    fields_of,
    find_function,
)
from hpcjax.optim.schedule_config import ConstantConfig, SchedulePart

if TYPE_CHECKING:
    import optax

DecayRules = PathRules

# Every parameter decays, as in PyTorch's SGD, for which recipes are published.
DECAY_ALL: DecayRules = ((".*", True),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """Base of configs of optimizers.

    The fields are arguments of the factory, except that `lr` and `schedule` together
    make its argument `learning_rate`, and `smooth_norm` what comes before it.

    Attributes:
      lr: peak learning rate.
      weight_decay: decoupled coefficient, multiplied by the learning rate.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      clip_norm: largest global norm of the raw gradient, None for no limit.
      smooth_norm: decay of the running mean that gradients' norms are replaced by, see
        `scale_by_smoothed_norm`; None leaves them.
      schedule: the learning rate over the run.
    """

    lr: Float32 = 0.1
    weight_decay: NotNegative = 0.0
    decay_rules: DecayRules = DECAY_ALL
    clip_norm: Positive | None = None
    smooth_norm: Decay | None = None
    schedule: SchedulePart = ConstantConfig()

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import learning_rates

        options = fields_of(self)
        del options["smooth_norm"]
        rate = options.pop("schedule").make(options.pop("lr"), steps)
        made = learning_rates.with_schedule(self.find_factory(), rate, **options)
        return self.smoothed(made)

    def smoothed(
        self, made: "optax.GradientTransformationExtraArgs"
    ) -> "optax.GradientTransformationExtraArgs":
        """Returns an optimizer that gets gradients of smoothed norms, if so asked."""
        if self.smooth_norm is None:
            return made
        import optax

        smooth = find_function("hpcjax.optim.first_order:scale_by_smoothed_norm")
        return optax.chain(smooth(self.smooth_norm), made)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraftedConfig(OptimizerConfig):
    """Base of optimizers whose step may be scaled to the length of SGD's step.

    Attributes:
      graft: `"sgd"` scales each step to the length of SGD's, `"none"` leaves its
        length.
      graft_momentum: decay of that SGD's momentum buffer.
      graft_nesterov: whether that SGD's momentum is Nesterov's.
    """

    whole: ClassVar[bool] = True  # works with whole matrices, not with parts of them

    graft: Literal["sgd", "none"] = "sgd"
    graft_momentum: Decay = 0.9
    graft_nesterov: bool = False
