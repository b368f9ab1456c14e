"""The config of shared parameters; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from hpcjax.compress.sharing.options import SharingOptions
from hpcjax.core import checks
from hpcjax.core.config import Count, Patterns, Positive, Seed, Size

if TYPE_CHECKING:
    from hpcjax.core.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharingConfig(SharingOptions):
    """Weights that layers share, see `share`.

    Attributes:
      budget: weights of all layers that share, over those they would have; above 1
        layers combine more templates than they have weights.
      groups: of layers with one store: all layers, those of one shape, drawn, or given.
      count: number of drawn groups.
      labels: the group of each layer, in the order of `list_layers`, where they are
        given.
      include: regexes of kernels.
      stacked: regexes of kernels that are stacks of layers.
      remat: whether the backward pass makes the weights again.
      seed: of drawn groups; in a run the run's seed is added.
    """

    budget: Positive = 0.25
    groups: Literal["all", "shape", "random", "given"] = "all"
    count: Size = 4
    labels: tuple[Count, ...] = ()
    include: Patterns = ("(^|/)kernel$",)
    stacked: Patterns = ()
    remat: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "sharing.labels go with sharing.groups=given"
        good = bool(self.labels) == (self.groups == "given")
        checks.require(good, rule, groups=self.groups, labels=self.labels)

    def apply_to(self, model: "Model", seed: int = 0) -> "Model":
        """Returns the network with shared weights.

        Args:
          model: the network.
          seed: of the run.

        Raises:
          ConfigError: the network has no such kernels, or the budget is too small.
        """
        import jax

        from hpcjax.compress import sharing

        shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
        layers = sharing.list_layers(shapes, self.include, self.stacked)
        groups = {
            "all": sharing.group_all,
            "shape": sharing.group_by_shape,
            "random": lambda layers: sharing.group_at_random(
                layers, self.count, self.seed + seed
            ),
            "given": lambda _: self.labels,
        }[self.groups](layers)
        budget = round(self.budget * sum(layer.size for layer in layers))
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(SharingOptions)
        }
        plan = sharing.make_plan(layers, groups, budget, SharingOptions(**own))
        return sharing.share(model, plan, remat=self.remat)
