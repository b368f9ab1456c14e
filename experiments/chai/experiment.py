"""How well a language model foretells a text when clusters of heads share maps."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.inference.config import Clustering
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import pathlib

    import numpy as np
    import xarray as xr

    from hpcjax import inference, perf
    from hpcjax.core.model import Decoder
    from hpcjax.data import Coder
    from hpcjax.runs.context import Context
    from hpcjax.runs.language_models import Speaking

BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, its clusters of heads, and the texts.

    Attributes:
      model: "smollm2", after `hpcjax data fetch smollm2`; the path of a GGUF file or of
        a folder with its tokenizer; or "random", a tiny model nobody has trained.
      dense_layers: the first layers, which have a cluster for each head.
      clusters: k of the other layers.
      membership: "online" clusters by each passage's first tokens; "static" once for
        all, by mean maps of a calibration; "random" draws once for all; "dense" has no
        clusters, and `clusters` does not count.
      calibration: the corpus whose part "train" "static" clusters by.
      calibration_texts: how many of its documents.
      calibration_time: the first tokens of each.
      clustering: how heads are clustered, and what is kept of the cache.
      passages: pieces of the part "validation" of the King James Bible.
      time: tokens of each; those behind the window are foretold.
      seed: of first centres, of random memberships and the choice of documents.
    """

    model: str = "smollm2"
    dense_layers: int = 15
    clusters: int = 6
    membership: Literal["online", "static", "random", "dense"] = "online"
    calibration: str = "kjv"
    calibration_texts: int = 32
    calibration_time: int = 64
    clustering: Clustering = Clustering(mode="expand")
    passages: int = 32
    time: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(0, dense_layers=self.dense_layers)
        checks.require_count(1, clusters=self.clusters, passages=self.passages)
        checks.require_count(1, calibration_texts=self.calibration_texts)
        checks.require_count(1, calibration_time=self.calibration_time)
        if self.time < self.clustering.window + 2:
            raise ConfigError(
                f"time must be at least the window and two: got time={self.time}, "
                f"window={self.clustering.window}"
            )

    def plan(self, decoder: "Decoder") -> "inference.ChaiPlan":
        """Returns k of each layer; a ConfigError where the model has fewer layers."""
        from hpcjax import inference

        if self.membership == "dense":
            return inference.ChaiPlan((decoder.heads,) * decoder.depth)
        others = decoder.depth - self.dense_layers
        if others < 0:
            raise ConfigError(
                f"dense_layers must be at most the model's {decoder.depth}: got "
                f"{self.dense_layers}"
            )
        dense = (decoder.heads,) * self.dense_layers
        return inference.ChaiPlan(dense + (self.clusters,) * others)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Foretells the passages; see `measure`."""
    from hpcjax.runs.language_models import load_language_model

    return measure(cfg, load_language_model(cfg.model, ctx.data_root), ctx.data_root)


def measure(cfg: Config, speaking: "Speaking", root: "pathlib.Path") -> "xr.Dataset":
    """Foretells the passages with clusters of heads.

    Returns:
      `loss` [place], mean −log p of the passages' tokens at each place behind the
      window; `perplexity` of all of them; `share`, Σk / (layers · heads); bytes of a
      passage's keys and values: `bytes` as they were in memory, `formula`, those
      `dense` of all heads and those `native` to the model.
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
    tokens = passages(tokenizer, root, cfg.passages, cfg.time)
    given = memberships(cfg, speaker, tokenizer, root, derive(key, "given"))
    found = []
    for start in range(0, len(tokens), BATCH):
        part, own = tokens[start : start + BATCH], derive(key, "passages", start)
        found.append(np.asarray(losses(cfg, speaker, plan, part, given, own)))
    loss = np.concatenate(found).astype(np.float64).mean(axis=0)
    sizes = cache_sizes(cfg, speaker, plan, tokens[:1], given, derive(key, "passages"))
    return xr.Dataset(
        {
            "loss": ("place", loss),
            "perplexity": np.exp(loss.mean()),
            "share": sum(plan.clusters) / (decoder.depth * decoder.heads),
            **sizes,
        },
        coords={"place": np.arange(cfg.clustering.window + 1, cfg.time)},
    )


