"""What share of a device's peak a language model's training step reaches."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from hpcjax import core, data, layers, models, perf, runs, train
from hpcjax.core import config
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig

Implementation = Literal["xla", "cudnn", "reference"]
# Of a step's time, what the profile's rows have to cover together.
COVERED = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, a batch, and what its step is measured against.

    Attributes:
      model: the network; GPT-2 medium.
      context: tokens of a sequence.
      vocabulary: of the model.
      batch: sequences in a step, random tokens.
      compute: dtype of products; parameters and AdamW's state are float32.
      side: of the square matrices whose product is the peak.
      attention: `[batch, time, heads, head_dim]` of the attention that is timed alone,
        forward and backward, once for each of `implementations`.
      implementations: see `layers.attention`.
      repetitions: rounds of the measurement.
      seed: of all numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "2",
        "model.width": "16",
        "model.heads": "2",
        "context": "8",
        "vocabulary": "31",
        "batch": "2",
        "compute": "float32",
        "side": "16",
        "attention": "[1,8,2,8]",
        "implementations": "[xla]",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a step, a short one, a product, attention",
        "share": "operation: of a profiled step's time, until 90 % are covered",
        "tokens": ": of a step",
        "flops short_flops": ": of a step and a short one, by formula",
        "peak": ": operations of the product",
    }

    model: CausalLmConfig = CausalLmConfig(depth=24, width=1024, heads=16)
    context: config.Size = 1024
    vocabulary: config.Size = 50257
    batch: config.Size = 16
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    side: config.Size = 8192
    attention: tuple[config.Size, config.Size, config.Size, config.Size] = (
        4,
        4096,
        16,
        64,
    )
    implementations: tuple[Implementation, ...] = ("xla", "cudnn")
    repetitions: config.Several = 20
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        attentions = (f"attention, {name}" for name in self.implementations)
        return {
            "candidate": ("step", "short step", "product", *attentions),
            "repetition": range(self.repetitions),
            "operation": 2,  # as many as cover enough of the profile
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times a training step, a product of matrices and attention, in turns."""
    step = training_step(cfg, ctx.mesh.size)
    few = dataclasses.replace(cfg, batch=1, context=max(1, cfg.context // 8))
    thunks = {
        "step": step,
        "short step": training_step(few, ctx.mesh.size),
        "product": product(cfg),
    }
    for name in cfg.implementations:
        thunks[f"attention, {name}"] = attention(cfg, name)
    measured = perf.compare(thunks, "product", repetitions=cfg.repetitions)
    shares = covering(perf.seconds_by_operation(step))
    return runs.measured(
        {
            "seconds": measured["seconds"],
            "share": ("operation", list(shares.values())),
            "tokens": cfg.batch * cfg.context,
            "flops": operations(cfg),
            "short_flops": operations(few),
            "peak": 2.0 * cfg.side**3,
        },
        coords={"operation": list(shares)},
    )


def training_step(cfg: Config, devices: int) -> Callable[[], Any]:
    """Returns a thunk of one step of AdamW."""
    dataset = data.noise_tokens(cfg.batch, cfg.context, cfg.vocabulary, seed=cfg.seed)
    policy = core.Policy(compute=cfg.compute)
    model = cfg.model.make(dataset.inputs, dataset.outputs, policy)
    optimizer = AdamWConfig(lr=1e-4).make(cfg.repetitions)
    task = train.supervised(model, optimizer, dataset)
    return train.step_thunk(task, cfg.batch, devices=devices, seed=cfg.seed)


def operations(cfg: Config) -> float:
    """Returns the operations of a step, by formula."""
    token = models.flops_per_token(cfg.model, cfg.context, cfg.vocabulary)
    return float(cfg.batch * cfg.context * token)


def product(cfg: Config) -> Callable[[], Any]:
    """Returns a thunk of one product of square matrices."""
    import jax
    import jax.numpy as jnp

    shape = cfg.side, cfg.side
    matrix = jax.random.normal(jax.random.key(cfg.seed), shape, cfg.compute)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(matrix, matrix)


def attention(cfg: Config, implementation: Implementation) -> Callable[[], Any]:
    """Returns a thunk of causal attention and its gradients."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(cfg.seed), 3)
    heads = [jax.random.normal(key, cfg.attention, cfg.compute) for key in keys]

    def total(*heads: jax.Array) -> jax.Array:
        mixed = layers.attention(*heads, causal=True, implementation=implementation)
        return jnp.sum(mixed.astype(jnp.float32) ** 2)

    both = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return lambda: both(*heads)


def covering(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the largest shares, as many as cover `COVERED` of the whole.

    Examples:
      >>> covering({"a": 6.0, "b": 3.5, "c": 0.5})
      {'a': 0.6, 'b': 0.35}
    """
    whole, seen, found = sum(seconds.values()), 0.0, {}
    for name, own in seconds.items():
        if seen >= COVERED * whole:
            break
        found[name], seen = own / whole, seen + own
    return found
