"""What a training step costs with each optimizer, and what one preconditioner costs.

A second-order step is measured twice, with preconditioners updated at every step and
never; at interval k it costs stale + (fresh − stale)/k. The row of k = 1 is the first.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hpcjax.models.config import ResNetConfig
from hpcjax.optim.config import AdamWConfig, JorgeConfig, SgdConfig, ShampooConfig
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

NEVER = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, a batch and what is measured.

    Attributes:
      model: the network.
      inputs: height, width and channels of the images, which are random.
      classes: number of classes.
      batch_size: images in a step.
      compute: dtype of the model's products.
      update_every: k, steps between updates of preconditioners.
      factor: side of the single preconditioner.
      methods: second-order methods that are timed, among `optimizers`.
      repetitions: rounds of the measurement.
      seed: of parameters and images.
    """

    model: ResNetConfig = ResNetConfig(depth=20)
    inputs: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    batch_size: int = 128
    compute: Literal["float32", "bfloat16"] = "float32"
    update_every: int = 50
    factor: int = 1024
    methods: tuple[str, ...] = ("jorge", "shampoo-eigh", "shampoo-newton")
    repetitions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


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


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Times steps and single preconditioners, interleaved, in this process.

    Returns:
      `step` [row, repetition] and `factor` [method, repetition], seconds.
    """
    import xarray as xr

    from hpcjax import perf

    measured = perf.compare(_steps(cfg, ctx), "sgd", repetitions=cfg.repetitions)
    seconds = measured["seconds"]
    rows = {name: seconds.sel(candidate=name, drop=True) for name in ("sgd", "adamw")}
    for name in cfg.methods:
        fresh = seconds.sel(candidate=f"{name} fresh", drop=True)
        stale = seconds.sel(candidate=f"{name} stale", drop=True)
        rows[name] = stale + (fresh - stale) / cfg.update_every
        rows[f"{name}, k = 1"] = fresh
    factors = perf.compare(_factors(cfg), "eigh", repetitions=cfg.repetitions)
    step = xr.concat(list(rows.values()), dim="row").assign_coords(row=list(rows))
    factor = factors["seconds"].rename(candidate="method")
    return xr.Dataset({"step": step, "factor": factor})


def _steps(cfg: Config, ctx: "Context") -> dict[str, Callable[[], Any]]:
    """Returns a thunk per optimizer that takes one compiled training step."""
    from hpcjax import core, data, train

    dataset = data.noise_images(cfg.batch_size, cfg.inputs, cfg.classes, seed=cfg.seed)
    policy = core.Policy(compute=cfg.compute)
    model = cfg.model.make(cfg.inputs, cfg.classes, policy)
    thunks = {}
    for name, optimizer in optimizers(cfg.methods).items():
        task = train.supervised(model, optimizer.make(cfg.repetitions), dataset)
        thunks[name] = train.step_thunk(
            task, cfg.batch_size, devices=ctx.mesh.size, seed=cfg.seed
        )
    return thunks


def _factors(cfg: Config) -> dict[str, Callable[[], Any]]:
    """Returns thunks that update one factor of side `cfg.factor`, by three methods."""
    import functools

    import jax
    import jax.numpy as jnp

    from hpcjax import optim

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
