"""Configs of optimizers and schedules; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from hpcjax.core import checks
from hpcjax.core.patterns import check_patterns
from hpcjax.optim import option_checks
from hpcjax.optim.schedule_config import ConstantConfig, CosineConfig, StepDecayConfig

if TYPE_CHECKING:
    import optax

ScheduleConfig = ConstantConfig | CosineConfig | StepDecayConfig
DecayRules = tuple[tuple[str, bool], ...]

# As torch's SGD, whose recipes are the ones transferred: every parameter decays.
DECAY_ALL: DecayRules = ((".*", True),)


def _arguments(config: Any, *left_out: str) -> dict[str, Any]:
    """Returns the fields to pass to the factory: all but lr, schedule and others."""
    names = [field.name for field in dataclasses.fields(config)]
    skip = ("lr", "schedule", *left_out)
    return {name: getattr(config, name) for name in names if name not in skip}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """Stochastic gradient descent with heavy-ball momentum, as in PyTorch.

    Attributes:
      lr: peak learning rate.
      momentum: decay of the momentum buffer.
      nesterov: looks ahead by one momentum step.
      weight_decay: L2 coefficient, added to the gradient before the momentum.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      clip_norm: largest global norm of the raw gradient, None for no limit.
      schedule: the learning rate over the run.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_rules: DecayRules = DECAY_ALL
    clip_norm: float | None = None
    schedule: ScheduleConfig = ConstantConfig()

    def __post_init__(self) -> None:
        option_checks.check_common(self.lr, self.weight_decay, self.clip_norm)
        option_checks.check_rules(self.decay_rules)
        checks.require_decay("momentum", self.momentum)

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import first_order, learning_rates

        schedule = self.schedule.make(self.lr, steps)
        return learning_rates.with_schedule(
            first_order.sgd, schedule, **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Adam with decoupled weight decay.

    Attributes:
      lr: peak learning rate.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root of the second moment.
      weight_decay: decoupled coefficient, multiplied by the learning rate.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      clip_norm: largest global norm of the raw gradient, None for no limit.
      schedule: the learning rate over the run.
    """

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decay_rules: DecayRules = DECAY_ALL
    clip_norm: float | None = None
    schedule: ScheduleConfig = ConstantConfig()

    def __post_init__(self) -> None:
        option_checks.check_common(self.lr, self.weight_decay, self.clip_norm)
        option_checks.check_rules(self.decay_rules)
        checks.require_decay("b1", self.b1)
        checks.require_decay("b2", self.b2)
        checks.require_finite(0.0, eps=self.eps)

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import first_order, learning_rates

        schedule = self.schedule.make(self.lr, steps)
        return learning_rates.with_schedule(
            first_order.adamw, schedule, **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambConfig:
    """LAMB, and with `clip_norm=1.0` NVLAMB.

    Attributes:
      lr: peak learning rate.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root of the second moment.
      weight_decay: decoupled coefficient, inside what the trust ratio scales.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      trust_rules: likewise, which parameters have a trust ratio.
      clip_norm: largest global norm of the raw gradient, None for no limit.
      stacked: parameters that are stacks of layers, see `JorgeOptions`.
      schedule: the learning rate over the run.
    """

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 1e-2
    decay_rules: DecayRules = DECAY_ALL
    trust_rules: DecayRules = DECAY_ALL
    clip_norm: float | None = None
    stacked: tuple[str, ...] = ()
    schedule: ScheduleConfig = ConstantConfig()

    def __post_init__(self) -> None:
        option_checks.check_common(self.lr, self.weight_decay, self.clip_norm)
        option_checks.check_rules(self.decay_rules)
        option_checks.check_rules(self.trust_rules, "trust_rules")
        checks.require_decay("b1", self.b1)
        checks.require_decay("b2", self.b2)
        checks.require_finite(0.0, eps=self.eps)
        check_patterns("stacked", self.stacked)

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import _lamb, learning_rates

        schedule = self.schedule.make(self.lr, steps)
        return learning_rates.with_schedule(_lamb.lamb, schedule, **_arguments(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeOptions:
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
    """

    b1: float = 0.9
    eps: float = 1e-6
    order: int = 2
    beta2: float | Literal["dynamic"] = "dynamic"
    update_every: int = 50
    start_step: int = 0
    max_dim: int = 1024
    block_size: int | None = None
    symmetrize: bool = False
    max_gain: float | None = 1.0
    init: Literal["eps", "grad"] = "eps"
    precision: Literal["default", "high", "highest"] = "highest"
    stacked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.require_decay("b1", self.b1)
        checks.require_positive(eps=self.eps)
        checks.require(
            self.order in (1, 2, 3), "order must be 1, 2 or 3", order=self.order
        )
        if self.beta2 != "dynamic":
            inside = isinstance(self.beta2, int | float) and 0 < self.beta2 < 1
            checks.require(
                inside, "beta2 must be 'dynamic' or in (0, 1)", beta2=self.beta2
            )
        checks.require_count(1, update_every=self.update_every)
        checks.require_count(0, start_step=self.start_step)
        option_checks.check_sizes(self.max_dim, self.block_size)
        if self.max_gain is not None:
            # Below it even the smallest row would be scaled down at every update.
            allowed = self.eps**0.25 <= self.max_gain < float("inf")
            rule = "max_gain must be None or >= eps**0.25"
            checks.require(allowed, rule, max_gain=self.max_gain, eps=self.eps)
        checks.require_choice("init", self.init, ("eps", "grad"))
        checks.require_choice(
            "precision", self.precision, ("default", "high", "highest")
        )
        check_patterns("stacked", self.stacked)


class JorgeKeywords(TypedDict, total=False):
    """The fields of `JorgeOptions` as keyword arguments."""

    b1: float
    eps: float
    order: int
    beta2: float | Literal["dynamic"]
    update_every: int
    start_step: int
    max_dim: int
    block_size: int | None
    symmetrize: bool
    max_gain: float | None
    init: Literal["eps", "grad"]
    precision: Literal["default", "high", "highest"]
    stacked: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeConfig(JorgeOptions):
    """Jorge with SGD grafting and decoupled weight decay.

    The fields of `JorgeOptions` are fields of this config too.

    Attributes:
      lr: peak learning rate.
      weight_decay: decoupled coefficient, multiplied by the learning rate.
      graft: `"sgd"` takes the length of SGD's step, `"none"` the raw length.
      graft_momentum: decay of SGD's momentum buffer.
      graft_nesterov: takes the length of SGD's Nesterov step.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      clip_norm: largest global norm of the raw gradient, None for no limit.
      schedule: the learning rate over the run.
    """

    lr: float = 0.1
    weight_decay: float = 0.0
    graft: Literal["sgd", "none"] = "sgd"
    graft_momentum: float = 0.9
    graft_nesterov: bool = False
    decay_rules: DecayRules = DECAY_ALL
    clip_norm: float | None = None
    schedule: ScheduleConfig = ConstantConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        option_checks.check_common(self.lr, self.weight_decay, self.clip_norm)
        option_checks.check_rules(self.decay_rules)
        option_checks.check_graft(self.graft, self.graft_momentum)

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import learning_rates, second_order

        schedule = self.schedule.make(self.lr, steps)
        return learning_rates.with_schedule(
            second_order.jorge, schedule, **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeFromSgdConfig:
    """Jorge with every hyper-parameter derived from a tuned SGD's.

    The keys are those of `SgdConfig`, so that its tuned values are given key by key;
    `jorge_from_sgd` turns them into Jorge's. Only the warm-up is taken of SGD's
    schedule: the rate then falls to a tenth at one and two thirds of the run, unless
    another schedule is given here.

    Attributes:
      lr: SGD's peak learning rate.
      momentum: SGD's momentum.
      nesterov: whether SGD's momentum is Nesterov's.
      weight_decay: SGD's L2 coefficient.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      clip_norm: SGD's largest global norm of the raw gradient, None for no limit.
      schedule: the learning rate over the run.
      update_every: steps between updates of the preconditioners.
      init: how the preconditioners start, see `JorgeOptions`.
      stacked: parameters that are stacks of layers, see `JorgeOptions`.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_rules: DecayRules = DECAY_ALL
    clip_norm: float | None = None
    schedule: ScheduleConfig = StepDecayConfig()
    update_every: int = 50
    init: Literal["eps", "grad"] = "eps"
    stacked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        option_checks.check_common(self.lr, self.weight_decay, self.clip_norm)
        option_checks.check_rules(self.decay_rules)
        checks.require_decay("momentum", self.momentum)
        checks.require_count(1, update_every=self.update_every)
        checks.require_choice("init", self.init, ("eps", "grad"))
        check_patterns("stacked", self.stacked)

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import jorge_from_sgd

        checks.require_count(1, steps=steps)
        recipe = SGDRecipe(
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            epochs=steps,
            steps_per_epoch=1,
        )
        return jorge_from_sgd(
            recipe,
            schedule=self.schedule,
            decay_rules=self.decay_rules,
            clip_norm=self.clip_norm,
            update_every=self.update_every,
            init=self.init,
            stacked=self.stacked,
        )[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDRecipe:
    """How an SGD run was tuned; what `jorge_from_sgd` starts from.

    Attributes:
      lr: peak learning rate.
      momentum: decay of the momentum buffer.
      nesterov: whether the momentum is Nesterov's.
      weight_decay: L2 coefficient, added to the gradient before the momentum.
      epochs: length of the run.
      steps_per_epoch: optimizer steps in an epoch.
      warmup_epochs: length of the linear warm-up.
    """

    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    epochs: int
    steps_per_epoch: int
    warmup_epochs: float = 0.0

    def __post_init__(self) -> None:
        option_checks.check_common(self.lr, self.weight_decay, None)
        checks.require_decay("momentum", self.momentum)
        checks.require_count(1, epochs=self.epochs)
        checks.require_count(1, steps_per_epoch=self.steps_per_epoch)
        checks.require_count(1, steps=self.epochs * self.steps_per_epoch)
        checks.require(
            0 <= self.warmup_epochs < self.epochs,
            "warmup_epochs must be in [0, epochs)",
            warmup_epochs=self.warmup_epochs,
            epochs=self.epochs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooOptions:
    """What `scale_by_shampoo` can be told.

    Attributes:
      b1: decay of the momentum of the preconditioned gradient.
      b2: decay of the statistics; 1 sums them.
      eps: start of the statistics, and damping relative to their largest eigenvalue.
      root: `"eigh"` or `"newton"`.
      root_damping: `"floor"` or `"ridge"`, for `"eigh"`; Newton's is a ridge.
      stats_every: steps between updates of the statistics.
      roots_every: steps between updates of the roots.
      block_size: sides are cut into pieces of at most this length; None cuts nothing.
      exponent_override: p of L^(−1/p); None for 4.
      stacked: regexes of parameters whose first axis is a stack of layers.
      axis_name: mesh axis over which the roots are shared out, None for no sharing.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    root: Literal["eigh", "newton"] = "eigh"
    root_damping: Literal["floor", "ridge"] = "floor"
    stats_every: int = 1
    roots_every: int = 50
    block_size: int | None = 1024
    exponent_override: int | None = None
    stacked: tuple[str, ...] = ()
    axis_name: str | None = None

    def __post_init__(self) -> None:
        checks.require_decay("b1", self.b1)
        checks.require(0 < self.b2 <= 1, "b2 must be in (0, 1]", b2=self.b2)
        checks.require_positive(eps=self.eps)
        checks.require_choice("root", self.root, ("eigh", "newton"))
        checks.require_choice("root_damping", self.root_damping, ("floor", "ridge"))
        checks.require_count(1, stats_every=self.stats_every)
        checks.require_count(1, roots_every=self.roots_every)
        option_checks.check_sizes(1, self.block_size)
        if self.exponent_override is not None:
            checks.require_count(1, exponent_override=self.exponent_override)
        check_patterns("stacked", self.stacked)


class ShampooKeywords(TypedDict, total=False):
    """The fields of `ShampooOptions` as keyword arguments."""

    b1: float
    b2: float
    eps: float
    root: Literal["eigh", "newton"]
    root_damping: Literal["floor", "ridge"]
    stats_every: int
    roots_every: int
    block_size: int | None
    exponent_override: int | None
    stacked: tuple[str, ...]
    axis_name: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooConfig(ShampooOptions):
    """Shampoo with SGD grafting and decoupled weight decay.

    The fields of `ShampooOptions` are fields of this config too.

    Attributes:
      lr: peak learning rate.
      weight_decay: decoupled coefficient, multiplied by the learning rate.
      graft: `"sgd"` takes the length of SGD's step, `"none"` the raw length.
      graft_momentum: decay of SGD's momentum buffer.
      graft_nesterov: takes the length of SGD's Nesterov step.
      decay_rules: `(regex over paths, decays)`, first match wins; each parameter must
        match one rule and each rule a parameter.
      clip_norm: largest global norm of the raw gradient, None for no limit.
      schedule: the learning rate over the run.
    """

    lr: float = 0.1
    weight_decay: float = 0.0
    graft: Literal["sgd", "none"] = "sgd"
    graft_momentum: float = 0.9
    graft_nesterov: bool = False
    decay_rules: DecayRules = DECAY_ALL
    clip_norm: float | None = None
    schedule: ScheduleConfig = ConstantConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        option_checks.check_common(self.lr, self.weight_decay, self.clip_norm)
        option_checks.check_rules(self.decay_rules)
        option_checks.check_graft(self.graft, self.graft_momentum)

    def make(self, steps: int) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run of `steps` steps."""
        from hpcjax.optim import learning_rates, second_order

        schedule = self.schedule.make(self.lr, steps)
        return learning_rates.with_schedule(
            second_order.shampoo, schedule, **_arguments(self)
        )
