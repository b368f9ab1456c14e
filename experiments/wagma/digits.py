"""Training by workers, some of them late, and what each one's own model is worth."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcjax import core, metrics, runs
from hpcjax.runs import training

task = training.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run whose workers are judged apart, too; see `TrainingConfig`."""

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """The figures of a history, and what is counted at its end."""
        return {
            **super().figures,
            "accuracy": ": on held-out images, of the mean of all models, in percent",
            "alone": ": mean of the models' own accuracies",
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains; nothing is timed."""
    history = training.run(cfg, ctx)
    accuracy = 100 * (1 - history["val_error"].isel(eval_step=-1, drop=True))
    alone = 100 * _alone(cfg, ctx)
    return history.assign(accuracy=accuracy, alone=alone)


def _alone(cfg: Config, ctx: "runs.Context") -> float:
    import jax
    import jax.numpy as jnp

    assert ctx.trained is not None
    made = task(cfg, ctx.data_root, ctx.mesh.size)
    source, state = made.dataset.validation, jax.device_get(ctx.trained.model_state)
    gathered = source.gather(np.arange(len(source)))
    held = jax.tree.map(jnp.asarray, dict(gathered))

    def accuracy(params: Any) -> Any:
        outputs, _ = made.model.apply(params, state, held["x"], train=False)
        return metrics.accuracy(outputs, held["y"])

    params = jax.tree.map(jnp.asarray, jax.device_get(ctx.trained.params))
    if not isinstance(params, core.PerDevice):
        return float(accuracy(params))
    return float(jnp.mean(jax.vmap(accuracy)(params.value)))
