"""How many weights each layer keeps where hardly any are left, before training."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import core, metrics, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError
from hpcjax.core.structures import count_kept
from hpcjax.optim import sparsify

Score = Literal["random", "magnitude", "snip", "grasp", "synflow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A perceptron without biases that is pruned by one score, all layers together.

    Attributes:
      score: those of the largest are kept.
      rounds: of pruning, each of which removes the same share.
      widths: of the layers, inputs and outputs too.
      density: share of the weights that is left.
      examples: in the batch, of random inputs; the classes take turns.
      search: whether the density at which a layer empties is looked for.
      seed: of weights and inputs.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "rounds": "2",
        "widths": "[8,6,4]",
        "density": "0.2",
        "examples": "8",
        "search": "false",
    }

    score: Score = "synflow"
    rounds: config.Size = 1
    widths: tuple[config.Size, ...] = (64, 100, 100, 10)
    density: config.Share = 0.005
    examples: config.Size = 100
    search: bool = True
    seed: config.Seed = 0

    @property
    def weights(self) -> int:
        """How many weights the network has."""
        return sum(a * b for a, b in itertools.pairwise(self.widths))

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """What is found; empties only if asked for."""
        found = {
            "kept": "layer: weights",
        }
        if self.search:
            found["empties"] = ": largest percentage that leaves a layer none"
        return found

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"layer": list(_shapes(self))}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Prunes a network with He's initialisation; nothing is trained."""
    del ctx
    params, score = _network(cfg), _score(cfg)
    kept = _prune(cfg, score, params, count_kept(cfg.weights, 1 - cfg.density))
    layers = list(core.masks.count_true(kept))
    counts = [int(n) for n in core.masks.count_true(kept).values()]
    found: dict[str, Any] = {"kept": ("layer", counts)}
    if cfg.search:
        found["empties"] = 100 * _first_empty(cfg, score, params) / cfg.weights
    return runs.analytical(found, coords={"layer": layers})


def _network(cfg: Config) -> dict[str, Any]:
    import jax

    key, he = jax.random.key(cfg.seed), jax.nn.initializers.he_normal()
    return {
        name: he(core.derive(key, "layer", number), shape)
        for number, (name, shape) in enumerate(_shapes(cfg).items())
    }


def _shapes(cfg: Config) -> dict[str, tuple[int, int]]:
    pairs = enumerate(itertools.pairwise(cfg.widths))
    return {f"layer_{number}": shape for number, shape in pairs}


def _apply(params: dict[str, Any], inputs: Any) -> Any:
    import jax

    *hidden, last = (params[f"layer_{number}"] for number in range(len(params)))
    for kernel in hidden:
        inputs = jax.nn.relu(inputs @ kernel)
    return inputs @ last


def _score(cfg: Config) -> Callable[[Any], Any]:
    """Returns the function from parameters to scores."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(cfg.seed)
    inputs, outputs = cfg.widths[0], cfg.widths[-1]
    x = jax.random.normal(core.derive(key, "inputs"), (cfg.examples, inputs))
    batch = x, jnp.arange(cfg.examples) % outputs

    def loss(params: Any, batch: Any, scale: float = 1.0) -> Any:
        return metrics.cross_entropy(_apply(params, batch[0]) * scale, batch[1])

    def draw(params: Any) -> Any:
        return {
            name: jax.random.uniform(core.derive(key, name), leaf.shape)
            for name, leaf in params.items()
        }

    return {
        "random": draw,
        "magnitude": lambda params: jax.tree.map(jnp.abs, params),
        "snip": lambda params: sparsify.snip(loss, params, batch),
        # As in its paper, of logits divided by 200.
        "grasp": lambda params: sparsify.grasp(
            lambda params, batch: loss(params, batch, 1 / 200), params, batch
        ),
        "synflow": lambda params: sparsify.synflow(_apply, params, x[0]),
    }[cfg.score]


def _prune(
    cfg: Config,
    score: Callable[[Any], Any],
    params: Any,
    count: int,
    strict: bool = False,
) -> Any:
    """Returns masks of so many weights; a layer that scores would empty keeps one."""
    share = sparsify.Global(sparsity=1 - count / cfg.weights)
    with warnings.catch_warnings():
        # It is what is counted here.
        warnings.simplefilter("ignore", sparsify.LayerCollapseWarning)
        return sparsify.at_init(
            score, params, rounds=cfg.rounds, strict=strict, distribution=share
        )


def _first_empty(cfg: Config, score: Callable[[Any], Any], params: Any) -> int:
    """Returns the largest number of weights that leaves a layer none; 0 if none does.

    Of one round it is exact. Of several it is found by bisection, from a weight for
    each layer on, as if every smaller number emptied a layer too.
    """
    if cfg.rounds == 1:
        scores = [np.asarray(leaf) for leaf in score(params).values()]
        ahead = [sum(np.sum(s > own.max()) for s in scores) for own in scores]
        return int(max(ahead))

    def empties(count: int) -> bool:
        try:
            _prune(cfg, score, params, count, strict=True)
        except ConfigError:
            return True
        return False

    low, high = 0, len(params)
    while high < cfg.weights and empties(high):
        low, high = high, 2 * high
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if empties(middle) else (low, middle)
    return low
