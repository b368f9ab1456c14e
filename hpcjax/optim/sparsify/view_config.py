"""Configs of networks that see other weights than are trained; imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from hpcjax.core.config import NotNegative, Share, Within
from hpcjax.core.structures import NM, Block, Channels, Unstructured
from hpcjax.optim.sparsify.config import Choice
from hpcjax.optim.sparsify.distributions import (
    ByRules,
    ErdosRenyi,
    Global,
    Lamp,
    Uniform,
)

if TYPE_CHECKING:
    from hpcjax.core.method import Optimization, RunShape
    from hpcjax.core.model import Model
    from hpcjax.optim.sparsify._views import Viewed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewConfig(Choice):
    """What all such methods have in common; see `Viewed`."""

    claims: ClassVar[tuple[str, ...]] = ("parameters",)

    def apply_to(self, model: "Model", seed: int = 0) -> "Model":
        """Returns the network that sees the weights of the view, see `view_model`."""
        from hpcjax.optim.sparsify._viewed_model import view_model

        del seed
        return view_model(model, self._view())

    def build(self, optimization: "Optimization", setup: "RunShape") -> "Optimization":
        """Returns the optimization of what is trained."""
        del setup
        return optimization._replace(tx=self.make(optimization.tx).tx)

    def read_network(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Returns the weights that the network sees after a run, and their masks.

        Args:
          params: the run's parameters.
          state: its optimizer's state, which tells nothing of them.
        """
        import jax

        from hpcjax.optim.sparsify._viewed_model import split

        del state
        viewed = self._view()
        trained = split(jax.tree.map(jax.numpy.asarray, params), viewed)
        return viewed.view(trained), viewed.masks(trained)

    def _view(self) -> "Viewed":
        import optax

        return self.make(optax.identity())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestConfig(ViewConfig):
    """Views that keep a given number of weights.

    Attributes:
      structure: what is kept or removed together.
      distribution: of sparsity over layers; None for `Uniform()`, and with `NM`, which
        has its own.
    """

    structure: Unstructured | NM | Block | Channels = Unstructured()
    distribution: Uniform | ErdosRenyi | Global | Lamp | ByRules | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StraightThroughConfig(LargestConfig):
    """Sees the largest weights and trains all; with a decay it is SR-STE.

    Attributes:
      decay: λ of the weights that are not seen; 2e-4 in SR-STE.
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._views:ste"

    decay: NotNegative = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovementConfig(LargestConfig):
    """Sees the weights of the largest scores, which are learned beside them."""

    factory: ClassVar[str] = "hpcjax.optim.sparsify._views:movement"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKastConfig(ViewConfig):
    """Top-KAST: sees the largest weights, and trains these and some more.

    Attributes:
      forward: sparsity of what is seen, in each parameter.
      backward: sparsity of what is trained; at most that.
      decay: λ of the weights that are trained.
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._views:topkast"

    forward: Share = 0.9
    backward: Share = 0.8
    decay: NotNegative = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftThresholdConfig(ViewConfig):
    """STR: learns a threshold for each parameter; weight decay makes it sparse.

    Attributes:
      start_at: the first s; the threshold is σ(s).
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._views:soft_threshold"

    start_at: float = -5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class L0Config(ViewConfig):
    """Learns the chance of each weight to be there, by hard-concrete gates.

    Attributes:
      weight: λ, what an open gate adds to the loss.
      start_at: the first chance of each gate.
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._noise:l0"

    weight: NotNegative = 1e-4
    start_at: Share = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariationalDropoutConfig(ViewConfig):
    """Learns the noise that each weight bears, and prunes those that are all noise.

    Attributes:
      weight: λ of the divergence; one over the number of examples in the paper.
      start_at: the first log σ².
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._noise:vardrop"

    weight: NotNegative = 1e-4
    start_at: Annotated[float, Within("[-80, 80]")] = -10.0
