"""The config of K-FAC; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Patterns, fields_of
from hpcjax.optim.first_order_config import AdamWConfig, SgdConfig
from hpcjax.optim.kfac.options import SKIP, ConvNormalization, Fisher, KfacOptions
from hpcjax.optim.lamb_config import LambConfig

if TYPE_CHECKING:
    import optax

    from hpcjax.core.method import Optimization, RunShape
    from hpcjax.core.model import Model
    from hpcjax.optim.kfac import Curvature


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
    whole: ClassVar[bool] = True  # works with whole matrices, not with parts of them

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

    def build(self, setup: "RunShape") -> "Optimization":
        """Returns the optimizer of a run with its backward pass."""
        from hpcjax.optim import kfac

        return kfac.optimization(*self.make(setup.steps, setup.model, setup.devices))
