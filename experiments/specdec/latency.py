"""How long a draft step takes, by depth and width: random parameters, one sequence."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hpcjax import core, inference, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError
from hpcjax.models import LLAMA, CausalLmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A grid of drafts, and a line of equally many parameters.

    Attributes:
      depths: layers.
      widths: features.
      head_dim: features of a head; widths of the line are multiples of it.
      parameters: of all layers together, along the line.
      vocabulary: words.
      size: of the cache, which is half full.
      compute: dtype of parameters and products.
      repetitions: rounds of the measurement.
      inner: steps in one measurement.
      unrolled: compiles each layer by itself.
      seed: of the parameters.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "depths": "[1,2,3,4]",
        "widths": "[8,16,24]",
        "head_dim": "8",
        "parameters": "3072",
        "vocabulary": "11",
        "size": "8",
        "compute": "bfloat16",
        "repetitions": "2",
        "inner": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "point repetition: of a step of a draft",
        "depth width": "point: of the draft",
        "line": "point: whether it is of the line, not of the grid",
        "layer_bytes head_bytes": "point: of weights",
    }

    depths: tuple[int, ...] = (2, 4, 8, 16)
    widths: tuple[int, ...] = (64, 128, 256)
    head_dim: int = 16
    parameters: config.Size = 786_432
    vocabulary: int = 256
    size: config.Several = 128
    compute: Literal["float32", "bfloat16"] = "float32"
    repetitions: config.Several = 20
    inner: config.Size = 16
    unrolled: bool = False
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.depths)) < 4 or len(set(self.widths)) < 3:
            raise ConfigError(
                "a fit needs at least 4 depths and 3 widths: got "
                f"{self.depths} and {self.widths}"
            )

    def line(self) -> tuple[tuple[int, int], ...]:
        """Returns (depth, width) with about `parameters` in the layers."""
        # 4 width² of attention, 3 · 8/3 width² of the feed-forward part.
        widths = [math.sqrt(self.parameters / 12 / depth) for depth in self.depths]
        heads = [max(1, round(width / self.head_dim)) for width in widths]
        return tuple(
            (depth, self.head_dim * count)
            for depth, count in zip(self.depths, heads, strict=True)
        )

    def points(self) -> list[tuple[int, int, bool]]:
        """Returns depth, width and whether it is on the line; the grid comes first."""
        grid = itertools.product(self.depths, self.widths)
        line = [(*each, True) for each in self.line()]
        return [(*each, False) for each in grid] + line

    def draft(self, depth: int, width: int) -> CausalLmConfig:
        """Returns a draft of LLaMA's form."""
        return CausalLmConfig(
            depth=depth,
            width=width,
            heads=max(1, width // self.head_dim),
            mlp_width=8 * width // 3,
            options=LLAMA,
        )

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"point": range(len(self.points())), "repetition": self.repetitions}

    def typical(self) -> Mapping[str, Any]:
        """Returns what the table wants more of than that it is positive."""
        depth, width, line = map(list, zip(*self.points(), strict=True))
        return {"depth": depth, "width": width, "line": line}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times one step of each draft, interleaved, in this process."""
    import jax

    from experiments.specdec import timing
    from hpcjax.core import trees

    points = cfg.points()
    policy = core.Policy(param=cfg.compute, compute=cfg.compute)
    thunks: dict[str, Any] = {}
    layer, head = [], []
    for number, (depth, width, _) in enumerate(points):
        model = cfg.draft(depth, width).make((cfg.size,), cfg.vocabulary, policy)
        params, _ = jax.jit(model.init)(jax.random.key(cfg.seed))
        cached = 2 * cfg.size * width * jax.numpy.dtype(cfg.compute).itemsize
        layer.append(trees.num_bytes(params["blocks"]) / depth + cached)
        head.append(trees.num_bytes(params["head"]))
        thunks[str(number)] = functools.partial(
            timing.steps,
            inference.LanguageModel(model=model, params=params),
            jax.random.key(cfg.seed),
            tokens=1,
            known=cfg.size // 2,
            size=cfg.size,
            count=cfg.inner,
            sampler=inference.Sampler(temperature=0.0),
            unrolled=cfg.unrolled,
        )
    measured = perf.compare(thunks, "0", repetitions=cfg.repetitions)
    seconds = (measured["seconds"] / cfg.inner).rename(candidate="point")
    depths, widths, lines = zip(*points, strict=True)
    return runs.measured(
        {
            "seconds": seconds.assign_coords(point=range(len(points))),
            "depth": ("point", list(depths)),
            "width": ("point", list(widths)),
            "line": ("point", list(lines)),
            "layer_bytes": ("point", layer),
            "head_bytes": ("point", head),
        }
    )
