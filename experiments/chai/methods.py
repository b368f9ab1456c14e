"""How a model reads when heads share maps or are left out, and what that must learn."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.chai import texts
from hpcjax import core, data, inference, models

if TYPE_CHECKING:
    import pathlib

    import jax

    from experiments.chai.experiment import Config

BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What holds for all passages.

    Attributes:
      memberships: of each layer; None if each passage has its own, or none.
      predictors: of heads, of all layers; None for other methods.
    """

    memberships: "tuple[inference.Membership, ...] | None" = None
    predictors: "dict[str, jax.Array] | None" = None


def learn(
    cfg: "Config",
    speaker: "inference.LanguageModel",
    tokenizer: "data.Coder",
    root: "pathlib.Path",
    key: Any,
) -> Learned:
    """Returns what a method learns beforehand, from texts of a calibration or none."""
    decoder = models.decoder_of(speaker.model)
    if cfg.method == "random":
        return Learned(memberships=drawn(cfg, decoder, key))
    if cfg.method == "static":
        given = calibration(cfg, tokenizer, root)
        return Learned(memberships=static(cfg, speaker, given, decoder, key))
    if cfg.method == "dejavu":
        given = calibration(cfg, tokenizer, root)
        return Learned(predictors=fit(cfg, speaker, given, decoder, key))
    return Learned()


def losses(
    cfg: "Config",
    speaker: "inference.LanguageModel",
    learned: Learned,
    tokens: np.ndarray,
    key: Any,
) -> np.ndarray:
    """Returns −log p of the tokens behind the window and one, [batch, places]."""
    import jax.numpy as jnp

    decoder = models.decoder_of(speaker.model)
    rows, counts, window = jnp.asarray(tokens), cfg.counts(decoder), cfg.window
    if cfg.method == "dense":
        found = inference.token_losses(speaker, rows)[:, window:]
    elif cfg.method == "spatten":
        found = inference.cascading_losses(
            speaker,
            rows,
            heads=tuple(count / decoder.heads for count in counts),
            tokens_kept=cfg.tokens_kept(decoder.depth),
            window=window,
        )
    elif cfg.method in ("dejavu", "oracle"):
        found = inference.predicting_losses(
            speaker, rows, heads=counts, predictors=learned.predictors, window=window
        )
    else:
        found = inference.clustered_losses(
            speaker,
            rows,
            cfg.plan(decoder),
            cfg.clustering,
            key=key,
            memberships=learned.memberships,
        )
    return np.asarray(found)


def calibration(
    cfg: "Config", tokenizer: "data.Coder", root: "pathlib.Path"
) -> "list[np.ndarray]":
    """Returns batches of the texts that are learned from."""
    found = texts.documents(
        tokenizer,
        root,
        cfg.calibration,
        count=cfg.calibration_texts,
        time=cfg.calibration_time,
        seed=cfg.seed,
    )
    return [found[at : at + BATCH] for at in range(0, len(found), BATCH)]


def static(
    cfg: "Config",
    speaker: "inference.LanguageModel",
    given: "list[np.ndarray]",
    decoder: "core.Decoder",
    key: Any,
) -> "tuple[inference.Membership, ...]":
    """Returns clusters of mean maps."""
    import jax
    import jax.numpy as jnp

    sums = [
        inference.probe(speaker, jnp.asarray(part), maps_only=True)[0].sum(1)
        for part in given
    ]
    mean = jax.tree.reduce(jnp.add, sums) / sum(map(len, given))
    return inference.cluster_layers(
        mean[:, None],
        cfg.plan(decoder),
        cfg.clustering,
        kv_heads=decoder.kv_heads,
        key=key,
    )


def drawn(
    cfg: "Config", decoder: "core.Decoder", key: Any
) -> "tuple[inference.Membership, ...]":
    """Returns clusters that nothing speaks for."""
    grouped = cfg.clustering.mode == "within_group"
    return tuple(
        inference.random_membership(
            core.derive(key, "layer", layer),
            1,
            decoder.heads,
            clusters,
            groups=decoder.kv_heads if grouped else 1,
        )
        for layer, clusters in enumerate(cfg.plan(decoder).clusters)
    )


def fit(
    cfg: "Config",
    speaker: "inference.LanguageModel",
    given: "list[np.ndarray]",
    decoder: "core.Decoder",
    key: Any,
) -> "dict[str, jax.Array]":
    """Returns predictors of the heads of the largest outputs in texts."""
    import jax
    import jax.numpy as jnp

    counts = cfg.counts(decoder)
    seen = [
        inference.observe_heads(speaker, jnp.asarray(part), counts) for part in given
    ]
    observed = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *seen)
    return inference.fit_predictors(
        observed,
        key=core.derive(key, "predictors"),
        hidden=cfg.pruning.hidden,
        steps=cfg.pruning.steps,
    )
