"""Training on digits, and how much of the network is left at its end."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpcjax import core, runs
from hpcjax.optim import sparsify
from hpcjax.runs import training

task = training.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run whose masks are counted, too; see `TrainingConfig`."""

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """The figures of a history, and what is counted at its end."""
        return {
            **super().figures,
            "accuracy": ": on held-out images, a share",
            "kept size": ": parameters that are not zero, and all",
            "sparsity": ": of those that may be pruned",
        }

    def typical(self) -> Mapping[str, float]:
        """Returns shares below one, and fewer that are kept than there are."""
        return {"accuracy": 0.9, "sparsity": 0.9, "kept": 900, "size": 1000}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains; nothing is timed."""
    import jax

    history = training.run(cfg, ctx)
    assert ctx.trained is not None
    params, state = jax.device_get((ctx.trained.params, ctx.trained.opt_state))
    accuracy = 1 - history["val_error"].isel(eval_step=-1, drop=True)
    left = count_left(*read_network(cfg.sparsity, params, state))
    return history.assign({"accuracy": accuracy, **left})


def read_network(sparsity: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Returns the weights of a trained network and their masks; None if nothing is."""
    if sparsity is None:
        return params, core.masks.map_masks(lambda _: None, params)
    return sparsity.read_network(params, state)


def count_left(params: Any, masks: Any) -> dict[str, float]:
    """Returns `kept`, `size` and `sparsity` of parameters with masks."""
    report = sparsify.density_report(params, masks)
    left, whole = (sum(n[at] for n in report.layers.values()) for at in (0, 1))
    sparsity = 1 - left / whole if whole else 0.0
    return {"kept": report.kept, "size": report.size, "sparsity": sparsity}
