"""How long a language model takes to compile, by its depth."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import metrics, models, perf, runs
from hpcjax.core import config
from hpcjax.models import CausalLmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, which is compiled with several depths.

    Attributes:
      model: the network; its depth is not used.
      depths: numbers of blocks; the least one comes first.
      context: tokens of a sequence, and places of the cache.
      vocabulary: words.
      repetitions: of which the least counts.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.width": "8",
        "model.heads": "2",
        "context": "4",
        "vocabulary": "11",
        "depths": "[1,2]",
        "repetitions": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "depth program: of tracing and compiling, without a cache",
        "instructions": "depth program: of the optimized program",
    }

    model: CausalLmConfig = CausalLmConfig(width=64, heads=4)
    depths: tuple[config.Size, ...] = (4, 48)
    context: config.Several = 64
    vocabulary: config.Several = 256
    repetitions: config.Size = 3
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "depth": self.depths,
            "program": ("gradient", "token", "token, layer by layer"),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compiles a gradient and a decoding step, as a scan and layer by layer."""
    seconds, instructions = [], []
    for depth in cfg.depths:
        for function, arguments in _programs(cfg, depth).values():
            made = [
                # A new callable each time, for JAX remembers what it has traced.
                perf.compile_seconds(functools.partial(function), *arguments)
                for _ in range(cfg.repetitions)
            ]
            seconds.append(min(each.seconds for each in made))
            instructions.append(perf.count_ops(made[0].program))
    shape = len(cfg.depths), -1
    dims = ("depth", "program")
    return runs.measured(
        {
            "seconds": (dims, np.reshape(seconds, shape)),
            "instructions": (dims, np.reshape(instructions, shape)),
        },
        coords={"depth": list(cfg.depths), "program": list(_programs(cfg, 1))},
    )


def _programs(cfg: Config, depth: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Returns functions and the shapes of their arguments."""
    import jax

    made = dataclasses.replace(cfg.model, depth=depth)
    model = made.make((cfg.context,), cfg.vocabulary)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, cfg.context), "int32")
    token = jax.ShapeDtypeStruct((2, 1), "int32")
    objective = metrics.label_totals

    def loss(params: Any, state: Any, tokens: Any) -> Any:
        outputs, _ = model.apply(params, state, tokens, train=True)
        totals = objective(outputs, {"x": tokens, "y": tokens})
        return totals.sums["loss"] / totals.count

    def decode(params: Any, cache: Any, token: Any) -> Any:
        x = models.Decoding(tokens=token, cache=cache)
        return model.apply(params, {}, x, train=False)[0]

    def cache(unrolled: bool) -> Any:
        return jax.eval_shape(
            lambda: models.empty_cache(model, 2, cfg.context, unrolled=unrolled)
        )

    return {
        "gradient": (jax.grad(loss), (params, state, tokens)),
        "token": (decode, (params, cache(False), token)),
        "token, layer by layer": (decode, (params, cache(True), token)),
    }
