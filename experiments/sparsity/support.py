"""Which weights sparse training finds, of a teacher whose weights are known."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import core, runs
from hpcjax.core import config
from hpcjax.optim import sparsify

Grow = Literal["nothing", "random", "gradient", "smallest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A linear student that is as sparse as its linear teacher.

    Attributes:
      grow: which weights become active: "nothing" leaves the first masks, "random" is
        SET, "gradient" RigL; "smallest" those of the smallest gradients.
      density: share of the teacher's weights that are not zero, and of the student's.
      inputs: numbers, drawn from a normal distribution for every example.
      outputs: numbers, each with noise.
      noise: its standard deviation.
      batch_size: examples in a step.
      steps: of SGD without momentum.
      every: steps between changes of the masks.
      lr: learning rate.
      seed: of teacher, student and examples.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "inputs": "20",
        "outputs": "4",
        "steps": "20",
        "every": "5",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "found": ": share of the active weights that are the teacher's",
        "error": ": norm of the difference over that of the teacher's weights",
    }

    grow: Grow = "gradient"
    density: config.Share = 0.1
    inputs: config.Several = 200
    outputs: config.Size = 10
    noise: config.NotNegative = 0.05
    batch_size: config.Size = 64
    steps: config.Size = 3000
    every: config.Size = 50
    lr: config.Float32 = 0.1
    seed: config.Seed = 0

    def typical(self) -> Mapping[str, Any]:
        """Returns what the table wants more of than that it is positive."""
        return {"found": 0.5}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Trains the student; nothing is timed."""
    del ctx
    teacher = draw_teacher(cfg)
    weights, mask = _learn(cfg, teacher)
    apart = np.linalg.norm(weights - teacher) / np.linalg.norm(teacher)
    return runs.measured({"found": (teacher[mask] != 0).mean(), "error": apart})


def draw_teacher(cfg: Config) -> np.ndarray:
    """Returns weights of random signs, 0.5 to 1.5 in magnitude, most of them zero."""
    rng = np.random.default_rng(cfg.seed)
    shape = cfg.inputs, cfg.outputs
    weights = rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)
    kept = rng.permutation(weights.size) < round(cfg.density * weights.size)
    return np.where(kept.reshape(shape), weights, 0).astype(np.float32)


def _learn(cfg: Config, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the student's weights, and which of them are active."""
    import jax
    import jax.numpy as jnp
    import optax

    tx, key = _make_transform(cfg), jax.random.key(cfg.seed)

    def step(carry: Any, number: Any) -> tuple[Any, None]:
        params, state = carry
        rows = core.derive(key, "inputs", number), (cfg.batch_size, cfg.inputs)
        noise = core.derive(key, "noise", number), (cfg.batch_size, cfg.outputs)
        inputs = jax.random.normal(*rows)
        targets = inputs @ teacher + cfg.noise * jax.random.normal(*noise)

        def loss(params: Any) -> Any:
            return jnp.mean(jnp.square(inputs @ params["kernel"] - targets))

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def learn(params: Any) -> Any:
        start = params, tx.init(params)
        return jax.lax.scan(step, start, jnp.arange(cfg.steps))[0]

    drawn = jax.random.normal(core.derive(key, "student"), teacher.shape)
    params, state = learn({"kernel": drawn / np.sqrt(cfg.inputs)})
    masks = sparsify.get_masks(state, params)
    return np.asarray(params["kernel"]), np.asarray(masks["kernel"])


def _make_transform(cfg: Config) -> Any:
    import jax
    import optax

    def smallest(params: Any, grads: Any, state: Any, key: Any) -> Any:
        del params, state, key
        return jax.tree.map(lambda g: -abs(g), grads)

    named: dict[str, Any] = {"nothing": None, "smallest": smallest}
    return sparsify.dynamic(
        optax.sgd(cfg.lr),
        grow=named.get(cfg.grow, cfg.grow),
        regrow=cfg.grow != "random",
        distribution=sparsify.Uniform(sparsity=1 - cfg.density),
        steps=cfg.steps,
        every=cfg.every,
        seed=cfg.seed,
    )
