"""Accuracy on digits of a network whose layers share their weights, or are narrow."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import core, data, metrics, perf, runs
from hpcjax.compress import SharingConfig
from hpcjax.core import checks, config
from hpcjax.models import ResNetConfig
from hpcjax.optim import CosineConfig, SgdConfig

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network, its sharing, and how it is trained.

    Attributes:
      model: the network.
      sharing: of its kernels; None for kernels of its own.
      learned: into how many groups layers are put by what a short training finds, in
        place of those of `sharing`; 0 for these.
      frozen: whether stores stay as they are drawn, the negative control.
      optimizer: of the training.
      steps: of the training; a tenth as many before it find groups.
      batch_size: digits of a step.
      seed: of parameters and batches.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "steps": "2",
        "batch_size": "4",
        "model.width": "12",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "accuracy": ": in percent on held-out digits",
        "weights others": ": of kernels, or the numbers that make them; all others",
        "mflop": ": of a digit's forward pass, made weights included",
        "groups": ": with a store of their own",
    }

    model: ResNetConfig = ResNetConfig(depth=8, width=16)
    sharing: SharingConfig | None = None
    learned: config.Count = 0
    frozen: bool = False
    optimizer: SgdConfig = SgdConfig(
        lr=0.1, momentum=0.9, nesterov=True, schedule=CosineConfig()
    )
    steps: config.Size = 200
    batch_size: config.Size = 64
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharing is not None and self.sharing.groups == "given":
            rule = "groups are either given or learned"
            checks.require(not self.learned, rule, learned=self.learned)
        rule = "learned groups and frozen stores are of shared kernels"
        good = self.sharing is not None or not (self.learned or self.frozen)
        checks.require(good, rule, learned=self.learned, frozen=self.frozen)


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Trains, and says how much of the network there is."""
    del ctx

    digits = data.DigitsConfig().load()
    plain = cfg.model.make(digits.inputs, digits.outputs)
    shared = cfg.sharing
    if shared is not None and cfg.learned:
        labels = learn_groups(cfg, shared, plain, digits)
        shared = dataclasses.replace(shared, groups="given", labels=labels)
    model = plain if shared is None else shared.apply_to(plain, cfg.seed)
    if cfg.frozen:
        model = freeze_stores(model)
    params, state = train(cfg, model, digits, cfg.steps)
    every = core.trees.num_params(params)
    weights = count_weights(params)
    return runs.measured(
        {
            "accuracy": _score(model, params, state, digits),
            "weights": weights,
            "others": every - weights,
            "mflop": _count_operations(model, params, state, digits),
            "groups": len(stores_of(params)),
        }
    )


def train(
    cfg: Config, model: "core.Model", digits: "data.Dataset", steps: int
) -> tuple[Any, Any]:
    """Returns parameters and statistics after some steps."""
    import jax
    import optax

    tx, key = cfg.optimizer.make(steps), jax.random.key(cfg.seed)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        logits, state = model.apply(params, state, batch["x"], train=True)
        return metrics.label_totals(logits, batch).means()["loss"], state

    @jax.jit
    def step(params: Any, state: Any, inner: Any, batch: Any) -> Any:
        grads, state = jax.grad(loss, has_aux=True)(params, state, batch)
        updates, inner = tx.update(grads, inner, params)
        return optax.apply_updates(params, updates), state, inner

    params, state = jax.jit(model.init)(core.derive(key, "init"))
    inner = tx.init(params)
    rng = np.random.default_rng([cfg.seed, steps])
    for _ in range(steps):
        rows = rng.integers(0, len(digits.train), cfg.batch_size)
        batch = digits.train.gather(rows)
        params, state, inner = step(params, state, inner, batch)
    return params, state


def learn_groups(
    cfg: Config, shared: SharingConfig, model: "core.Model", digits: "data.Dataset"
) -> tuple[int, ...]:
    """Returns the group of each layer, by the templates that it comes to combine."""
    import jax

    from hpcjax.compress import sharing

    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    layers = sharing.list_layers(shapes, shared.include, shared.stacked)
    budget = round(shared.budget * sum(layer.size for layer in layers))
    plan = sharing.plan_candidates(layers, budget)
    steps = max(1, cfg.steps // 10)
    params, _ = train(cfg, sharing.share(model, plan), digits, steps)
    return sharing.cluster_layers(
        sharing.find_features(params, plan), cfg.learned, cfg.seed
    )


def stores_of(params: Any) -> dict[str, Any]:
    """Returns the parameters of stores, by path."""
    leaves = core.trees.flatten(params)
    return {path: leaf for path, leaf in leaves.items() if "/stores/" in path}


def count_weights(params: Any) -> int:
    """Returns how many numbers kernels are made of."""
    leaves = core.trees.flatten(params)
    own = {
        path: leaf
        for path, leaf in leaves.items()
        if path.endswith("kernel") and not path.startswith("shared/")
    }
    return core.trees.num_params((own, stores_of(params)))


def freeze_stores(model: "core.Model") -> "core.Model":
    """Returns the network with stores that have no gradient."""
    import jax

    def apply(params: Any, *args: Any, **options: Any) -> Any:
        leaves = core.trees.flatten(params)
        frozen = {
            path: jax.lax.stop_gradient(x) for path, x in stores_of(params).items()
        }
        return model.apply(
            core.trees.unflatten(params, leaves | frozen), *args, **options
        )

    return model._replace(apply=apply)


def _score(
    model: "core.Model", params: Any, state: Any, digits: "data.Dataset"
) -> float:
    import jax

    batch = digits.validation.gather(np.arange(len(digits.validation)))
    apply = jax.jit(lambda x: model.apply(params, state, x, train=False)[0])
    right = np.asarray(apply(batch["x"])).argmax(-1) == batch["y"]
    return 100 * float(right.mean())


def _count_operations(
    model: "core.Model", params: Any, state: Any, digits: "data.Dataset"
) -> float:
    import jax

    x = jax.ShapeDtypeStruct((1, *digits.inputs), "float32")

    def forward(params: Any, x: "jax.Array") -> Any:
        return model.apply(params, state, x, train=False)[0]

    return perf.flops(jax.jit(forward).lower(params, x).compile()) / 1e6
