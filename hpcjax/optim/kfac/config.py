"""What K-FAC can be told; importing this module imports no JAX."""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Literal, TypedDict

from hpcjax.core import checks
from hpcjax.core.patterns import check_patterns
from hpcjax.optim.config import AdamWConfig, LambConfig, SgdConfig

if TYPE_CHECKING:
    import optax

    from hpcjax.core.model import Model
    from hpcjax.optim.kfac import Curvature

Method = Literal["eigen", "inverse"]
GScale = Literal["per_example", "mean_loss"]
ConvNormalization = Literal["kfc", "reference"]
Fisher = Literal["empirical", "true", "exact"]

# What is no matrix between two layers: tables, and the scales and shifts of norms.
SKIP = (r"(^|/)(table$|embed|position)", "norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacOptions:
    """What `scale_by_kfac` can be told; the defaults are those of KAISA's library.

    Attributes:
      damping: γ, added to the curvature.
      factor_decay: α of the running averages of the factors.
      factor_ramp: averages with min(1 − 1/k, α) at step k, which forgets the identity
        that the averages start from.
      factor_update_steps: steps between updates of the factors.
      inv_update_steps: steps between decompositions.
      kl_clip: κ, bound of the step's length in the K-FAC norm; None for no bound.
      method: `"eigen"` inverts A⊗G + γI exactly, `"inverse"` each damped factor.
      prediv: keeps 1/(υ_G υ_Aᵀ + γ) instead of the eigenvalues; cheaper steps, but a
        new damping counts from the next decomposition on.
      pi_damping: shares γ between the factors by their mean eigenvalues.
      adaptive_damping: moves γ by the Levenberg–Marquardt rule; needs `value_fn`.
      g_scale: `"per_example"` takes G of the gradients of single losses, so that it
        does not depend on the batch size; `"mean_loss"` of the mean's, as the reference
        does, whose dampings need it.
      factor_dtype: dtype in which the factors are kept and exchanged; None for float32.
      symmetry_aware: exchanges the triangles of symmetric matrices only, and keeps
        explicit inverses so.
      precision: of the matrix products that form and apply the factors.
    """

    damping: float = 1e-3
    factor_decay: float = 0.95
    factor_ramp: bool = False
    factor_update_steps: int = 1
    inv_update_steps: int = 1
    kl_clip: float | None = 1e-3
    method: Method = "eigen"
    prediv: bool = True
    pi_damping: bool = False
    adaptive_damping: bool = False
    g_scale: GScale = "per_example"
    factor_dtype: str | None = None
    symmetry_aware: bool = False
    precision: Literal["default", "high", "highest"] = "highest"

    def __post_init__(self) -> None:
        checks.require_positive(damping=self.damping)
        checks.require(
            self.damping >= checks.SMALLEST,
            "damping must be in the range of float32",
            damping=self.damping,
        )
        inside = 0 < self.factor_decay <= 1
        rule = "factor_decay must be in (0, 1]"
        checks.require(inside, rule, factor_decay=self.factor_decay)
        checks.require_count(1, factor_update_steps=self.factor_update_steps)
        checks.require_count(1, inv_update_steps=self.inv_update_steps)
        if self.kl_clip is not None:
            checks.require_positive(kl_clip=self.kl_clip)
        if self.inv_update_steps % self.factor_update_steps:
            warnings.warn(
                "decompositions are made of factors that are not new: "
                f"inv_update_steps={self.inv_update_steps} is no multiple of "
                f"factor_update_steps={self.factor_update_steps}",
                stacklevel=3,
            )
        checks.require_choice("method", self.method, ("eigen", "inverse"))
        checks.require_choice("g_scale", self.g_scale, ("per_example", "mean_loss"))
        allowed = (None, "float64", "float32", "bfloat16", "float16")
        checks.require(
            self.factor_dtype in allowed,
            f"factor_dtype must be one of {allowed}",
            factor_dtype=self.factor_dtype,
        )
        checks.require_choice(
            "precision", self.precision, ("default", "high", "highest")
        )

    @property
    def prediv_used(self) -> bool:
        """Whether 1/(υ_G υ_Aᵀ + γ) is kept."""
        return self.prediv and self.method == "eigen"


class KfacKeywords(TypedDict, total=False):
    """The fields of `KfacOptions` as keyword arguments."""

    damping: float
    factor_decay: float
    factor_ramp: bool
    factor_update_steps: int
    inv_update_steps: int
    kl_clip: float | None
    method: Method
    prediv: bool
    pi_damping: bool
    adaptive_damping: bool
    g_scale: GScale
    factor_dtype: str | None
    symmetry_aware: bool
    precision: Literal["default", "high", "highest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacConfig(KfacOptions):
    """K-FAC in front of a first-order optimizer.

    The fields of `KfacOptions` are fields of this config too.

    Attributes:
      base: takes the preconditioned gradient; its rate is also that of the kl-clip.
      skip: regexes of layers and parameters that keep their gradient.
      fisher: at which labels the statistics are taken.
      conv_normalization: of convolutions' factors.
      grad_worker_fraction: KAISA's f; None lets every device do everything.
      cost: what the work is balanced by.
      colocate_factors: whether one device decomposes both factors of a layer.
    """

    base: SgdConfig | AdamWConfig | LambConfig = SgdConfig()
    skip: tuple[str, ...] = SKIP
    fisher: Fisher = "empirical"
    conv_normalization: ConvNormalization = "kfc"
    grad_worker_fraction: float | None = None
    cost: Literal["compute", "memory"] = "compute"
    colocate_factors: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patterns("skip", self.skip)
        checks.require_choice("fisher", self.fisher, ("empirical", "true", "exact"))
        checks.require_choice(
            "conv_normalization", self.conv_normalization, ("kfc", "reference")
        )
        checks.require_choice("cost", self.cost, ("compute", "memory"))
        if self.prediv_used:
            rule = "prediv=True needs colocate_factors=True"
            checks.require(
                self.colocate_factors, rule, colocate_factors=self.colocate_factors
            )

    def make(
        self, steps: int, model: "Model", devices: int = 1
    ) -> "tuple[optax.GradientTransformationExtraArgs, Curvature]":
        """Returns the optimizer for a run of `steps` steps, and what it wants observed.

        Raises:
          ConfigError: a regex of `skip` that matches nothing, or a fraction that the
            devices cannot be divided by.
        """
        import optax

        from hpcjax.optim import kfac

        distribution = None
        if self.grad_worker_fraction is not None:
            distribution = kfac.Distribution(
                devices, self.grad_worker_fraction, self.cost, self.colocate_factors
            )
        plan = kfac.plan(
            model,
            skip=self.skip,
            conv_normalization=self.conv_normalization,
            precision=self.precision,
        )
        curvature = kfac.Curvature(plan, self.fisher, distribution)
        names = [field.name for field in dataclasses.fields(KfacOptions)]
        rate = self.base.schedule.make(self.base.lr, steps)
        scale = curvature.scale(rate, **{name: getattr(self, name) for name in names})
        return optax.chain(scale, self.base.make(steps)), curvature
