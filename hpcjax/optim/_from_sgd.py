"""Jorge's hyperparameters, derived from those of a tuned SGD run."""

from typing import Any, NamedTuple

import optax

from hpcjax.core import checks
from hpcjax.core.config import fields_of
from hpcjax.optim import schedules
from hpcjax.optim.from_sgd_config import SGDRecipe
from hpcjax.optim.jorge_config import JorgeConfig, JorgeOptions
from hpcjax.optim.optimizer_config import DECAY_ALL, DecayRules
from hpcjax.optim.schedule_config import (
    SchedulePart,
    StepDecayConfig,
    WarmUpConfig,
)


class Derived(NamedTuple):
    """A hyperparameter and where its value comes from.

    Attributes:
      value: the value that Jorge uses.
      rule: how it follows from SGD's recipe, in words.
    """

    value: Any
    rule: str


class FromSgd(NamedTuple):
    """What `jorge_from_sgd` returns.

    Attributes:
      tx: the optimizer, with the schedule in it.
      schedule: the learning rate by step.
      report: every derived hyperparameter by name.
    """

    tx: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    report: dict[str, Derived]


def _report(recipe: SGDRecipe, schedule: SchedulePart) -> dict[str, Derived]:
    """Returns Jorge's hyperparameters by name, with the rule that gave each."""
    total = recipe.epochs * recipe.steps_per_epoch
    derived = {
        "learning_rate": Derived(recipe.lr, "SGD's: grafting gives SGD's step length"),
        # SGD adds λθ before the momentum, whose buffer sums Σ βⁱ = 1/(1 - β) times a
        # constant term; decoupled decay has no such gain, so it needs λ/(1 - β).
        "weight_decay": Derived(
            recipe.weight_decay / (1 - recipe.momentum),
            "SGD's / (1 - momentum), decoupled: SGD's momentum amplifies its L2 term",
        ),
        "graft_momentum": Derived(recipe.momentum, "SGD's: the length is of its step"),
        "graft_nesterov": Derived(recipe.nesterov, "SGD's: the length is of its step"),
        "b1": Derived(recipe.momentum, "SGD's: both buffers remember equally long"),
        "steps": Derived(total, "SGD's epochs times steps per epoch"),
    }
    if isinstance(schedule, WarmUpConfig):
        derived["warmup_steps"] = Derived(schedule.warmup, "SGD's warm-up epochs")
    if not isinstance(schedule, StepDecayConfig):
        name = type(schedule).__name__
        return derived | {"schedule": Derived(name, "given in place of the step decay")}
    steps = schedules.decay_steps(total, schedule.at)
    epochs = tuple(step / recipe.steps_per_epoch for step in steps)
    return derived | {
        "schedule": Derived("StepDecayConfig", "step decay, whatever SGD's was"),
        "decay_factor": Derived(schedule.factor, "0.1 at each decay unless given"),
        "decay_epochs": Derived(epochs, "1/3 and 2/3 of SGD's epochs unless given"),
    }


def jorge_from_sgd(
    recipe: SGDRecipe,
    schedule: SchedulePart | None = None,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: float | None = None,
    **options: Any,
) -> FromSgd:
    """Returns Jorge for a task on which SGD has been tuned, without tuning again.

    It uses SGD's learning rate, as layer-wise grafting gives each step the length of
    SGD's; decoupled weight decay λ/(1 − β), with SGD's L2 coefficient λ and momentum β;
    and a rate that is multiplied by 0.1 at 1/3 and 2/3 of SGD's epochs, after SGD's
    warm-up.

    Args:
      recipe: the tuned SGD run.
      schedule: another schedule, with its own warm-up; None for the step decay.
      decay_rules: which parameters decay in SGD's run.
      clip_norm: the global norm at which SGD's run clips gradients.
      **options: fields of `JorgeOptions`; a `b1` given here is used as it is.

    Returns:
      (tx, schedule, report); the report has every derived value and its rule.

    Raises:
      ConfigError: a value out of its range; the recipe itself refuses momentum = 1.

    References:
      Singh, Sating, Bhatele, Jorge, arXiv 2310.12298.

    Examples:
      >>> recipe = SGDRecipe(
      ...     lr=0.1, momentum=0.9, weight_decay=1e-4, epochs=90, steps_per_epoch=5
      ... )
      >>> tx, schedule, report = jorge_from_sgd(recipe)
      >>> round(report["weight_decay"].value, 6), report["decay_epochs"].value
      (0.001, (30.0, 60.0))
    """
    checks.require_has("an SGDRecipe", ("lr", "warmup_epochs"), recipe=recipe)
    warmup = round(recipe.warmup_epochs * recipe.steps_per_epoch)
    chosen = schedule or StepDecayConfig(warmup=warmup)
    report = _report(recipe, chosen)
    if "b1" in options:
        report["b1"] = Derived(options["b1"], "given")
    used = ("weight_decay", "graft_momentum", "graft_nesterov", "b1")
    given = fields_of(JorgeOptions.of(options, jorge_from_sgd))
    fields = given | {name: report[name].value for name in used}
    settings = JorgeConfig(
        lr=recipe.lr,
        decay_rules=decay_rules,
        clip_norm=clip_norm,
        schedule=chosen,
        **fields,
    )
    steps = report["steps"].value
    return FromSgd(settings.make(steps), chosen.make(recipe.lr, steps), report)
