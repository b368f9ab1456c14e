"""Losses of a language model that is pruned early and then trained in several forms."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import core, data, metrics, runs
from hpcjax.core import config
from hpcjax.core.patterns import matches_any
from hpcjax.core.structures import count_kept
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, CosineConfig, sparse_state, sparsify

FORMS = ("dense", "masked", "samo", "random", "unwritten")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A search for an Early-Bird ticket, and training with it.

    Attributes:
      dataset: the text.
      model: the network.
      optimizer: of all training; begins anew with the ticket.
      sparsity: of the pruned matrices together.
      pruned: regexes of the parameters that are pruned, if they are matrices.
      every: dense steps between two masks of the largest values.
      tolerance: the ticket is drawn once the last five masks differ from each other in
        less than this share of their entries.
      most: masks that are drawn at most; with 1 the first one is the ticket.
      steps: of training with the ticket, in each form.
      batch_size: sequences of a step.
      seed: of parameters and data.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "steps": "2",
        "every": "1",
        "most": "2",
        "batch_size": "2",
        "dataset.context": "8",
        "model.width": "8",
        "model.heads": "2",
        "model.depth": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "loss": "form step: of the batch",
        "val_loss": "form: at the end",
        "drawn": ": masks until they settled",
        "kept": ": share of the values that the ticket keeps",
    }

    dataset: CharTextConfig = CharTextConfig(context=64)
    model: CausalLmConfig = CausalLmConfig(depth=2, width=64, heads=4)
    optimizer: AdamWConfig = AdamWConfig(
        lr=3e-3, clip_norm=1.0, schedule=CosineConfig()
    )
    sparsity: config.Share = 0.9
    pruned: config.Patterns = ("^blocks/",)
    every: config.Size = 40
    tolerance: config.Share = 0.1
    most: config.Size = 1
    steps: config.Size = 360
    batch_size: config.Size = 16
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"form": FORMS, "step": range(1, self.steps + 1)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains until the mask settles, prunes, and goes on in every form.

    The forms are "dense", without pruning; "masked", dense arrays whose gradients and
    values are multiplied by the mask; "samo", compressed; "random", compressed with a
    mask of as many values of each parameter at random places; and "unwritten", whose
    optimizer runs and whose weights are never made anew, a mistake to be seen.
    """
    import jax
    import jax.numpy as jnp

    dataset = cfg.dataset.load(ctx.data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs, core.Policy())
    loop = _Loop(cfg, model, dataset)
    params = model.init(jax.random.key(cfg.seed))[0]
    params, ticket, drawn = find_ticket(cfg, loop, params)
    rng = np.random.default_rng(cfg.seed)
    chance = core.masks.map_masks(
        lambda mask: (
            None
            if mask is None
            else jnp.asarray(rng.permuted(mask.reshape(-1)).reshape(mask.shape))
        ),
        jax.device_get(ticket),
    )
    found = {
        "dense": loop.compressed(params, core.masks.map_masks(lambda _: None, ticket)),
        "masked": loop.masked(params, ticket),
        "samo": loop.compressed(params, ticket),
        "random": loop.compressed(params, chance),
        "unwritten": loop.unwritten(params, ticket),
    }
    pruned = [mask for mask in jax.tree.leaves(ticket) if mask is not None]
    kept = sum(int(m.sum()) for m in pruned) / sum(m.size for m in pruned)
    return runs.measured(
        {
            "loss": (("form", "step"), [found[form][0] for form in FORMS]),
            "val_loss": ("form", [found[form][1] for form in FORMS]),
            "drawn": drawn,
            "kept": kept,
        },
        coords={"form": list(FORMS), "step": np.arange(1, cfg.steps + 1)},
    )


def find_ticket(cfg: Config, loop: "_Loop", params: Any) -> tuple[Any, Any, int]:
    """Trains densely until masks of the largest values settle.

    Returns:
      Parameters, the last mask, and how many were drawn.

    References:
      You et al., Drawing Early-Bird Tickets, ICLR 2020, algorithm 1.
    """
    import jax

    state = loop.start(params, jax.tree.map(lambda _: None, params))
    drawn: list[Any] = []
    while len(drawn) < cfg.most:
        for _ in range(cfg.every):
            state, _ = loop.step(state, loop.batch())
        drawn.append(largest(cfg, sparse_state.to_dense(state)))
        if sparsify.is_early_bird(drawn, tolerance=cfg.tolerance):
            break
    return sparse_state.to_dense(state), drawn[-1], len(drawn)


