"""Networks pruned at once, by curvature or magnitude, and tickets that start again."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import core, data, metrics, runs
from hpcjax.core import config
from hpcjax.data import DigitsConfig
from hpcjax.models import MlpConfig, ResNetConfig
from hpcjax.optim import CosineConfig, SgdConfig, sparsify

VARIANTS = (
    *("dense", "magnitude", "woodfisher", "woodfisher, damped"),
    *("untrained", "rewound", "drawn again"),
)
FIGURES = ("loss", "val_loss", "accuracy", "kept")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A dense training, what is pruned of its result, and trainings of tickets.

    Attributes:
      dataset: images.
      model: the network.
      optimizer: of every training.
      exclude: regexes of parameters that are not pruned; those of one axis never are.
      sparsity: of each layer, pruned at once and not trained again.
      examples: whose gradients make the Fisher matrix.
      block: side of its blocks.
      damping: added to its diagonal, and
      more_damping: likewise, for a second try.
      ticket: sparsity of each layer of the ticket.
      rounds: in which it is found, each of which removes the same share.
      steps: of a training.
      batch_size: images of a step.
      seed: of parameters and data.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "steps": "2",
        "rounds": "1",
        "batch_size": "4",
        "examples": "4",
        "block": "8",
        "model": "mlp",
        "model.widths": "[4]",
        "exclude": "[]",
        "dataset.limit": "16",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "loss": "variant: of all training images",
        "val_loss accuracy": "variant: of those held out; accuracy in percent",
        "kept": "variant: share of the weights that may be pruned",
    }

    dataset: DigitsConfig = DigitsConfig()
    model: ResNetConfig | MlpConfig = ResNetConfig(depth=8, width=8)
    optimizer: SgdConfig = SgdConfig(lr=0.1, momentum=0.9, schedule=CosineConfig())
    exclude: config.Patterns = ("conv_in/", "head/")
    sparsity: config.Share = 0.8
    examples: config.Size = 1000
    block: config.Size = 64
    damping: config.Positive = 1e-5
    more_damping: config.Positive = 1e-3
    ticket: config.Share = 0.9
    rounds: config.Size = 4
    steps: config.Size = 300
    batch_size: config.Size = 128
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"variant": VARIANTS}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains the dense network and the tickets; all start from the same weights.

    The variants are "dense"; "magnitude" and "woodfisher", of which as many weights of
    each layer are kept, the largest or those whose removal costs most by the Fisher
    matrix, the rest adapted, and which are not trained again; "woodfisher, damped" with
    more damping; "untrained", the ticket with its initial weights; "rewound", the same
    trained; and "drawn again", its masks on other initial weights, trained.
    """
    lab = _Lab(cfg, cfg.dataset.load(ctx.data_root))
    found = dict(lab.compare())
    return runs.measured(
        {
            name: ("variant", [found[variant][name] for variant in VARIANTS])
            for name in FIGURES
        },
        coords={"variant": list(VARIANTS)},
    )


