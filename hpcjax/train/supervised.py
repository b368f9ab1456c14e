"""Supervised tasks, made of parts that know nothing of devices."""

import optax

from hpcjax import data, optim
from hpcjax.core.method import Method, Score
from hpcjax.core.model import Model
from hpcjax.train.task import Task


def supervised(
    model: Model,
    method: Method | optax.GradientTransformation,
    dataset: "data.Dataset",
    objective: Score | None = None,
) -> Task:
    """Returns the task of what a data set's objective asks of a model.

    Args:
      model: puts out what the objective takes, such as logits over the labels.
      method: the training method, such as that of `optim.data_parallel`, which is also
        applied to a single-device transform.
      dataset: sources of examples, "x" of which the model takes.
      objective: `(outputs, batch) -> Totals`; None for that of the data set.
    """
    if not isinstance(method, Method):
        method = optim.data_parallel(method)
    if model.frozen:
        method = optim.holding(method, model.frozen)
    return Task(method.split(model), method, objective or dataset.objective, dataset)