def largest(cfg: Config, params: Any) -> Any:
    """Returns the mask of the largest values of the pruned matrices together."""
    import jax.numpy as jnp

    def is_pruned(path: str, leaf: Any) -> bool:
        matrix = leaf.ndim - path.startswith("blocks/") > 1
        return matrix and matches_any(cfg.pruned, path)

    scores = {
        path: jnp.abs(leaf) if is_pruned(path, leaf) else None
        for path, leaf in core.trees.flatten(params).items()
    }
    size = sum(score.size for score in scores.values() if score is not None)
    kept = count_kept(size, cfg.sparsity)
    return core.trees.unflatten(
        params, core.masks.keep_largest(scores, kept, at_least=1)
    )


class _Loop:
    """Training steps on the batches of one run, each form from the same place."""

    def __init__(self, cfg: Config, model: Any, dataset: "data.Dataset") -> None:
        import jax

        self.cfg, self.model, self.dataset = cfg, model, dataset
        self.tx = cfg.optimizer.make(cfg.steps)
        self.optimizer = sparse_state.wrap(self.tx)
        self.position = 0
        self.step = jax.jit(self._step, donate_argnums=0)
        self.score = jax.jit(self.objective)

    def batch(self) -> Any:
        """Returns the next batch."""
        rng = np.random.default_rng([self.cfg.seed, self.position])
        self.position += 1
        rows = rng.integers(0, len(self.dataset.train), self.cfg.batch_size)
        return self.dataset.train.gather(rows)

    def objective(self, params: Any, batch: Any) -> Any:
        logits, _ = self.model.apply(params, {}, batch["x"], train=True)
        return metrics.label_totals(logits, batch).means()["loss"]

    def start(self, params: Any, chosen: Any) -> Any:
        made = sparse_state.compress(
            params, chosen, dtype="float32", stacked=self.cfg.model.stacks
        )
        return self.optimizer.init(made)

    def _step(self, state: Any, batch: Any) -> Any:
        differentiate = sparse_state.value_and_grad(self.objective)
        value, grads = differentiate(state.params, batch)
        return self.optimizer.step(state, grads), value

    def compressed(self, params: Any, chosen: Any) -> tuple[list[float], float]:
        """Returns losses and the last validation with compressed state."""
        state = self.start(params, chosen)
        losses, state = self._follow(self.step, state)
        return losses, self._validate(sparse_state.to_dense(state))

    def unwritten(self, params: Any, chosen: Any) -> tuple[list[float], float]:
        """Returns the same where what the optimizer computes reaches no weight."""
        weights = core.masks.apply(params, chosen)

        def step(state: Any, batch: Any) -> Any:
            return state, self.score(weights, batch)

        losses, _ = self._follow(step, None)
        return losses, self._validate(weights)

    def masked(self, params: Any, chosen: Any) -> tuple[list[float], float]:
        """Returns the same of dense arrays that are multiplied by the mask."""
        import jax
        import optax

        def step(state: Any, batch: Any) -> Any:
            params, inner = state
            value, grads = jax.value_and_grad(self.objective)(params, batch)
            grads = core.masks.apply(grads, chosen)
            updates, inner = self.tx.update(grads, inner, params)
            return (optax.apply_updates(params, updates), inner), value

        params = core.masks.apply(params, chosen)
        params = jax.tree.map(jax.numpy.array, params)  # the step donates them
        state = params, self.tx.init(params)
        losses, (params, _) = self._follow(jax.jit(step, donate_argnums=0), state)
        return losses, self._validate(params)

    def _follow(self, step: Callable[..., Any], state: Any) -> tuple[list[float], Any]:
        """Returns the losses of training from the place after the search."""
        begin, losses = self.position, []
        for _ in range(self.cfg.steps):
            state, value = step(state, self.batch())
            losses.append(value)
        self.position = begin
        return [float(value) for value in losses], state

    def _validate(self, params: Any) -> float:
        source, size = self.dataset.validation, 128
        found = [
            float(self.score(params, source.gather(np.arange(at, at + size))))
            for at in range(0, len(source) - size + 1, size)
        ]
        return float(np.mean(found))
