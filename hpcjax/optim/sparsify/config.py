"""Configs of pruning while training; importing this module imports no JAX."""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from hpcjax.core import checks
from hpcjax.core.config import (
    Config,
    Fraction,
    Patterns,
    Seed,
    Share,
    Size,
    find_function,
)
from hpcjax.core.structures import NM, Block, Channels, Unstructured
from hpcjax.optim.sparsify.distributions import (
    ByRules,
    ErdosRenyi,
    Global,
    Lamp,
    Uniform,
)
from hpcjax.optim.sparsify.schedules import (
    Alternating,
    Cubic,
    Exponential,
    Linear,
    OneShot,
)

if TYPE_CHECKING:
    from hpcjax.core.method import Optimization, RunShape

ScoreName = Literal[
    "gradient",
    "magnitude",
    "momentum",
    "movement",
    "random",
    "taylor",
    "taylor_squared",
]

# Those of the weights as they are, not summed up over steps.
PresentScore = Literal["gradient", "magnitude", "momentum", "random", "taylor"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Config):
    """Which parameters are pruned.

    Attributes:
      include: regexes of the parameters to prune; none for those of two or more axes,
        not counting that of a stack.
      exclude: regexes of parameters that are not pruned in any case.
      stacked: regexes of parameters whose first axis is a stack of layers; each layer
        is pruned by itself, and its part of the parameter has a path such as
        `blocks/kernel/3`.
    """

    include: Patterns = ()
    exclude: Patterns = ()
    stacked: Patterns = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskOptions(Choice):
    """What all masked training can be told.

    The fields of `Choice` are fields of this config too.

    Attributes:
      packed: keeps eight entries of a mask in a byte.
      seed: of draws; in a run the run's seed is added.
    """

    packed: bool = False
    seed: Seed = 0

    def seeded(self, setup: "RunShape") -> Self:
        """Returns the options for a run: runs of other seeds draw other masks.

        Raises:
          ConfigError: a run of several workers.
        """
        rule = "workers that prune different weights have no sparse mean"
        checks.require(setup.workers == 1, rule, workers=setup.workers)
        return dataclasses.replace(self, seed=(self.seed + setup.seed()) % 2**32)

    def read_network(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Returns the weights that a run leaves, and their masks.

        Args:
          params: the run's parameters.
          state: its optimizer's state, which holds the masks.
        """
        from hpcjax.core import per_device
        from hpcjax.optim.sparsify import get_masks

        return params, get_masks(per_device.bare(state), params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneOptions(MaskOptions):
    """What `prune` can be told besides the score.

    Attributes:
      structure: what is kept or removed together.
      distribution: of sparsity over layers; None for `Uniform()`, and with `NM`, which
        has its own.
      schedule: when masks change, and how sparse they then are.
      sparse_grads: the optimizer sees no gradients of what is pruned, and has no
        moments of it.
    """

    structure: Unstructured | NM | Block | Channels = Unstructured()
    distribution: Uniform | ErdosRenyi | Global | Lamp | ByRules | None = None
    schedule: OneShot | Cubic | Linear | Exponential | Alternating = Cubic()
    sparse_grads: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewiring(MaskOptions):
    """How masks move from one set of weights to another.

    Attributes:
      distribution: of sparsity over layers, at the start.
      fraction: share α of the active weights that is dropped at first.
      decay: whether the share falls along half a cosine, f = α/2·(1 + cos(πt/T)).
      every: steps between changes of the masks.
      until: share of the run after which masks stay; it ends at step T.
      regrow: whether what was just dropped may be grown again.
      by_sign: drops the share of the positive and of the negative weights separately.
      compare: drops the least weights of each layer, or of all layers together.
      redistribute: what decides how many weights each layer gets back: "none" what it
        lost; "momentum" the mean magnitude of its active weights' momentum (SNFS);
        "survivors" how many it has left (DSR).
    """

    distribution: Uniform | ErdosRenyi | ByRules = ErdosRenyi()
    fraction: Share = 0.3
    decay: Literal["cosine", "constant"] = "cosine"
    every: Size = 100
    until: Fraction = 0.75
    regrow: bool = True
    by_sign: bool = False
    compare: Literal["layer", "all"] = "layer"
    redistribute: Literal["none", "momentum", "survivors"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicOptions(Rewiring):
    """What `dynamic` can be told besides the scores.

    Attributes:
      steps: length of the run.
    """

    steps: Size = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneConfig(PruneOptions):
    """Pruning on a schedule, while the optimizer of a run trains.

    The fields of `PruneOptions` are fields of this config too.

    Attributes:
      score: those of the largest are kept; a name of `SCORES`.
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._prune:prune"
    claims: ClassVar[tuple[str, ...]] = ("parameters",)

    score: ScoreName = "magnitude"

    def build(self, optimization: "Optimization", setup: "RunShape") -> "Optimization":
        """Returns the optimization that prunes.

        Raises:
          ConfigError: masks would change after the end of the run.
        """
        last = self.schedule.steps()[-1]
        rule = "masks must change for the last time before the end of the run"
        checks.require(last < setup.steps, rule, last=last, steps=setup.steps)
        found = optimization._replace(tx=self.seeded(setup).make(optimization.tx))
        if not self.sparse_grads:
            return found
        sent = find_function("hpcjax.optim.sparsify._prune:sent")
        reads = self.score not in ("magnitude", "random")
        return found._replace(sent=partial(sent, last=last if reads else -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicConfig(Rewiring):
    """Training that is sparse from the start, and drops and grows weights.

    The fields of `Rewiring` are fields of this config too.

    Attributes:
      drop: those of the least scores are dropped; a name of `SCORES`.
      grow: those of the largest are grown; None for masks that never change.
    """

    factory: ClassVar[str] = "hpcjax.optim.sparsify._dynamic:dynamic"
    claims: ClassVar[tuple[str, ...]] = ("parameters",)

    drop: PresentScore = "magnitude"
    grow: PresentScore | None = "gradient"

    def build(self, optimization: "Optimization", setup: "RunShape") -> "Optimization":
        """Returns the optimization of a sparse network, for a run of so many steps."""
        begin, sent, table = (
            find_function(f"hpcjax.optim.sparsify._dynamic:{name}")
            for name in ("begin", "sent", "change_table")
        )
        own = self.seeded(setup)
        tx = own.make(optimization.tx, steps=setup.steps)
        names = (field.name for field in dataclasses.fields(Rewiring))
        fields = {name: getattr(own, name) for name in names}
        chosen = DynamicOptions(**fields, steps=setup.steps)
        times = table(chosen)[0] if self.grow else ()
        return optimization._replace(
            tx=tx,
            begin=partial(begin, chosen=chosen),
            sent=partial(sent, times=tuple(map(int, times))),
        )
