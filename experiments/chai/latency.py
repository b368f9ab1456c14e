"""Time to the first token and to a whole answer, with clusters of heads and without."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from hpcjax import core, inference, perf, runs
from hpcjax.core import checks, config
from hpcjax.inference import Clustering, Continuation, Sampler
from hpcjax.models import LLAMA, CausalLmConfig

FIRST, ALL = "first", "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model of random weights, and prompts of several lengths.

    Attributes:
      model: with a key head for each query head.
      vocabulary: words.
      compute: dtype of parameters, products and cache.
      dense_layers: the first layers, which have a cluster for each head.
      clusters: k of the others.
      batch: prompts at once.
      prompts: tokens of each.
      answer: tokens that are written.
      window: tokens by which heads are clustered.
      repetitions: rounds of the measurement.
      seed: of weights, prompts and first centres.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "2",
        "model.width": "16",
        "model.heads": "4",
        "model.mlp_width": "16",
        "vocabulary": "11",
        "dense_layers": "1",
        "clusters": "2",
        "compute": "float32",
        "prompts": "[8]",
        "answer": "2",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "prompt what candidate repetition: with finding clusters",
    }

    model: CausalLmConfig = CausalLmConfig(depth=2, width=512, heads=16, options=LLAMA)
    vocabulary: config.Several = 1024
    compute: Literal["float32", "bfloat16"] = "float32"
    dense_layers: config.Count = 0
    clusters: config.Size = 4
    batch: config.Size = 1
    prompts: tuple[config.Several, ...] = (256, 1024, 4096, 8192)
    answer: config.Several = 32
    window: config.Size = 5
    repetitions: config.Several = 20
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "prompts must be longer than the window"
        good = bool(self.prompts) and min(self.prompts) > self.window
        checks.require(good, rule, prompts=self.prompts, window=self.window)

    def plan(self, clusters: int) -> "inference.ChaiPlan":
        """Returns `clusters` for each layer that is clustered.

        Raises:
          ConfigError: the model has fewer layers or heads.
        """
        heads, dense = self.model.heads, self.dense_layers
        rule = f"the model has {self.model.depth} layers of {heads} heads"
        good = dense <= self.model.depth and clusters <= heads
        checks.require(good, rule, dense_layers=dense, clusters=clusters)
        others = self.model.depth - dense
        return inference.ChaiPlan((heads,) * dense + (clusters,) * others)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "prompt": self.prompts,
            "what": (FIRST, ALL),
            "candidate": ("all heads", "clusters", "k = H"),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Writes one token, and all, by each method, in turns for each length of prompt."""
    import jax
    import xarray as xr

    policy = core.Policy(param=cfg.compute, compute=cfg.compute)
    context = max(cfg.prompts) + cfg.answer
    model = cfg.model.make((context,), cfg.vocabulary, policy)
    params, _ = jax.jit(model.init)(jax.random.key(cfg.seed))
    speaker = inference.LanguageModel(model=model, params=params)
    lengths = []
    for number, length in enumerate(cfg.prompts):
        parts = [
            perf.compare(
                candidates(cfg, speaker, length, tokens),
                "all heads",
                repetitions=cfg.repetitions,
                warmup=1,
            )["seconds"]
            for tokens in (1, cfg.answer)
        ]
        lengths.append(xr.concat(parts, "what"))
        ctx.record(number + 1, seconds=float(parts[-1].median()))
    seconds = xr.concat(lengths, "prompt").transpose("prompt", "what", ...)
    return runs.measured(
        {"seconds": seconds},
        coords={"prompt": list(cfg.prompts), "what": [FIRST, ALL]},
    )


def candidates(
    cfg: Config, speaker: "inference.LanguageModel", length: int, tokens: int
) -> dict[str, Callable[[], Any]]:
    """Returns thunks that read a prompt and write so many tokens."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(cfg.seed)
    shape = (cfg.batch, length)
    drawn = jax.random.randint(key, shape, 0, cfg.vocabulary)
    prompts = inference.Prompts(drawn, jnp.full(cfg.batch, length, jnp.int32))
    options = Continuation(max_new_tokens=tokens, sampler=Sampler(temperature=0.0))
    clustering = Clustering(window=cfg.window)

    def clustered(clusters: int) -> Any:
        found = inference.generate_clustered(
            speaker, prompts, cfg.plan(clusters), options, clustering, key=key
        )
        return found.generated

    return {
        "all heads": lambda: inference.generate(speaker, prompts, options, key=key),
        "clusters": functools.partial(clustered, cfg.clusters),
        "k = H": functools.partial(clustered, cfg.model.heads),
    }
