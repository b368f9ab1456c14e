"""Accuracy on digits at equal steps: every worker on one device, late ones replayed."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.groups import require_sizes
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

Method = Literal["allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp", "eager", "wagma"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A small network, its workers and how they average.

    Attributes:
      method: "eager" and "wagma" have workers that are late as the event model says;
        with others nobody is.
      workers: P, each with its own share of the images.
      group_size: S, of "wagma".
      tau: of "wagma"; every so many steps "local_sgd" averages.
      widths: of the hidden layers.
      batch: images of a worker's step.
      steps: of a run.
      lr: learning rate; after half of the steps and three quarters a tenth.
      momentum: of SGD.
      base: seconds of everybody's step, of which 10 % vary; simulated.
      pattern: who is delayed; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      seconds: of a round; simulated.
      seed: of parameters, batches and delays.
    """

    method: Method = "wagma"
    workers: int = 8
    group_size: int = 4
    tau: int = 10
    widths: tuple[int, ...] = (64,)
    batch: int = 16
    steps: int = 300
    lr: float = 0.1
    momentum: float = 0.9
    base: float = 0.02
    pattern: Pattern = "random_one"
    delay: float = 0.2
    seconds: float = 0.005
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        sizes = {"workers": self.workers, "group_size": self.group_size}
        checks.require_count(
            1, batch=self.batch, steps=self.steps, tau=self.tau, **sizes
        )
        if self.method == "wagma":
            require_sizes(self.group_size, workers=self.workers)
        checks.require_positive(lr=self.lr, base=self.base)
        checks.require_decay("momentum", self.momentum)
        checks.require_finite(0.0, delay=self.delay, seconds=self.seconds)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains; nothing is timed.

    Returns:
      `accuracy` on held-out images of the mean of all models, `alone`, the mean of the
      models' own accuracies, and `loss` of the workers' batches [step].
    """
    import jax
    import jax.numpy as jnp
    import xarray as xr

    from hpcjax import metrics, models
    from hpcjax.data import load_digits

    del ctx
    data = load_digits()
    model = models.mlp(data.inputs, data.outputs, widths=cfg.widths)
    params, state = model.init(jax.random.key(cfg.seed))
    gathered = data.validation.gather(np.arange(len(data.validation)))
    held = jax.tree.map(jnp.asarray, gathered)

    def loss(params, x, y):
        return metrics.cross_entropy(model.apply(params, state, x, train=True)[0], y)

    def accuracy(params):
        return metrics.accuracy(
            model.apply(params, state, held["x"], train=False)[0], held["y"]
        )

    x, y = _batches(cfg, data.train)
    trained, losses = _train(cfg, params, jax.value_and_grad(loss), x, y)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), trained)
    return xr.Dataset(
        {
            "accuracy": 100 * float(accuracy(mean)),
            "alone": 100 * float(jnp.mean(jax.vmap(accuracy)(trained))),
            "loss": ("step", np.asarray(losses).mean(0)),
        },
        attrs={"source": "simulated"},  # who is late
    )


def _batches(cfg: Config, source: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels of each worker's share, `[worker, step, batch, ...]`.

    Shares are of equal size, of images in an order drawn once.
    """
    rng = np.random.Generator(np.random.Philox(key=[cfg.seed, 3]))
    share = len(source) // cfg.workers
    own = rng.permutation(len(source))[: share * cfg.workers].reshape(-1, share)
    picked = rng.integers(share, size=(cfg.workers, cfg.steps * cfg.batch))
    found = source.gather(np.take_along_axis(own, picked, axis=1).reshape(-1))
    shape = cfg.workers, cfg.steps, cfg.batch
    return tuple(found[name].reshape(*shape, *found[name].shape[1:]) for name in "xy")


def _train(
    cfg: Config, params: Any, gradient: Any, x: np.ndarray, y: np.ndarray
) -> tuple[Any, Any]:
    """Returns the parameters of all workers, and their losses `[worker, step]`."""
    import jax
    import jax.numpy as jnp
    import optax

    from hpcjax import optim

    drops = {cfg.steps // 2: 0.1, cfg.steps * 3 // 4: 0.1}
    rate = optax.piecewise_constant_schedule(cfg.lr, drops)
    tx = optax.sgd(rate, momentum=cfg.momentum)

    def replayed(x, y):
        def own(params, step):
            return gradient(params, x[step], y[step])

        replay = optim.wagma_replay if cfg.method == "wagma" else optim.eager_sgd_replay
        return replay(_trace(cfg), params, tx, own, axis_name="data")

    def stepped(x, y):
        worker = {
            "allreduce": optim.allreduce_sgd,
            "local_sgd": lambda *given: optim.local_sgd(*given, period=cfg.tau),
            "dpsgd": optim.dpsgd,
            "adpsgd": lambda *given: optim.adpsgd(*given, seed=cfg.seed),
            "sgp": optim.sgp,
        }[cfg.method]("data", tx)

        def one(carry, step):
            params, state = carry
            value, grads = gradient(params, x[step], y[step])
            return worker.step(grads, state, params), value

        carry = params, worker.init(params)
        (trained, _), losses = jax.lax.scan(one, carry, jnp.arange(cfg.steps))
        return trained, losses

    late = cfg.method in ("wagma", "eager")
    workers = jax.vmap(replayed if late else stepped, axis_name="data")
    return jax.jit(workers)(jnp.asarray(x), jnp.asarray(y))


def _trace(cfg: Config) -> Any:
    """Returns who is late when, by the event model."""
    from hpcjax import hostcomm, perf

    rng = np.random.Generator(np.random.Philox(key=[cfg.seed, 2]))
    shape = cfg.steps, cfg.workers
    compute = cfg.base * rng.lognormal(0.0, 0.1, shape) + hostcomm.inject_delays(
        cfg.pattern, *shape, delay=cfg.delay, seed=cfg.seed
    )
    if cfg.method == "eager":
        times = perf.simulate_rounds(compute, mode="solo", seconds=cfg.seconds)
        return times.trace()
    times = perf.simulate_groups(
        compute,
        group_size=cfg.group_size,
        tau=cfg.tau,
        seconds=cfg.seconds,
        global_seconds=cfg.seconds,
    )
    return times.trace()
