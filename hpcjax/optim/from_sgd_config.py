"""Config of Jorge with the settings of a tuned SGD; importing it imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import (
    Config,
    Decay,
    Float32,
    NotNegative,
    Patterns,
    Size,
    fields_of,
)
from hpcjax.optim.first_order_config import SgdConfig
from hpcjax.optim.schedule_config import SchedulePart, StepDecayConfig

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeFromSgdConfig(SgdConfig):
    """Jorge with every hyperparameter derived from those of a tuned SGD run.

    The fields of `SgdConfig` take SGD's tuned values, which `jorge_from_sgd` turns into
    Jorge's. Of SGD's schedule only the warm-up is used; the rate then falls to a tenth
    at one and at two thirds of the run, unless another schedule is given here.

    Attributes:
      update_every: steps between updates of the preconditioners.
      init: how the preconditioners start, see `JorgeOptions`.
      stacked: parameters that are stacks of layers, see `JorgeOptions`.
    """

    factory: ClassVar[str] = "hpcjax.optim._from_sgd:jorge_from_sgd"
    whole: ClassVar[bool] = True  # works with whole matrices, not with parts of them

    schedule: SchedulePart = StepDecayConfig()
    update_every: Size = 50
    init: Literal["eps", "grad"] = "eps"
    stacked: Patterns = ()

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        checks.require_count(1, steps=steps)
        options = fields_of(self)
        del options["smooth_norm"]
        tuned = ("lr", "momentum", "nesterov", "weight_decay")
        # A run given in steps: as many epochs of one step each.
        recipe = SGDRecipe(
            **{name: options.pop(name) for name in tuned},
            epochs=steps,
            steps_per_epoch=1,
        )
        return self.smoothed(self.find_factory()(recipe, **options).tx)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDRecipe(Config):
    """The tuned hyperparameters of an SGD run, from which `jorge_from_sgd` starts.

    Attributes:
      lr: peak learning rate.
      momentum: decay of the momentum buffer.
      nesterov: whether the momentum is Nesterov's.
      weight_decay: L2 coefficient, added to the gradient before the momentum.
      epochs: length of the run.
      steps_per_epoch: optimizer steps in an epoch.
      warmup_epochs: length of the linear warm-up.
    """

    lr: Float32
    momentum: Decay = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    epochs: Size
    steps_per_epoch: Size
    warmup_epochs: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(1, steps=self.epochs * self.steps_per_epoch)
        checks.require(
            0 <= self.warmup_epochs < self.epochs,
            "warmup_epochs must be in [0, epochs)",
            warmup_epochs=self.warmup_epochs,
            epochs=self.epochs,
        )
