"""Configs of backward passes, through a part of a network or at older weights."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Size

if TYPE_CHECKING:
    from hpcjax.core.method import Backward, RunSeed, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksConfig(Config, abc.ABC):
    """Base of configs that cut a network into blocks and treat these differently.

    Attributes:
      k: number of blocks; 1 is ordinary data parallelism.
      workers: P, the number of workers on all devices together. Each has its own part
        of the batch and its own batch-norm statistics; None: one for each device.
      cuts: number of the first layer of each block but the first; empty cuts the
        network into blocks of equal backward cost.
      stacked: regexes of parameters that are stacks of layers, which are not cut but
        cost as many layers; the model's by default.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients", "mean")
    figures: ClassVar[Mapping[str, str]] = {"share": ""}

    k: Size = 4
    workers: Size | None = None
    cuts: tuple[Size, ...] = ()
    stacked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.cuts) in (0, self.k - 1)
        checks.require(fits, "cuts must be k - 1 or none", cuts=self.cuts, k=self.k)

    def build(self, setup: "RunShape") -> "Backward":
        """Returns the backward pass of a run, and the mean that it needs.

        Raises:
          ConfigError: workers, devices, k and batch do not divide each other, or the
            model has fewer layers than blocks.
        """
        import jax

        from hpcjax.optim import cut_layers, layer_counts, layers_of_model, partition
        from hpcjax.optim.sparsify._plan import find_stacked

        workers = setup.devices if self.workers is None else self.workers
        rule = "devices must divide the workers of a backward pass"
        good = workers % setup.devices == 0
        checks.require(good, rule, workers=workers, devices=setup.devices)
        x = setup.batch["x"]
        rows = jax.tree.leaves(x)[0].shape[0]
        rule = f"workers must divide the {rows} examples of a batch"
        checks.require(rows % workers == 0, rule, workers=workers)
        layers = layers_of_model(setup.model, x)
        rule = f"k must be at most the {len(layers)} layers of the model"
        checks.require(self.k <= len(layers), rule, k=self.k)
        shapes = jax.eval_shape(setup.model.init, jax.random.key(0))[0]
        counts = layer_counts(layers, shapes, find_stacked(shapes, self.stacked))
        each = setup.layer_flops(rows // workers)
        costs = [cost * count for cost, count in zip(each, counts, strict=True)]
        cuts = self.cuts or partition(costs, self.k)
        # The worker of role i backpropagates from the output to the start of the i-th
        # block from the end. Summed over the k roles, and relative to k whole passes:
        starts = (0, *cuts)
        share = sum(sum(costs[start:]) for start in starts) / (self.k * sum(costs))
        local = workers // setup.devices
        return self._build(cut_layers(layers, cuts), local, workers, share, setup.seed)

    @abc.abstractmethod
    def _build(
        self, blocks: Any, local: int, workers: int, share: float, seed: "RunSeed"
    ) -> "Backward":
        """Returns the backward pass.

        Args:
          blocks: the cut network.
          local: workers on each device.
          workers: workers in all.
          share: cost of the backward passes over that of whole ones.
          seed: of the run, for random choices.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialBackwardConfig(BlocksConfig):
    """SPB: a worker of role i backpropagates through the last i blocks only.

    Attributes:
      rotation: whether roles move on by one worker each step, or stay fixed.
      dense_steps: initial steps in which every worker backpropagates through
        everything.
      mode: what is communicated, see `optim.contributor_mean`.
      divisor: "contributors" averages each block over the workers that have a gradient
        of it; "workers" divides by all workers, which shrinks the gradients of lower
        blocks and serves as a control.
    """

    rotation: Literal["rotate", "fixed"] = "rotate"
    dense_steps: Count = 0
    mode: Literal["zeros", "contributors"] = "zeros"
    divisor: Literal["contributors", "workers"] = "contributors"

    def _build(
        self, blocks: Any, local: int, workers: int, share: float, seed: "RunSeed"
    ) -> "Backward":
        import optax

        from hpcjax import optim
        from hpcjax.core.method import Backward

        del seed
        rule = "workers must be a multiple of k"
        checks.require(workers % self.k == 0, rule, workers=workers, k=self.k)
        backward = optim.PartialBackward(
            blocks=blocks,
            rotation=self.rotation,
            dense_steps=self.dense_steps,
            mode=self.mode,
            workers=local,
        )

        def mean(axes: Any) -> optax.GradientTransformation:
            link = optim.contributor_mean(backward, axes)
            if self.divisor == "contributors":
                return link
            # Of k roles j reach block j: a mean over contributors times j/k is the sum
            # divided by all workers.
            shares = [number / self.k for number in range(1, self.k + 1)]
            return optax.chain(link, optim.scale_blocks(blocks, shares))

        gradients = optim.gradients_of_roles(backward)
        return Backward(mean, gradients, {"share": share})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomFreezingConfig(BlocksConfig):
    """Whole backward passes, after which gradients of random blocks are zeroed.

    It keeps as many gradients on average as `PartialBackwardConfig` computes. Since the
    backward pass is whole, it saves nothing; it is the control for that config.
    """

    def _build(
        self, blocks: Any, local: int, workers: int, share: float, seed: "RunSeed"
    ) -> "Backward":
        import optax

        from hpcjax import optim
        from hpcjax.core.method import Backward

        del workers, share
        drawn, whole = seed(), optim.Blocks((sum(blocks.paths, ()),))
        backward = optim.PartialBackward(blocks=whole, mode="zeros", workers=local)

        def mean(axes: Any) -> optax.GradientTransformation:
            link = optim.contributor_mean(backward, axes)
            return optax.chain(link, optim.freeze_at_random(blocks, drawn))

        return Backward(mean, optim.gradients_of_roles(backward), {"share": 1.0})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipedreamConfig(Config):
    """PipeDream's asynchronous pipeline: stages use weights that are some updates old.

    Attributes:
      stages: p, consecutive layers of equal cost; 1 is ordinary training.
      versions: "stash" keeps for stage s the p − 1 − s weights before the newest;
        "double" uses those of one update ago everywhere (PipeDream-2BW).
      stacked: regexes of parameters that are stacks of layers, which stages cut; the
        model's by default.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients", "mean")
    figures: ClassVar[Mapping[str, str]] = {"held": ": older weights over the newest"}

    stages: Size = 4
    versions: Literal["stash", "double"] = "stash"
    stacked: tuple[str, ...] = ()

    def build(self, setup: "RunShape") -> "Backward":
        """Returns the backward pass of a run, and the mean that keeps versions for it.

        Raises:
          ConfigError: the model has fewer layers than stages.
        """
        import math

        import jax
        import optax

        from hpcjax import optim
        from hpcjax.core import trees
        from hpcjax.core.method import Backward

        x = setup.batch["x"]
        costs = setup.layer_flops(jax.tree.leaves(x)[0].shape[0])
        delays = optim.stage_delays(
            setup.model, x, self.stages, self.versions, costs, self.stacked
        )
        shapes = jax.eval_shape(setup.model.init, jax.random.key(0))[0]
        sizes = {p: math.prod(leaf.shape) for p, leaf in trees.flatten(shapes).items()}
        held = sum(sizes[p] * sum(own) / len(own) for p, own in delays.items())

        def mean(axes: Any) -> optax.GradientTransformation:
            return optax.chain(optim.all_reduce_mean(axes), optim.keep_versions(delays))

        gradients = optim.gradients_of_versions(delays)
        return Backward(mean, gradients, {"held": held / sum(sizes.values())})
