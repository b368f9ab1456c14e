"""Digits read pixel by pixel by a sparse Transformer, in floats and in few bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import core, data, kernels, layers, metrics, runs
from hpcjax.core import config
from hpcjax.models import CausalLmConfig

if TYPE_CHECKING:
    import jax

    from experiments.magicube.network import Mix

PUBLISHED = "4-4, published scales"
MODES = ("dense", "float", "16-8", "8-8", "8-4", "4-4", PUBLISHED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network that is trained in floats and evaluated in all precisions.

    Attributes:
      model: width, heads and depth of the blocks.
      zeros: share of the attention's pattern that is zero.
      vector: V, queries with the same keys.
      steps: of AdamW.
      batch_size: digits of a step.
      lr: learning rate, which falls to zero by a cosine.
      limit: at most this many digits are evaluated; None for all.
      seed: of parameters, batches and pattern.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "steps": "2",
        "batch_size": "4",
        "model.width": "16",
        "model.depth": "1",
        "limit": "4",
    }

    model: CausalLmConfig = CausalLmConfig(width=64, heads=2, depth=2)
    zeros: config.Share = 0.9
    vector: Literal[2, 4, 8] = 8
    steps: config.Size = 400
    batch_size: config.Size = 64
    lr: config.Positive = 3e-3
    limit: config.Size | None = None
    seed: config.Seed = 0


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    return runs.outline({"accuracy": "mode"}, mode=list(MODES))


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Trains a dense and a sparse network, and evaluates the latter in few bits.

    Returns:
      `accuracy` [mode] in percent on the digits that are held out.
    """
    del ctx
    digits = data.DigitsConfig().load()
    mixes = _mixes(cfg)
    trained = {name: _train(cfg, digits, mixes[name]) for name in ("dense", "float")}
    found = [
        _evaluate(cfg, digits, mix, trained["dense" if name == "dense" else "float"])
        for name, mix in mixes.items()
    ]
    return runs.measured({"accuracy": ("mode", found)}, coords={"mode": list(MODES)})


def _mixes(cfg: Config) -> "dict[str, Mix | None]":
    """Returns the attention of each mode; None for dense."""
    rng = np.random.default_rng(cfg.seed)
    rows = 64 // cfg.vector
    kept = max(1, round(64 * (1 - cfg.zeros)))
    mask = np.zeros((rows, 64), bool)
    for row in mask:
        row[rng.permutation(64)[:kept]] = True
    pattern = kernels.sr_bcrs(np.ones((64, 64)), vector=cfg.vector, mask=mask)
    attend = functools.partial(layers.sparse_attention, pattern=pattern)
    found: dict[str, Any] = {"dense": None, "float": attend}
    for name in MODES[2:]:
        first, _, second = name.partition(",")[0].partition("-")
        bits = layers.AttentionBits(int(first), int(second))  # pyrefly: ignore
        scales = "published" if name == PUBLISHED else "calibrated"
        found[name] = functools.partial(attend, bits=bits, scales=scales)
    return found


def _model(cfg: Config, mix: "Mix | None") -> "core.Model":
    from experiments.magicube.network import pixels

    return pixels(cfg.model, mix)


def _train(cfg: Config, digits: "data.Dataset", mix: "Mix | None") -> Any:
    """Returns the parameters after the steps, by one program."""
    import jax
    import optax

    model = _model(cfg, mix)
    every = jax.tree.map(
        jax.numpy.asarray, digits.train.gather(np.arange(len(digits.train)))
    )
    tx = optax.adamw(optax.cosine_decay_schedule(cfg.lr, cfg.steps))
    key = jax.random.key(cfg.seed)

    def loss(params: Any, batch: Any) -> "jax.Array":
        logits, _ = model.apply(params, {}, batch["x"], train=True)
        return metrics.label_totals(logits, batch).means()["loss"]

    def step(carry: Any, number: "jax.Array") -> Any:
        params, state = carry
        own = core.derive(key, "batch", number)
        chosen = jax.random.randint(own, (cfg.batch_size,), 0, len(digits.train))
        batch = jax.tree.map(lambda rows: rows[chosen], every)
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train() -> Any:
        params, _ = model.init(core.derive(key, "init"))
        start = params, tx.init(params)
        return jax.lax.scan(step, start, jax.numpy.arange(cfg.steps))[0][0]

    return train()


def _evaluate(
    cfg: Config, digits: "data.Dataset", mix: "Mix | None", params: Any
) -> float:
    """Returns the accuracy in percent."""
    import jax

    model = _model(cfg, mix)
    apply: Callable[..., Any] = jax.jit(
        lambda params, x: model.apply(params, {}, x, train=False)[0]
    )
    count = min(cfg.limit or len(digits.validation), len(digits.validation))
    batch = digits.validation.gather(np.arange(count))
    right = np.asarray(apply(params, batch["x"])).argmax(-1) == batch["y"]
    return 100 * float(right.mean())
