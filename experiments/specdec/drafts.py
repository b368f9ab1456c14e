"""Targets, and drafts that are made of them: pruned, distilled, kept below the data.

A draft is wanted by several tables and takes minutes, so it is written below the data
root by a digest of all that it was made of.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, Literal

from hpcjax.core import files
from hpcjax.core.errors import ConfigError
from hpcjax.optim.config import AdamWConfig, CosineConfig
from hpcjax.runs import config as configs
from hpcjax.runs.config import check_seed
from hpcjax.runs.language_models import corpus_tokens

if TYPE_CHECKING:
    import numpy as np

    from hpcjax import inference
    from hpcjax.models.pretrained import Pretrained

FOLDER = "drafts"
# What a draft shares with its target and is not trained.
FROZEN = ("^embed/",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
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
      divergence: see `compress.distillation_loss`.
      optimizer: of everything but the embedding.
      calibration: windows that activations are measured on.
      seed: of the windows.
    """

    target: str = "smollm2"
    layers: int = 4
    choice: Literal["ends", "angle"] = "ends"
    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    corpora: tuple[str, ...] = ("kjv", "python-reference")
    context: int = 64
    batch: int = 4
    steps: int = 240
    divergence: Literal["forward", "reverse", "total_variation"] = "forward"
    optimizer: AdamWConfig = AdamWConfig(
        lr=1e-3, clip_norm=1.0, schedule=CosineConfig()
    )
    calibration: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.steps < 0 or min(self.context, self.batch, self.calibration) < 1:
            raise ConfigError(
                "steps must be at least 0, context, batch and calibration at least 1: "
                f"got {self.steps}, {self.context}, {self.batch}, {self.calibration}"
            )


def documents(cfg: DraftConfig, root: pathlib.Path) -> "np.ndarray":
    """Returns the tokens of the parts "train" of the draft's corpora, in a row."""
    import numpy as np

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
    import numpy as np

    from hpcjax import data, inference

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
    import numpy as np

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
    import jax.numpy as jnp
    import numpy as np

    from hpcjax import compress, data

    tokens = documents(cfg, root)
    seen = data.random_windows(tokens, cfg.calibration, cfg.context, cfg.seed + 1)
    child = prune(cfg, target, jnp.asarray(seen))
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


def prune(cfg: DraftConfig, target: "Pretrained", tokens: Any) -> "Pretrained":
    """Returns what a draft is left of its target, untrained.

    Args:
      cfg: the draft.
      target: its parent.
      tokens: windows that activations are measured on.
    """
    import jax.numpy as jnp

    from hpcjax import compress, core

    old: Any = target.config
    places = ("blocks/attention/output", "blocks/mlp/down")
    taps = {place: core.Tap(forward=_squares) for place in places}
    _, state = target.model.apply(target.params, {}, tokens, train=False, taps=taps)
    heads, features = (jnp.sqrt(state[core.SEEN][place]) for place in places)
    if cfg.choice == "ends":
        keep = compress.ends(old.depth, cfg.layers)
    else:
        keep = compress.by_angle(hidden_states(target, tokens), cfg.layers)
    blocks = compress.prune_layers(target.params["blocks"], keep)
    chosen = jnp.asarray(keep)
    new = dataclasses.replace(
        old,
        depth=cfg.layers,
        heads=cfg.heads or old.heads,
        kv_heads=cfg.kv_heads or (old.kv_heads or old.heads),
        head_dim=old.head_size,
        mlp_width=cfg.mlp_width or old.mlp_width or 4 * old.width,
    )
    blocks = {
        **blocks,
        "attention": compress.prune_heads(
            blocks["attention"],
            heads[chosen],
            heads=old.heads,
            kv_heads=old.kv_heads,
            count=new.heads,
            kv_count=new.kv_heads,
        ),
        "mlp": compress.prune_features(blocks["mlp"], features[chosen], new.mlp_width),
    }
    params = {**target.params, "blocks": blocks}
    return dataclasses.replace(target, params=params, config=new)


def hidden_states(target: "Pretrained", tokens: Any) -> Any:
    """Returns the residual stream before each layer and after the last."""
    import jax
    import jax.numpy as jnp

    parts = target.parts
    first, _ = parts.embed.apply(target.params, {}, tokens, train=False)

    def layer(x: Any, params: Any) -> Any:
        y, _ = parts.block.apply(params, {}, x, train=False)
        return y, y

    _, others = jax.lax.scan(layer, first, target.params["blocks"])
    return jnp.concatenate([first[None], others])


def _squares(x: Any, y: Any) -> Any:
    """Returns the sum of squares of each input, over all places."""
    del y
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    return jnp.sum(wide**2, axis=tuple(range(wide.ndim - 1)))