class _Lab:
    """What is done to one network, `{"params", "state"}` with its running means."""

    def __init__(self, cfg: Config, dataset: "data.Dataset") -> None:
        import jax

        self.cfg = cfg
        self.model = cfg.model.make(dataset.inputs, dataset.outputs, core.Policy())
        self.tx = cfg.optimizer.make(cfg.steps)
        self.images, self.held = (
            dict(source.gather(np.arange(len(source))))
            for source in (dataset.train, dataset.validation)
        )
        self.step = jax.jit(self._step)
        self.judge = jax.jit(self._judge)

    def compare(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields the figures of each variant."""
        cfg = self.cfg
        share = 1 - (1 - cfg.ticket) ** (1 / cfg.rounds)
        tickets = sparsify.lottery(
            self.train,
            self.start(cfg.seed),
            rounds=cfg.rounds,
            share=round(share, 6),
            exclude=cfg.exclude,
        )
        dense, ticket = tickets[0], tickets[-1]
        yield "dense", self.figures(dense.trained, dense.masks)
        yield from self.prune(dense.trained, dense.masks)
        yield "untrained", self.figures(ticket.params, ticket.masks)
        yield "rewound", self.figures(ticket.trained, ticket.masks)
        # No reported seed begins with these weights.
        other = core.masks.apply(self.start(2**31 + cfg.seed), ticket.masks)
        again = self.train(other, ticket.masks, 0, None)
        yield "drawn again", self.figures(again, ticket.masks)

    def start(self, seed: int) -> Any:
        """Returns the network before training."""
        import jax

        params, state = self.model.init(jax.random.key(seed))
        return {"params": params, "state": state}

    def train(self, network: Any, kept: Any, start: int, stop: int | None) -> Any:
        """Takes the steps from one on; what is pruned stays zero."""
        cfg, moments = self.cfg, self.tx.init(network["params"])
        for number in range(start, cfg.steps if stop is None else stop):
            rows = np.random.default_rng([cfg.seed, number]).integers(
                0, len(self.images["y"]), cfg.batch_size
            )
            batch = {name: leaf[rows] for name, leaf in self.images.items()}
            network, moments = self.step(network, moments, kept, batch)
        return network

    def prune(self, network: Any, kept: Any) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields the figures of a network pruned at once, where `kept` has masks."""
        import jax
        import jax.numpy as jnp

        cfg, whole = self.cfg, core.trees.flatten(network)
        pruned = {path: whole[path] for path in core.trees.flatten(kept)}
        rng = np.random.default_rng([cfg.seed, 1])
        rows = rng.permutation(len(self.images["y"]))[: cfg.examples]
        each = {name: leaf[rows][:, None] for name, leaf in self.images.items()}

        def fill(leaves: Any) -> Any:
            return core.trees.unflatten(network, whole | leaves)

        def loss(leaves: Any, batch: Any) -> Any:
            full = fill(leaves)
            return self._loss(full["params"], full["state"], batch, train=False)[0]

        grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(pruned, each)
        choose = functools.partial(
            sparsify.one_shot,
            pruned,
            distribution=sparsify.Uniform(sparsity=cfg.sparsity),
        )
        largest = choose(jax.tree.map(jnp.abs, pruned))
        left = core.masks.apply(pruned, largest)
        yield "magnitude", self.figures(fill(left), largest)
        for name, damping in (
            ("woodfisher", cfg.damping),
            ("woodfisher, damped", cfg.more_damping),
        ):
            fisher = sparsify.woodfisher(pruned, grads, cfg.block, damping)
            costly = choose(fisher.scores)
            yield name, self.figures(fill(fisher.remove(costly)), costly)

    def figures(self, network: Any, kept: Any) -> dict[str, float]:
        """Returns what a network is worth."""
        loss, _ = self.judge(network, self.images)
        val_loss, accuracy = self.judge(network, self.held)
        layers = sparsify.density_report(network, kept).layers.values()
        left, size = (sum(counts) for counts in zip(*layers, strict=True))
        return {
            "loss": float(loss),
            "val_loss": float(val_loss),
            "accuracy": 100 * float(accuracy),
            "kept": left / size,
        }

    def _loss(self, params: Any, state: Any, batch: Any, *, train: bool) -> Any:
        outputs, state = self.model.apply(params, state, batch["x"], train=train)
        return metrics.cross_entropy(outputs, batch["y"]), state

    def _step(self, network: Any, moments: Any, kept: Any, batch: Any) -> Any:
        import jax
        import optax

        params, own = network["params"], kept["params"]
        differentiate = jax.grad(self._loss, has_aux=True)
        grads, state = differentiate(params, network["state"], batch, train=True)
        grads = core.masks.apply(grads, own)
        updates, moments = self.tx.update(grads, moments, params)
        params = optax.apply_updates(params, core.masks.apply(updates, own))
        return {"params": params, "state": state}, moments

    def _judge(self, network: Any, batch: Any) -> Any:
        outputs, _ = self.model.apply(
            network["params"], network["state"], batch["x"], train=False
        )
        loss = metrics.cross_entropy(outputs, batch["y"])
        return loss, metrics.accuracy(outputs, batch["y"])
