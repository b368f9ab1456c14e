"""How many clusters of heads a layer needs: the elbow of k-means' error."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.chai.methods import BATCH
from experiments.chai.texts import documents
from hpcjax import core, inference, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model and the texts of the offline phase.

    Attributes:
      model: as of `chai/smollm2`.
      corpus: documents of its part "train".
      texts: how many.
      time: the first tokens of each.
      tau: the threshold, of the error of one cluster.
      seed: of the choice of texts, and of first centres.
    """

    smoke: ClassVar[Mapping[str, str]] = {"model": "random", "texts": "3", "time": "8"}
    figures: ClassVar[Mapping[str, str]] = {
        "error": "layer count: of k-means, over one cluster's; 0 where heads are equal",
        "threshold knee": "layer: clusters by each rule",
    }

    model: str = "smollm2"
    corpus: str = "kjv"
    texts: config.Size = 32
    time: config.Several = 64
    tau: config.Decay = 0.05
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        # As many as SmolLM2 has, whose heads are 9; counts in a result begin at 1.
        return {"layer": 30, "count": 10}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Clusters every text's maps for every k, and writes the plan `plan.json`."""
    import jax
    import jax.numpy as jnp

    loaded, tokenizer, *_ = inference.load_language_model(cfg.model, ctx.data_root)
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    texts = documents(
        tokenizer,
        ctx.data_root,
        cfg.corpus,
        count=cfg.texts,
        time=cfg.time,
        seed=cfg.seed,
    )
    key, errors = jax.random.key(cfg.seed), []
    past = np.tril_indices(cfg.time)
    for start in range(0, len(texts), BATCH):
        part = jnp.asarray(texts[start : start + BATCH])
        maps, _ = inference.probe(speaker, part, maps_only=True)
        features = jnp.swapaxes(maps, 0, 1)[..., past[0], past[1]]
        own = core.derive(key, "texts", start)
        found = np.asarray(inference.clustering_errors(features, key=own), np.float64)
        errors.append(found)
        ctx.record(start // BATCH + 1, error=float(found.sum()))
    total = np.sum(errors, axis=0)
    plan = inference.choose_clusters(total, tau=cfg.tau)
    plan.save(ctx.directory.path / "plan.json")
    knee = inference.choose_clusters(total, rule="knee")
    first = np.where(total[:, :1] > 0, total[:, :1], 1)
    return runs.measured(
        {
            "error": (("layer", "count"), total / first),
            "threshold": ("layer", list(plan.clusters)),
            "knee": ("layer", list(knee.clusters)),
        },
        coords={"count": range(1, total.shape[1] + 1)},
    )
