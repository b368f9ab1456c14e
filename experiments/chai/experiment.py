"""How well a language model foretells a text when clusters of heads share maps."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from experiments.chai import methods, texts
from hpcjax import core, cost, data, inference, models, runs
from hpcjax.core import checks, config
from hpcjax.core.errors import ConfigError
from hpcjax.inference import Clustering

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

CLUSTERED = ("online", "static", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruning(config.Config):
    """What the baselines need to leave heads out.

    Attributes:
      tokens: the share of the tokens so far that "spatten" keeps in the last layer; it
        falls evenly from 1 in the last dense layer.
      hidden: width of the predictors of "dejavu".
      steps: of their fit.
    """

    smoke: ClassVar[Mapping[str, str]] = {"hidden": "3", "steps": "2"}

    tokens: config.Fraction = 0.9
    hidden: config.Size = 128
    steps: config.Size = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
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

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "random",
        "dense_layers": "1",
        "clusters": "2",
        "calibration_texts": "3",
        "calibration_time": "8",
        "passages": "2",
        "time": "12",
        # The text of the smoke tests has too few verses a chapter.
        "questions": "0",
    }

    model: str = "smollm2"
    dense_layers: config.Count = 15
    clusters: config.Size = 6
    method: Literal[
        "online", "static", "random", "spatten", "dejavu", "oracle", "dense"
    ] = "online"
    calibration: str = "kjv"
    calibration_texts: config.Size = 32
    calibration_time: config.Size = 64
    clustering: Clustering = Clustering(mode="expand")
    pruning: Pruning = Pruning()
    passages: config.Size = 32
    time: int = 96
    questions: config.Count = 32
    question_time: int = 64
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def plan(self, decoder: "core.Decoder") -> "inference.ChaiPlan":
        """Returns the clusters of each layer, see `counts`; all heads without."""
        clustered = self.method in CLUSTERED
        every = (decoder.heads,) * decoder.depth
        return inference.ChaiPlan(self.counts(decoder) if clustered else every)

    def counts(self, decoder: "core.Decoder") -> tuple[int, ...]:
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

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """What is found; accuracy and normalized only if asked for."""
        found = {
            "loss": "place: mean -log p of the passages' tokens behind the window",
            "perplexity": ": of all of them",
            "share": ": of clusters in heads",
            "bytes formula": ": bytes of a passage's keys and values, and by formula",
            "dense native": ": bytes of all heads, and of those native to the model",
            "read": ": bytes that the last token must read, by formula",
        }
        if self.questions:
            found["accuracy normalized"] = ": see `inference.ChoiceAccuracy`"
        return found

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"place": range(self.window + 1, self.time)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Foretells the passages; see `measure`."""
    return measure(
        cfg, inference.load_language_model(cfg.model, ctx.data_root), ctx.data_root
    )


def measure(
    cfg: Config, speaking: "inference.TextModel", root: "pathlib.Path"
) -> "runs.Dataset":
    """Foretells the passages and answers the questions.

    Returns:
      `loss` [place], mean -log p of the passages' tokens at each place behind the
      window; `perplexity` of all of them; `accuracy` and `normalized`, see
      `inference.ChoiceAccuracy`, unless no questions are asked; `share`, Σk / (layers ·
      heads); bytes of a passage's keys and values: `bytes` as they were in memory,
      `formula`, those `dense` of all heads, those `native` to the model, and by
      formula those that its last token must `read`.
    """
    import jax

    loaded, tokenizer, *_ = speaking
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    decoder = models.decoder_of(loaded.model)
    plan, key = cfg.plan(decoder), jax.random.key(cfg.seed)
    plan.check(decoder.depth, decoder.heads)
    tokens = texts.passages(tokenizer, root, cfg.passages, cfg.time)
    learned = methods.learn(cfg, speaker, tokenizer, root, core.derive(key, "given"))
    losses = functools.partial(methods.losses, cfg, speaker, learned)
    found = [
        losses(tokens[at : at + methods.BATCH], key=core.derive(key, "passages", at))
        for at in range(0, len(tokens), methods.BATCH)
    ]
    loss = np.concatenate(found).astype(np.float64).mean(axis=0)
    given, own = learned.memberships, core.derive(key, "passages")
    told = functools.partial(losses, key=core.derive(key, "questions"))
    return runs.measured(
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
    tokenizer: "data.Coder",
    root: "pathlib.Path",
) -> dict[str, float]:
    """Returns the shares of questions that are answered well; nothing without any."""
    asked = texts.questions(
        tokenizer, root, cfg.questions, time=cfg.question_time, window=cfg.window
    )
    if not asked:
        return {}

    def losses(rows: np.ndarray) -> np.ndarray:
        # Those of the window, which is part of every context, are not counted.
        return np.pad(told(rows), ((0, 0), (cfg.window, 0)))

    found = inference.answer_choices(losses, asked, time=cfg.question_time)
    return {"accuracy": found.accuracy, "normalized": found.normalized}


def cache_sizes(
    cfg: Config,
    speaker: "inference.LanguageModel",
    plan: "inference.ChaiPlan",
    tokens: np.ndarray,
    given: "tuple[inference.Membership, ...] | None",
    key: Any,
) -> dict[str, int]:
    """Returns bytes of one passage's cache, see `measure`."""
    import jax.numpy as jnp

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
    plan: "inference.ChaiPlan", decoder: "core.Decoder", mode: str | None
) -> "cost.ClusteredHeads":
    """Returns the formulas of a model's clusters."""
    return cost.ClusteredHeads(
        clusters=plan.clusters,
        heads=decoder.heads,
        head_dim=decoder.head_dim,
        kv_heads=decoder.kv_heads,
        mode=mode,
    )
