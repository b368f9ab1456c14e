"""Tasks put together of parts that know nothing of devices."""

from collections.abc import Callable
from typing import Any

import optax

from hpcjax import data, optim
from hpcjax.core.model import Model
from hpcjax.optim.kfac import Curvature
from hpcjax.sharding.mesh import DATA_AXIS
from hpcjax.train.objectives import OBJECTIVES
from hpcjax.train.task import Objective, Task


def supervised(
    model: Model,
    optimizer: optax.GradientTransformation,
    dataset: "data.Dataset",
    augment: Callable[..., Any] | None = None,
    objective: Objective | None = None,
    curvature: Curvature | None = None,
) -> Task:
    """Returns the task of predicting labels `y` from `x`, by single-device parts.

    Args:
      model: outputs what the objective scores, such as logits over the labels.
      optimizer: a single-device transform; the mean of the gradients over the data axis
        is taken before it. A transform that communicates by itself goes into `Task`.
      dataset: sources of `{"x", "y"}`, and of what its kind has besides.
      augment: optional `(batch, rng) -> batch` on the host.
      objective: `(outputs, batch) -> Totals`; None for that of `dataset.kind`.
      curvature: given with an optimizer that contains K-FAC, which averages its
        statistics by itself over the axes of `curvature`.
    """
    axes = DATA_AXIS if curvature is None else curvature.axes
    chained = optax.chain(optim.all_reduce_mean(axes), optimizer)
    return Task(
        model,
        optax.with_extra_args_support(chained),
        objective or OBJECTIVES[dataset.kind],
        dataset,
        augment,
        curvature,
    )
