"""What breaks the fused operations, for negative controls."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def other_masks() -> Iterator[None]:
    """Gradients draw the masks of another seed."""
    from hpcjax.kernels._encoder import api

    right = api._load

    def load(options: Any, saved: Any, shape: tuple[int, ...]) -> Any:
        return right(options, (saved[0] + 1, None), shape)

    with mock.patch.object(api, "_load", load):
        yield


@contextlib.contextmanager
def loaded_twice() -> Iterator[None]:
    """The norm reads its input once for the mean and once more for the rest."""
    from hpcjax.kernels._encoder import launch

    right = launch.plan

    def plan(kernel: str, *args: Any, **options: Any) -> Any:
        made = right(kernel, *args, **options)
        if kernel != "residual_norm":
            return made
        slow = "experiments.data_movement.kernel:residual_norm"
        return dataclasses.replace(made, kernel=slow)

    with mock.patch.object(launch, "plan", plan):
        yield