def losses(
    cfg: Config,
    speaker: "inference.LanguageModel",
    plan: "inference.ChaiPlan",
    tokens: "np.ndarray",
    given: "tuple[inference.Membership, ...] | None",
    key: Any,
) -> Any:
    """Returns −log p of the tokens that clusters foretell, of the dense model too."""
    import jax.numpy as jnp

    from hpcjax import inference

    rows = jnp.asarray(tokens)
    if cfg.membership == "dense":
        dense = inference.token_losses(speaker, rows)
        return dense[:, cfg.clustering.window :]
    return inference.clustered_losses(
        speaker, rows, plan, cfg.clustering, key=key, memberships=given
    )


def cache_sizes(
    cfg: Config,
    speaker: "inference.LanguageModel",
    plan: "inference.ChaiPlan",
    tokens: "np.ndarray",
    given: "tuple[inference.Membership, ...] | None",
    key: Any,
) -> dict[str, int]:
    """Returns bytes of one passage's cache: measured, by formula, dense and native."""
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
    return {
        "bytes": inference.cache_bytes(made),
        "formula": formula,
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


def memberships(
    cfg: Config,
    speaker: "inference.LanguageModel",
    tokenizer: "Coder",
    root: "pathlib.Path",
    key: Any,
) -> "tuple[inference.Membership, ...] | None":
    """Returns each layer's membership for all passages; None if each has its own."""
    import jax
    import jax.numpy as jnp

    from hpcjax import inference, models
    from hpcjax.core.keys import derive

    if cfg.membership == "online":
        return None
    decoder = models.decoder_of(speaker.model)
    plan = cfg.plan(decoder)
    if cfg.membership == "static":
        texts = documents(
            tokenizer,
            root,
            cfg.calibration,
            count=cfg.calibration_texts,
            time=cfg.calibration_time,
            seed=cfg.seed,
        )
        parts = [texts[at : at + BATCH] for at in range(0, len(texts), BATCH)]
        sums = [
            inference.probe(speaker, jnp.asarray(part), maps_only=True)[0].sum(1)
            for part in parts
        ]
        mean = jax.tree.reduce(jnp.add, sums) / len(texts)
        return inference.cluster_layers(
            mean[:, None], plan, cfg.clustering, kv_heads=decoder.kv_heads, key=key
        )
    grouped = cfg.clustering.mode == "within_group"
    return tuple(
        inference.random_membership(
            derive(key, "layer", layer),
            1,
            decoder.heads,
            clusters,
            groups=decoder.kv_heads if grouped else 1,
        )
        for layer, clusters in enumerate(plan.clusters)
    )


def passages(
    tokenizer: "Coder", root: "pathlib.Path", count: int, time: int
) -> "np.ndarray":
    """Returns pieces of held-out chapters, evenly spread, `[count, time]`.

    Raises:
      DataMissing: the King James Bible is not here.
      ConfigError: the text is shorter.
    """
    from hpcjax import data

    text = "".join(data.read_part(root, "kjv", "validation"))
    found = data.windows(tokenizer.encode(text), time)
    if len(found) < count:
        raise ConfigError(
            f"the text has {len(found)} pieces of {time} tokens: got passages={count}"
        )
    return found[:: len(found) // count][:count]


def documents(
    tokenizer: "Coder",
    root: "pathlib.Path",
    corpus: str,
    *,
    count: int,
    time: int,
    seed: int,
) -> "np.ndarray":
    """Returns the first tokens of documents drawn from "train", `[count, time]`.

    Raises:
      DataMissing: the corpus is not here.
      ConfigError: too few of its documents are long enough.
    """
    import numpy as np

    from hpcjax import data

    texts = data.read_part(root, corpus, "train")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(texts))
    found = []
    for number in order:
        # No need to encode a whole file: few tokens have more characters.
        tokens = tokenizer.encode(texts[number][: 16 * time])[:time]
        if len(tokens) == time:
            found.append(tokens)
        if len(found) == count:
            return np.stack(found)
    raise ConfigError(
        f"{corpus} has {len(found)} documents of {time} tokens: {count} are wanted"
    )
