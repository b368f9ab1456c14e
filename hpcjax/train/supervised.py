"""Supervised tasks, made of parts that know nothing of devices."""

from collections.abc import Callable
from typing import Any

import optax

from hpcjax import data, optim
from hpcjax.core.method import Method, Objective
from hpcjax.core.model import Model
from hpcjax.train.objectives import OBJECTIVES
from hpcjax.train.task import Task


def supervised(
    model: Model,
    method: Method | optax.GradientTransformation,
    dataset: "data.Dataset",
    augment: Callable[..., Any] | None = None,
    objective: Objective | None = None,
) -> Task:
    """Returns the task of predicting labels `y` from `x`.

    Args:
      model: its outputs are what the objective takes, such as logits over the labels.
      method: the training method, such as that of `optim.data_parallel`, which is also
        applied to a single-device transform.
      dataset: sources of `{"x", "y"}`, and of whatever else its kind needs.
      augment: optional `(batch, rng) -> batch` on the host.
      objective: `(outputs, batch) -> Totals`; None for that of `dataset.kind`.
    """
    if not isinstance(method, Method):
        method = optim.data_parallel(method)
    objective = objective or OBJECTIVES[dataset.kind]
    return Task(model, method, objective, dataset, augment)
