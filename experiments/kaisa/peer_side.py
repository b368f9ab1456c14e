"""Our side of the comparison with kfac-jax: a network, its curvature and its steps."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from hpcjax import core, data, layers, metrics, models, perf, sharding, train
from hpcjax.core import trees
from hpcjax.models import modules
from hpcjax.optim import kfac

if TYPE_CHECKING:
    from experiments.kaisa.peer_experiment import Config


class _ConvNet(nnx.Module):
    def __init__(
        self, inputs: tuple[int, int, int], classes: int, widths: tuple[int, ...]
    ) -> None:
        height, width, channels = inputs
        policy = core.Policy()
        self.hidden = len(widths)
        for number, outputs in enumerate(widths):
            conv = modules.Conv(
                channels, outputs, kernel_size=3, stride=2, use_bias=True, policy=policy
            )
            setattr(self, f"conv_{number}", conv)
            height, width, channels = -(-height // 2), -(-width // 2), outputs
        self.head = modules.Dense(height * width * channels, classes, policy=policy)

    def __call__(
        self, x: jax.Array, *, train: bool, key: jax.Array | None
    ) -> jax.Array:
        del train, key
        for number in range(self.hidden):
            x = layers.activation("tanh", getattr(self, f"conv_{number}")(x))
        return self.head(x.reshape(x.shape[0], -1))


def network(cfg: "Config") -> core.Model:
    """Returns the MLP, or the convolutions: nothing but what both K-FACs know.

    Smooth ones, since a ReLU makes a leap of what is rounding before it.
    """
    if cfg.problem == "mlp":
        return models.mlp(cfg.inputs, cfg.classes, widths=cfg.widths, activation="tanh")
    return models.from_nnx(lambda: _ConvNet(cfg.inputs, cfg.classes, cfg.widths))


class Side:
    """Parameters and a batch, and what our K-FAC makes of them."""

    def __init__(self, cfg: "Config") -> None:
        self.config = cfg.optimizer()
        dataset = data.noise_images(
            cfg.batch_size, cfg.inputs, cfg.classes, seed=cfg.seed
        )
        self.batch = dataset.train.gather(np.arange(cfg.batch_size))
        self.model = network(cfg)
        self._mesh = sharding.data_mesh(1)
        method = train.compose(
            self.model,
            dataset,
            self.config,
            batch_size=cfg.batch_size,
            steps=cfg.inv_update_steps,
        )
        self._task = train.supervised(self.model, method, dataset)
        self._state = train.init_state(self._task, cfg.seed, self._mesh)
        self.params = jax.device_get(self._state.params)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the first parameters by path, and the batch as `x` and `y`."""
        return {**trees.flatten(self.params), **self.batch}

    def curvature(self) -> dict[str, np.ndarray]:
        """Returns what our K-FAC makes of this batch alone.

        `gradient/<parameter>` and `preconditioned/<parameter>`, `a/<layer>` and
        `g/<layer>`.
        """
        found, updates, state = jax.jit(self._update)(self.params, self.batch)
        factors = {
            f"{side}/{path}": factor[0]
            for path, each in state.factors.items()
            for side, factor in each.items()
        }
        return jax.device_get(
            prefixed("gradient", found.grads)
            | prefixed("preconditioned", updates)
            | factors
        )

    def _update(self, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        chosen = kfac.plan(self.model)
        names = [field.name for field in dataclasses.fields(kfac.KfacOptions)]
        transform = kfac.scale_by_kfac(
            chosen, **{name: getattr(self.config, name) for name in names}
        )
        taps = kfac.make_taps(chosen, self.model, params, {}, batch["x"])

        def forward(params: Any, taps: Any) -> tuple[Any, Any]:
            return self.model.apply(params, {}, batch["x"], train=True, taps=taps)

        def loss(outputs: Any, labels: Any) -> tuple[Any, Any]:
            totals = metrics.label_totals(outputs, {"y": labels})
            return totals.means()["loss"], totals

        found = kfac.differentiate(
            forward, loss, params, taps, batch["y"], fisher=self.config.fisher
        )
        updates, state = transform.update(
            found.grads,
            transform.init(params),
            taps=found.statistics,
            loss_terms=found.loss_aux.count,
        )
        return found, updates, state

    def change(self, count: int) -> dict[str, np.ndarray]:
        """Returns what `count` steps add to the parameters: `change/<parameter>`."""
        after = jax.device_get(self.steps(count, check=False)().params)
        return prefixed("change", jax.tree.map(np.subtract, after, self.params))

    def steps(self, count: int, *, check: bool) -> Callable[[], train.TrainState]:
        """Returns a thunk that takes `count` steps from where its last ones ended.

        Args:
          count: steps of a call.
          check: whether a step looks for numbers that are not finite.
        """
        step = perf.stepper(
            train.train_step(self._task, self._mesh, self._state, check=check),
            self._state,
            sharding.place_batch(self.batch, self._mesh),
        )

        def call() -> train.TrainState:
            for _ in range(count - 1):
                step()
            return step()[0]

        return call


def prefixed(prefix: str, tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree as `{"prefix/path": leaf}`."""
    return {f"{prefix}/{path}": leaf for path, leaf in trees.flatten(tree).items()}
