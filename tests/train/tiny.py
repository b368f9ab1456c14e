"""A task small enough to follow by hand: softmax regression on Gaussian points."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax import core, data, metrics, train
from hpcjax.core import Model


class Points:
    """`count` points of three classes in four dimensions."""

    def __init__(self, count: int = 96, seed: int = 0) -> None:
        rng = np.random.Generator(np.random.Philox(seed))
        self.labels = rng.integers(0, 3, count).astype(np.int32)
        centres = 2 * np.eye(3, 4)
        noise = rng.normal(size=(count, 4))
        self.inputs = (centres[self.labels] + noise).astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": self.inputs[indices], "y": self.labels[indices]}


OBJECTIVE = core.Objective(
    name="points",
    inputs=core.Numbers(rank=1),
    outputs=core.Numbers(rank=1),
    score=metrics.label_totals,
    metrics={"loss": "low", "error": "low"},
    classes=True,
)


def dataset(augment: data.Augment | None = None) -> data.Dataset:
    return data.Dataset(
        train=Points(),
        validation=Points(count=37, seed=1),
        inputs=(4,),
        outputs=3,
        objective=OBJECTIVE,
        augment=augment,
    )


def linear() -> Model:
    def init(key: jax.Array) -> tuple[Any, Any]:
        kernel = 0.1 * jax.random.normal(key, (4, 3))
        return {"dense": {"kernel": kernel, "bias": jnp.zeros(3)}}, {}

    def apply(params, state, x, *, train, key=None, taps=None):
        return x @ params["dense"]["kernel"] + params["dense"]["bias"], state

    return Model(init, apply)


def task(
    optimizer: optax.GradientTransformation | None = None,
    augment: data.Augment | None = None,
) -> train.Task:
    method = optimizer or optax.sgd(0.1, 0.9)
    return train.supervised(linear(), method, dataset(augment))


class Records(list):
    """A recorder that keeps what it is given."""

    def write(self, record: Mapping[str, Any]) -> None:
        self.append(dict(record))

    def rewind(self, step: int) -> float:
        self[:] = [record for record in self if record["step"] <= step]
        return self[-1].get("seconds", 0.0) if self else 0.0

    def values(self) -> list[dict[str, Any]]:
        """Returns the records without what tells of a session."""
        return [
            {
                k: v
                for k, v in record.items()
                if k != "shapes" and not k.endswith("seconds")
            }
            for record in self
        ]
