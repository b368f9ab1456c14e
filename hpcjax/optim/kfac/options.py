"""Options of K-FAC's transform; importing this module imports no JAX."""

import dataclasses
import warnings
from typing import Annotated, Literal

from hpcjax.core.config import Above, Config, Float32, Positive, Size, Within

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
