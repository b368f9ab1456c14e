"""Tasks put together of parts that know nothing of devices."""

from collections.abc import Callable
from typing import Any

import optax

from hpcjax import data, optim
from hpcjax.collectives import ExchangeConfig
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import Model
from hpcjax.optim import PartialBackward
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
    backward: PartialBackward | None = None,
    exchange: ExchangeConfig | None = None,
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
      backward: roles of workers; the mean is then over those that contribute.
      exchange: takes the place of the mean, such as `collectives.OkTopkConfig()`.

    Raises:
      ConfigError: both `curvature` and `backward`: the statistics need every layer's
        gradients of every worker; both `backward` and `exchange`.
    """
    axes = DATA_AXIS if curvature is None else curvature.axes
    mean = optim.all_reduce_mean(axes)
    if exchange is not None:
        mean = optim.exchange_gradients(exchange, axes)
    if backward is not None:
        if curvature is not None:
            raise ConfigError("K-FAC needs a whole backward pass: give no backward")
        if exchange is not None:
            raise ConfigError("a partial backward pass has its own mean: no exchange")
        mean = optim.contributor_mean(backward, axes)
    chained = optax.chain(mean, optimizer)
    return Task(
        model,
        optax.with_extra_args_support(chained),
        objective or OBJECTIVES[dataset.kind],
        dataset,
        augment,
        curvature,
        backward,
    )
