"""Configs of K-FAC; importing this module imports no JAX."""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import (
    Above,
    Config,
    Float32,
    Patterns,
    Positive,
    Size,
    Within,
    fields_of,
)
from hpcjax.optim.first_order_config import AdamWConfig, SgdConfig
from hpcjax.optim.lamb_config import LambConfig

if TYPE_CHECKING:
    import optax

    from hpcjax.core.method import Optimization, Setup
    from hpcjax.core.model import Model
    from hpcjax.optim.kfac import Curvature

Method = Literal["eigen", "inverse"]
GScale = Literal["per_example", "mean_loss"]
ConvNormalization = Literal["kfc", "reference"]
Fisher = Literal["empirical", "true", "exact"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]

# Embedding and position tables, and the scales and shifts of norms: these are no
# matrices between the inputs and outputs of a layer.
SKIP = (r"(^|/)(table$|embed|position)", "norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacOptions(Config):
    """The options of `scale_by_kfac`; most defaults are those of KAISA's library.

    Attributes:
      damping: γ, added to the curvature.
      factor_decay: α of the factors' running averages F ← αF + (1 − α)F_batch.
      factor_ramp: takes min(1 − 1/k, α) for α at step k, so that the first batch
        replaces the identity, from which the averages start.
      factor_update_steps: steps between updates of the factors.
      inv_update_steps: steps between decompositions.
      kl_clip: κ, the bound of the step's squared length in the norm of the curvature;
        None for no bound.
      method: `"eigen"` inverts A⊗G + γI exactly, `"inverse"` inverts each damped
        factor.
      prediv: keeps 1/(υ_A υ_Gᵀ + γ) instead of the eigenvalues υ. Steps are cheaper,
        but a new damping takes effect only at the next decomposition.
      pi_damping: divides γ between the factors by their mean eigenvalues.
      adaptive_damping: changes γ by the Levenberg–Marquardt rule; needs `value_fn`.
      g_scale: `"per_example"` forms G from the gradients of single examples' losses, so
        that it does not depend on the batch size; `"mean_loss"` from the gradients of
        the batch's mean loss, as KAISA's library does. Its dampings assume that.
      factor_dtype: dtype in which factors are kept and communicated; None for the
        statistics' own, float32 or better.
      inv_dtype: dtype in which decompositions and inverses are kept and communicated;
        they are computed, and applied to gradients, in float32 or better. None for the
        statistics' own, float32 or better.
      symmetry_aware: communicates only the triangles of symmetric matrices, and keeps
        explicit inverses as triangles.
      precision: of the matrix products that form and apply the factors.
    """

    damping: Annotated[Float32, Above(0)] = 1e-3
    factor_decay: Annotated[float, Within("(0, 1]")] = 0.95
    factor_ramp: bool = False
    factor_update_steps: Size = 1
    inv_update_steps: Size = 1
    kl_clip: Positive | None = 1e-3
    method: Method = "eigen"
    prediv: bool = True
    pi_damping: bool = False
    adaptive_damping: bool = False
    g_scale: GScale = "per_example"
    factor_dtype: Dtype | None = None
    inv_dtype: Dtype | None = None
    symmetry_aware: bool = False
    precision: Literal["default", "high", "highest"] = "highest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inv_update_steps % self.factor_update_steps:
            warnings.warn(
                "decompositions are made of factors that are not new: "
                f"inv_update_steps={self.inv_update_steps} is no multiple of "
                f"factor_update_steps={self.factor_update_steps}",
                stacklevel=3,
            )

    @property
    def prediv_used(self) -> bool:
        """Whether 1/(υ_A υ_Gᵀ + γ) is kept instead of eigenvalues."""
        return self.prediv and self.method == "eigen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacConfig(KfacOptions):
    """K-FAC, whose preconditioned gradients a first-order optimizer then uses.

    It has the fields of `KfacOptions` and these.

    Attributes:
      base: the first-order optimizer; the kl-clip uses its learning rate.
      skip: regexes of layers and parameters that keep their gradient.
      fisher: the labels at which statistics are taken, see `kfac.differentiate`.
      conv_normalization: scaling of convolutions' factors, see `kfac.Statistic`.
      grad_worker_fraction: KAISA's f, see `kfac.Distribution`; None lets every device
        do all work.
      cost: whether compute or memory is balanced over devices.
      colocate_factors: whether one device decomposes both factors of a layer.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients",)

    base: SgdConfig | AdamWConfig | LambConfig = SgdConfig()
    skip: Patterns = SKIP
    fisher: Fisher = "empirical"
    conv_normalization: ConvNormalization = "kfc"
    grad_worker_fraction: float | None = None
    cost: Literal["compute", "memory"] = "compute"
    colocate_factors: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prediv_used:
            rule = "prediv=True needs colocate_factors=True"
            checks.require(
                self.colocate_factors, rule, colocate_factors=self.colocate_factors
            )

    def make(
        self, steps: int, model: "Model", devices: int = 1
    ) -> "tuple[optax.GradientTransformationExtraArgs, Curvature]":
        """Returns the optimizer of a run of `steps` steps, and the layers it observes.

        Raises:
          ConfigError: a regex of `skip` that matches nothing, or a fraction of the
            devices that does not divide them.
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
        names = {field.name for field in dataclasses.fields(KfacOptions)}
        options = {k: v for k, v in fields_of(self).items() if k in names}
        rate = self.base.schedule.make(self.base.lr, steps)
        scale = curvature.scale(rate, **options)
        return optax.chain(scale, self.base.make(steps)), curvature

    def build(self, setup: "Setup") -> "Optimization":
        """Returns the optimizer of a run with its backward pass."""
        from hpcjax.optim import kfac

        return kfac.optimization(*self.make(setup.steps, setup.model, setup.devices))
