"""What a training step costs with each optimizer, and what one preconditioner costs.

A second-order step is measured twice, with preconditioners updated at every step and
never; at interval k it costs stale + (fresh − stale)/k. The row of k = 1 is the first.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpcjax import optim, perf, runs
from hpcjax.optim import AdamWConfig, JorgeConfig, SgdConfig, ShampooConfig
from hpcjax.runs.measured_step import StepConfig

NEVER = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(StepConfig):
    """A model, a batch and what is measured.

    Attributes:
      update_every: k, steps between updates of preconditioners.
      factor: side of the single preconditioner.
      methods: second-order methods that are timed, among `optimizers`.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **StepConfig.smoke,
        "classes": "10",
        "compute": "bfloat16",
        "factor": "8",
        "methods": "[jorge]",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "step": "row repetition: seconds",
        "factor": "method repetition: seconds of a preconditioner",
    }

    update_every: int = 50
    factor: int = 1024
    methods: tuple[str, ...] = ("jorge", "shampoo-eigh", "shampoo-newton")

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        fresh = (row for name in self.methods for row in (name, f"{name}, k = 1"))
        return {
            "row": ("sgd", "adamw", *fresh),
            "method": ("jorge", "eigh", "newton"),
            "repetition": range(self.repetitions),
        }


def optimizers(methods: tuple[str, ...]) -> dict[str, Any]:
    """Returns the configs that are timed; of second-order ones a fresh and a stale."""
    known = {
        "sgd": SgdConfig(lr=0.1),
        "adamw": AdamWConfig(lr=1e-3),
        "jorge fresh": JorgeConfig(lr=0.1, update_every=1),
        "jorge stale": JorgeConfig(lr=0.1, update_every=NEVER),
        "shampoo-eigh fresh": ShampooConfig(lr=0.1, roots_every=1),
        "shampoo-eigh stale": ShampooConfig(lr=0.1, roots_every=NEVER),
        "shampoo-newton fresh": ShampooConfig(lr=0.1, root="newton", roots_every=1),
        "shampoo-newton stale": ShampooConfig(lr=0.1, root="newton", roots_every=NEVER),
    }
    first_order = ("sgd", "adamw")
    return {
        name: config
        for name, config in known.items()
        if name.split()[0] in (*first_order, *methods)
    }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times steps and single preconditioners, interleaved, in this process."""
    steps = {
        name: cfg.step(optimizer, ctx.mesh.size)
        for name, optimizer in optimizers(cfg.methods).items()
    }
    seconds = perf.compare(steps, "sgd", repetitions=cfg.repetitions)["seconds"]
    rows = {name: seconds.sel(candidate=name, drop=True) for name in ("sgd", "adamw")}
    for name in cfg.methods:
        fresh = seconds.sel(candidate=f"{name} fresh", drop=True)
        stale = seconds.sel(candidate=f"{name} stale", drop=True)
        rows[name] = stale + (fresh - stale) / cfg.update_every
        rows[f"{name}, k = 1"] = fresh
    factors = perf.compare(_factors(cfg), "eigh", repetitions=cfg.repetitions)
    step = runs.Dataset(rows).to_array("row")
    factor = factors["seconds"].rename(candidate="method")
    return runs.measured({"step": step, "factor": factor})


def _factors(cfg: Config) -> dict[str, Callable[[], Any]]:
    """Returns thunks that update one factor of side `cfg.factor`, by three methods."""
    import functools

    import jax
    import jax.numpy as jnp

    gradient = jax.random.normal(jax.random.key(cfg.seed), (cfg.factor, cfg.factor))
    moment = jnp.matmul(gradient, gradient.T, precision="highest") / cfg.factor
    options = optim.JorgeOptions(init="grad")
    start = optim.jorge_factor_init(cfg.factor, options)
    state = optim.jorge_factor_start(start, gradient)
    jorge = jax.jit(functools.partial(optim.jorge_factor_update, options=options))
    eigh = jax.jit(functools.partial(optim.inverse_root_eigh, power=4))
    newton = jax.jit(functools.partial(optim.inverse_root_newton, power=4))
    return {
        "jorge": lambda: jorge(state, gradient),
        "eigh": lambda: eigh(moment),
        "newton": lambda: newton(moment),
    }
