"""Digits read pixel by pixel by a sparse Transformer, in floats and in few bits."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import core, data, metrics, runs
from hpcjax.core import config
from hpcjax.models import (
    CausalLmConfig,
    SparseAttentionConfig,
    TransformerOptions,
)

if TYPE_CHECKING:
    import jax

PUBLISHED = "4-4, published scales"
MODES = ("dense", "float", "16-8", "8-8", "8-4", "4-4", PUBLISHED)
# Networks whose attention gives nothing, and no network at all.
TRIVIAL = NO_ATTENTION, LOGISTIC = "no attention", "logistic regression"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network that is trained in floats and evaluated in all precisions.

    Attributes:
      model: width, heads and depth of the blocks.
      sparse: the pattern of its attention, without bits.
      steps: of AdamW.
      batch_size: digits of a step.
      lr: learning rate, which falls to zero by a cosine.
      limit: at most this many digits are evaluated; None for all.
      seed: of parameters and batches.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "steps": "2",
        "batch_size": "4",
        "model.width": "16",
        "model.depth": "1",
        "limit": "4",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "accuracy": "mode: in percent on held-out digits",
    }

    model: CausalLmConfig = CausalLmConfig(
        width=64, heads=2, depth=2, options=TransformerOptions(init_scale=0.125)
    )
    sparse: SparseAttentionConfig = SparseAttentionConfig()
    steps: config.Size = 400
    batch_size: config.Size = 64
    lr: config.Positive = 3e-3
    limit: config.Size | None = None
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"mode": [*MODES, *TRIVIAL]}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Trains a dense and a sparse network, and evaluates the latter in few bits.

    Beside them a network without attention, and a logistic regression of the pixels.
    """
    del ctx
    digits = data.DigitsConfig().load()
    networks = {mode: _network(cfg, mode) for mode in MODES}
    networks[NO_ATTENTION] = drop_attention(networks["dense"])
    trained = {
        mode: _train(cfg, digits, networks[mode])
        for mode in ("dense", "float", NO_ATTENTION)
    }
    found = {
        mode: _evaluate(cfg, digits, each, trained.get(mode, trained["float"]))
        for mode, each in networks.items()
    }
    found[LOGISTIC] = _regress(cfg, digits)
    return runs.measured(
        {"accuracy": ("mode", list(found.values()))}, coords={"mode": list(found)}
    )


def drop_attention(model: "core.Model") -> "core.Model":
    """Returns the network whose attention adds nothing, and has no gradient."""

    def apply(params: Any, *args: Any, **options: Any) -> Any:
        leaves = {
            path: 0 * leaf if "attention/output" in path else leaf
            for path, leaf in core.trees.flatten(params).items()
        }
        return model.apply(core.trees.unflatten(params, leaves), *args, **options)

    return model._replace(apply=apply)


def _network(cfg: Config, mode: str) -> "core.Model":
    """Returns the network with the attention of a mode."""
    from experiments.magicube.network import pixels

    bits, _, published = mode.partition(", ")
    scales = "published" if published else "calibrated"
    chosen: dict[str, Any] = {"bits": bits, "scales": scales}
    sparse = None if mode == "dense" else dataclasses.replace(cfg.sparse, **chosen)
    options = dataclasses.replace(cfg.model.options, sparse=sparse)
    return pixels(dataclasses.replace(cfg.model, options=options))


def _train(cfg: Config, digits: "data.Dataset", model: "core.Model") -> Any:
    """Returns the parameters after the steps, by one program."""
    import jax
    import optax

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
    cfg: Config, digits: "data.Dataset", model: "core.Model", params: Any
) -> float:
    """Returns the accuracy in percent."""
    import jax

    apply: Callable[..., Any] = jax.jit(
        lambda params, x: model.apply(params, {}, x, train=False)[0]
    )
    batch = _held_out(cfg, digits)
    right = np.asarray(apply(params, batch["x"])).argmax(-1) == batch["y"]
    return 100 * float(right.mean())


def _regress(cfg: Config, digits: "data.Dataset") -> float:
    """Returns the accuracy of a logistic regression in percent."""
    from sklearn.linear_model import LogisticRegression

    every = digits.train.gather(np.arange(len(digits.train)))
    held_out = _held_out(cfg, digits)
    found = LogisticRegression(max_iter=1000)
    found.fit(every["x"].reshape(len(every["x"]), -1), every["y"])
    flat = held_out["x"].reshape(len(held_out["x"]), -1)
    return 100 * float(found.score(flat, held_out["y"]))


def _held_out(cfg: Config, digits: "data.Dataset") -> Any:
    count = min(cfg.limit or len(digits.validation), len(digits.validation))
    return digits.validation.gather(np.arange(count))
