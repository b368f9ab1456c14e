"""How far replicas drift apart on noisy quadratics, one per worker."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from hpcjax import averaging, cost, hostcomm, runs
from hpcjax.core import config
from hpcjax.hostcomm.groups import require_sizes
from hpcjax.hostcomm.imbalance import Pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """f_i = |x - a_i|^2 / 2 with noisy gradients, averaged in groups.

    Attributes:
      workers: P, each with its own a_i from a normal distribution.
      group_size: S.
      tau: steps from one mean of all to the next; 0: there is none.
      groups: whether they change.
      wait_avoiding: whether a late worker is not waited for.
      dims: of x.
      noise: standard deviation in each component of a gradient.
      lr: learning rate.
      steps: of a run.
      base: seconds of everybody's step, of which 10 % vary; simulated.
      pattern: who is delayed; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      seed: of goals, noise and delays.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "workers": "4",
        "group_size": "2",
        "steps": "12",
        "dims": "2",
        "tau": "3",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "variance": "step: over workers, mean over dimensions, at its begin",
        "error": "step: mean squared distance of the workers' mean from the goals'",
        "partial": ": mean variance after the last partial rounds",
        "late": ": share of models that were",
        "staleness": ": the largest",
        "total": ": seconds, simulated",
    }

    workers: int = 8
    group_size: int = 4
    tau: config.Count = 10
    groups: Literal["butterfly", "fixed"] = "butterfly"
    wait_avoiding: bool = False
    dims: config.Size = 50
    noise: config.NotNegative = 1.0
    lr: config.Positive = 0.1
    steps: config.Size = 400
    base: config.Positive = 0.02
    pattern: Pattern = "random_one"
    delay: config.NotNegative = 0.2
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self.group_size, workers=self.workers)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"step": self.steps}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Replays what the event model foretells, with every worker on one device."""
    models, goals, trace, total = _train(cfg)
    variance = models.var(0).mean(-1)
    error = ((models.mean(0) - goals.mean(0)) ** 2).mean(-1)
    return runs.simulated(
        {
            "variance": ("step", variance),
            "error": ("step", error),
            "partial": _after_partial(variance, cfg.tau),
            "late": trace.late().mean(),
            "staleness": int(trace.staleness().max()),
            "total": total,
        },
    )


def _after_partial(variance: np.ndarray, tau: int) -> float:
    """Right after a mean of all there is none by construction."""
    last = np.arange(len(variance) - (tau or 10), len(variance))
    kept = last[last % tau != 0] if tau else last
    return float(variance[kept[kept >= 0]].mean())


def _train(cfg: Config) -> tuple[np.ndarray, np.ndarray, "hostcomm.GroupTrace", float]:
    """Returns models [worker, step, dims], goals, the trace and its seconds."""
    import jax
    import jax.numpy as jnp
    import optax

    from hpcjax.core import keys

    rng = np.random.Generator(np.random.Philox(key=[cfg.seed, 2]))
    shape = cfg.steps, cfg.workers
    compute = cfg.base * rng.lognormal(0.0, 0.1, shape) + hostcomm.inject_delays(
        cfg.pattern, *shape, delay=cfg.delay, seed=cfg.seed
    )
    times = cost.simulate_groups(
        compute,
        group_size=cfg.group_size,
        tau=cfg.tau or None,
        wait_avoiding=cfg.wait_avoiding,
        groups=cfg.groups,
    )
    goals = jnp.asarray(rng.standard_normal((cfg.workers, cfg.dims)), jnp.float32)
    key = jax.random.key(cfg.seed)

    def worker(goal):
        own = keys.derive(key, "noise", jax.lax.axis_index("data"))

        def gradient(params, step):
            drawn = jax.random.normal(jax.random.fold_in(own, step), params.shape)
            return params, params - goal + cfg.noise * drawn

        return averaging.replay(
            times.trace(),
            jnp.zeros(cfg.dims),
            optax.sgd(cfg.lr),
            gradient,
            axis_name="data",
        )[1]

    models = jax.jit(jax.vmap(worker, axis_name="data"))(goals)
    return np.asarray(models), np.asarray(goals), times.trace(), float(times.total())
