"""Targets, and drafts that are made of them: pruned, distilled, kept below the data.

A draft is wanted by several tables and takes minutes, so it is written below the data
root by a digest of all that it was made of.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from hpcjax import compress, data, inference
from hpcjax.core import config, files
from hpcjax.inference import corpus_tokens
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs import config as configs

if TYPE_CHECKING:
    from hpcjax.models.pretrained import Pretrained

FOLDER = "drafts"
# What a draft shares with its target and is not trained.
FROZEN = ("^embed/",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig(config.Config):
    """A child of a target: what is left of it, and how it is trained.

    Attributes:
      target: the parent, and the teacher; see `load_language_model`.
      layers: how many are left.
      choice: the first and the last ones, or those that turn the residual stream most.
      heads: query heads left in each layer; None for all.
      kv_heads: key and value heads left; None for all.
      mlp_width: inner features left; None for all.
      corpora: what it is trained on.
      context: tokens of a window.
      batch: windows in a step.
      steps: how many; 0 leaves the pruned model as it is.
      divergence: see `compress.distil`.
      optimizer: of everything but the embedding.
      calibration: windows that activations are measured on.
      seed: of the windows.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "target": "random",
        "layers": "2",
        "heads": "2",
        "kv_heads": "2",
        "mlp_width": "8",
        "choice": "angle",
        "context": "8",
        "batch": "2",
        "steps": "2",
        "calibration": "1",
    }

    target: str = "smollm2"
    layers: int = 4
    choice: Literal["ends", "angle"] = "ends"
    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    corpora: tuple[str, ...] = ("kjv", "python-reference")
    context: config.Size = 64
    batch: config.Size = 4
    steps: config.Count = 240
    divergence: Literal["forward", "reverse", "total_variation"] = "forward"
    optimizer: AdamWConfig = AdamWConfig(
        lr=1e-3, clip_norm=1.0, schedule=CosineConfig()
    )
    calibration: config.Size = 4
    seed: config.Seed = 0


def documents(cfg: DraftConfig, root: pathlib.Path) -> np.ndarray:
    """Returns the tokens of the parts "train" of the draft's corpora, in a row."""
    parts = [corpus_tokens(cfg.target, name, "train", root) for name in cfg.corpora]
    return np.concatenate(parts)


def prompts(
    cfg: DraftConfig,
    root: pathlib.Path,
    *,
    count: int,
    length: int,
    seed: int = 0,
) -> "inference.Prompts":
    """Returns pieces of texts that no draft was trained on.

    Args:
      cfg: whose corpora are taken, in turns, as its target reads them.
      root: the data root.
      count: how many.
      length: tokens of each.
      seed: of the pieces.
    """
    each = -(-count // len(cfg.corpora))
    found = []
    for name in cfg.corpora:
        held = corpus_tokens(cfg.target, name, "validation", root)
        found.append(data.random_windows(held, each, length, seed))
    turns = np.stack(found, axis=1).reshape(-1, length)
    return inference.pad_prompts(list(turns[:count]), least=1)


def draft(
    cfg: DraftConfig, target: "Pretrained", root: pathlib.Path
) -> "tuple[Pretrained, np.ndarray]":
    """Returns a draft and the losses of its training, made once and read afterwards."""
    from hpcjax.models import pretrained

    folder = files.inside(root, FOLDER, configs.digest(cfg))
    if not (folder / "losses.json").exists():
        made, losses = make(cfg, target, root)
        pretrained.save(folder, made)
        # Last: a folder without them is not whole and is made again.
        files.write_json(folder / "losses.json", losses.tolist())
    losses = np.array(files.read_json(folder / "losses.json"), np.float64)
    return pretrained.load(folder), losses


def make(
    cfg: DraftConfig, target: "Pretrained", root: pathlib.Path
) -> "tuple[Pretrained, np.ndarray]":
    """Prunes a target and trains what is left; see `draft`."""
    tokens = documents(cfg, root)
    seen = data.random_windows(tokens, cfg.calibration, cfg.context, cfg.seed + 1)
    child = inference.prune_language_model(
        target,
        seen,
        layers=cfg.layers,
        choice=cfg.choice,
        heads=cfg.heads,
        kv_heads=cfg.kv_heads,
        mlp_width=cfg.mlp_width,
    )
    if cfg.steps == 0:
        return child, np.empty(0)
    rows = data.random_windows(tokens, cfg.steps * cfg.batch, cfg.context, cfg.seed)
    distilled = compress.distil(
        child.model,
        child.params,
        target.model,
        target.params,
        rows.reshape(cfg.steps, cfg.batch, cfg.context),
        cfg.optimizer.make(cfg.steps),
        steps=cfg.steps,
        frozen=FROZEN,
        divergence=cfg.divergence,
    )
    return dataclasses.replace(child, params=distilled.params), distilled.losses
