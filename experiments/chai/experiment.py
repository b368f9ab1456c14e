"""How well a language model foretells a text when clusters of heads share maps."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

from experiments.chai import methods, texts
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.inference.config import Clustering
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    import numpy as np
    import xarray as xr

    from hpcjax import inference, perf
    from hpcjax.core.model import Decoder
    from hpcjax.data import Coder
    from hpcjax.runs.context import Context
    from hpcjax.runs.language_models import Speaking

CLUSTERED = ("online", "static", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruning:
    """What the baselines need to leave heads out.

    Attributes:
      tokens: the share of the tokens so far that "spatten" keeps in the last layer; it
        falls evenly from 1 in the last dense layer.
      hidden: width of the predictors of "dejavu".
      steps: of their fit.
    """

    tokens: float = 0.9
    hidden: int = 128
    steps: int = 500

    def __post_init__(self) -> None:
        in_range = 0 < self.tokens <= 1
        checks.require(in_range, "tokens must be in (0, 1]", tokens=self.tokens)
        checks.require_count(1, hidden=self.hidden, steps=self.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, what becomes of its heads, and the texts.

    Attributes:
      model: "smollm2", after `hpcjax data fetch smollm2`; the path of a GGUF file or of
        a folder with its tokenizer; or "random", a tiny model nobody has trained.
      dense_layers: the first layers, which have a cluster for each head.
      clusters: k of the other layers: clusters of heads, or heads that a baseline
        keeps.
      method: "online" clusters by each passage's first tokens; "static" once for all,
        by mean maps of a calibration; "random" draws once for all. Instead of clusters,
        "spatten" keeps the heads and tokens that layers before found important,
        "dejavu" the heads that predictors choose, fitted to a calibration, and "oracle"
        those that these should. "dense" keeps all, and `clusters` does not count.
      calibration: the corpus whose part "train" "static" and "dejavu" learn from.
      calibration_texts: how many of its documents.
      calibration_time: the first tokens of each.
      clustering: how heads are clustered, and what is kept of the cache; its window is
        that of all methods.
      pruning: what only baselines need.
      passages: pieces of the part "validation" of the King James Bible.
      time: tokens of each; those behind the window are foretold.
      questions: of multiple choice, from its part "test": which of four verses of a
        book comes next? 0 asks none.
      question_time: questions are left out whose context and endings have more tokens.
      seed: of first centres, random memberships, predictors and the choice of
        documents.
    """

    model: str = "smollm2"
    dense_layers: int = 15
    clusters: int = 6
    method: Literal[
        "online", "static", "random", "spatten", "dejavu", "oracle", "dense"
    ] = "online"
    calibration: str = "kjv"
    calibration_texts: int = 32
    calibration_time: int = 64
    clustering: Clustering = Clustering(mode="expand")
    pruning: Pruning = Pruning()
    passages: int = 32
    time: int = 96
    questions: int = 32
    question_time: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(
            0, dense_layers=self.dense_layers, questions=self.questions
        )
        checks.require_count(1, clusters=self.clusters, passages=self.passages)
        checks.require_count(1, calibration_texts=self.calibration_texts)
        checks.require_count(1, calibration_time=self.calibration_time)
        checks.require_count(self.window + 2, question_time=self.question_time)
        if self.time < self.window + 2:
            raise ConfigError(
                f"time must be at least the window and two: got time={self.time}, "
                f"window={self.window}"
            )

    @property
    def window(self) -> int:
        """The first tokens of a text, which are read with all heads."""
        return self.clustering.window

    def plan(self, decoder: "Decoder") -> "inference.ChaiPlan":
        """Returns the clusters of each layer, see `counts`; all heads without."""
        from hpcjax import inference

        clustered = self.method in CLUSTERED
        every = (decoder.heads,) * decoder.depth
        return inference.ChaiPlan(self.counts(decoder) if clustered else every)

    def counts(self, decoder: "Decoder") -> tuple[int, ...]:
        """Returns k of each layer; a ConfigError where the model has fewer layers."""
        if self.method == "dense":
            return (decoder.heads,) * decoder.depth
        others = decoder.depth - self.dense_layers
        if others < 0:
            raise ConfigError(
                f"dense_layers must be at most the model's {decoder.depth}: got "
                f"{self.dense_layers}"
            )
        return (decoder.heads,) * self.dense_layers + (self.clusters,) * others

    def tokens_kept(self, depth: int) -> tuple[float, ...]:
        """Returns the share of the tokens that each layer keeps."""
        others = depth - self.dense_layers
        if self.method != "spatten":
            return (1.0,) * depth
        lost = (1 - self.pruning.tokens) / max(others, 1)
        falling = tuple(1 - lost * (number + 1) for number in range(others))
        return (1.0,) * self.dense_layers + falling


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Foretells the passages; see `measure`."""
    from hpcjax.runs.language_models import load_language_model

    return measure(cfg, load_language_model(cfg.model, ctx.data_root), ctx.data_root)


def measure(cfg: Config, speaking: "Speaking", root: "pathlib.Path") -> "xr.Dataset":
    """Foretells the passages and answers the questions.

    Returns:
      `loss` [place], mean −log p of the passages' tokens at each place behind the
      window; `perplexity` of all of them; `accuracy` and `normalized`, see
      `inference.Answered`, unless no questions are asked; `share`, Σk / (layers ·
      heads); bytes of a passage's keys and values: `bytes` as they were in memory,
      `formula`, those `dense` of all heads, those `native` to the model, and by
      formula those that its last token must `read`.
    """
    import jax
    import numpy as np
    import xarray as xr

    from hpcjax import inference, models
    from hpcjax.core.keys import derive

    loaded, tokenizer = speaking
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    decoder = models.decoder_of(loaded.model)
    plan, key = cfg.plan(decoder), jax.random.key(cfg.seed)
    plan.check(decoder.depth, decoder.heads)
    tokens = texts.passages(tokenizer, root, cfg.passages, cfg.time)
    learned = methods.learn(cfg, speaker, tokenizer, root, derive(key, "given"))
    losses = functools.partial(methods.losses, cfg, speaker, learned)
    found = [
        losses(tokens[at : at + methods.BATCH], key=derive(key, "passages", at))
        for at in range(0, len(tokens), methods.BATCH)
    ]
    loss = np.concatenate(found).astype(np.float64).mean(axis=0)
    given, own = learned.memberships, derive(key, "passages")
    told = functools.partial(losses, key=derive(key, "questions"))
    return xr.Dataset(
        {
            "loss": ("place", loss),
            "perplexity": np.exp(loss.mean()),
            "share": sum(cfg.counts(decoder)) / (decoder.depth * decoder.heads),
            **answers(cfg, told, tokenizer, root),
            **cache_sizes(cfg, speaker, plan, tokens[:1], given, own),
        },
        coords={"place": np.arange(cfg.window + 1, cfg.time)},
    )


def answers(
    cfg: Config,
    told: "Callable[[np.ndarray], np.ndarray]",
    tokenizer: "Coder",
    root: "pathlib.Path",
) -> dict[str, float]:
    """Returns the shares of questions that are answered well; nothing without any."""
    import numpy as np

    from hpcjax import inference

    asked = texts.questions(
        tokenizer, root, cfg.questions, time=cfg.question_time, window=cfg.window
    )
    if not asked:
        return {}

    def losses(rows: "np.ndarray") -> "np.ndarray":
        # Those of the window, which is part of every context, are not counted.
        return np.pad(told(rows), ((0, 0), (cfg.window, 0)))

    found = inference.answer_choices(losses, asked, time=cfg.question_time)
    return {"accuracy": found.accuracy, "normalized": found.normalized}


def cache_sizes(
    cfg: Config,
    speaker: "inference.LanguageModel",
    plan: "inference.ChaiPlan",
    tokens: "np.ndarray",
    given: "tuple[inference.Membership, ...] | None",
    key: Any,
) -> dict[str, int]:
    """Returns bytes of one passage's cache, see `measure`."""
    import jax.numpy as jnp

    from hpcjax import inference, models

    decoder = models.decoder_of(speaker.model)
    first = jnp.asarray(tokens[:, : cfg.clustering.window])
    maps, cache = inference.probe(speaker, first, maps_only=False)
    found = given or inference.cluster_layers(
        maps, plan, cfg.clustering, kv_heads=decoder.kv_heads, key=key
    )
    made = inference.compact(cache, found, decoder, cfg.clustering, cfg.time)
    heads = accounting(plan, decoder, cfg.clustering.mode)
    itemsize = jnp.dtype(decoder.dtype).itemsize
    formula = heads.kv_cache_bytes(1, cfg.time, itemsize)
    unit = cfg.time * decoder.head_dim * itemsize
    if cfg.clustering.share_values:
        formula = unit * (sum(heads.key_heads()) + sum(plan.clusters))
    read = formula
    if cfg.method not in CLUSTERED:
        shares = cfg.tokens_kept(decoder.depth)
        left = zip(
            cfg.counts(decoder), inference.kept_counts(cfg.time, shares), strict=True
        )
        read = 2 * decoder.head_dim * itemsize * sum(n * kept for n, kept in left)
    return {
        "bytes": inference.cache_bytes(made),
        "formula": formula,
        "read": read,
        "dense": heads.dense_cache_bytes(1, cfg.time, itemsize),
        "native": unit * 2 * decoder.depth * decoder.kv_heads,
    }


def accounting(
    plan: "inference.ChaiPlan", decoder: "Decoder", mode: str | None
) -> "perf.ClusteredHeads":
    """Returns the formulas of a model's clusters."""
    from hpcjax import perf

    return perf.ClusteredHeads(
        clusters=plan.clusters,
        heads=decoder.heads,
        head_dim=decoder.head_dim,
        kv_heads=decoder.kv_heads,
        mode=mode,
    )
