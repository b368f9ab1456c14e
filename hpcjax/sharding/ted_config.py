"""Config of tensor, expert and data parallelism; importing this imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core.config import Config, Patterns, Size

if TYPE_CHECKING:
    from hpcjax.core.method import Parallel, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class TedConfig(Config):
    """DeepSpeed-TED: tensor, expert and data parallelism of a mixture of experts.

    Devices that are left, after tensor and expert, share out the batch with `expert`
    and hold copies of the experts. `cost.largest_base` says what fits.

    Attributes:
      tensor: parts of heads, of inner features, of those of experts too, and of the
        vocabulary.
      expert: parts of the experts, each with a share of the batch.
      zero: 1 spreads the optimizer's state: of experts over the devices that hold
        copies of them, of all else over all that share out the batch.
      drop_duplicates: whether the devices of `tensor`, which have equal tokens, share
        out what they send to experts.
      stacked: regexes of parameters whose first axis is a stack of layers; none for
        those of the model.
    """

    claims: ClassVar[tuple[str, ...]] = ("mean", "parameters")

    tensor: Size = 1
    expert: Size = 1
    zero: Literal[0, 1] = 1
    drop_duplicates: bool = True
    stacked: Patterns = ()

    @property
    def summed(self) -> int:
        """How many devices sum their parts of whole activations; 1 for none."""
        return self.tensor

    def build(self, setup: "RunShape") -> "Parallel":
        """Returns how the model of a run is spread.

        Raises:
          ConfigError: a model without experts, sizes that do not divide the devices or
            those of the model, or fewer tokens of a device than `tensor`.
        """
        from hpcjax.sharding.ted import Layout, check_tokens, spread_experts

        layout = Layout.of(setup.devices, self.tensor, self.expert)
        if self.drop_duplicates and self.expert > 1:
            check_tokens(setup.batch, layout)
        return spread_experts(
            setup.model,
            layout,
            zero=self.zero == 1,
            drop_duplicates=self.drop_duplicates,
            stacked=self.stacked,
        )
