"""What breaks a strategy, for negative controls."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def summed() -> Iterator[None]:
    """Gradients are summed over devices where they should be averaged."""
    import jax

    from hpcjax.optim import shards

    right = shards.update_shards

    def wrong(*args: Any, axes: Any, **options: Any) -> Any:
        made = right(*args, axes=axes, **options)

        def update(grads: Any, *rest: Any, **extra: Any) -> Any:
            devices = jax.lax.axis_size(axes)
            return made.update(
                jax.tree.map(lambda g: g * devices, grads), *rest, **extra
            )

        return made._replace(update=update)

    shards.update_shards = wrong
    try:
        yield
    finally:
        shards.update_shards = right


@contextlib.contextmanager
def missing() -> Iterator[None]:
    """No mean is taken: every device goes on with its own gradients, unnoticed."""
    import optax

    from hpcjax import core, optim

    def alone(axes: Any) -> Any:
        return optax.stateless(lambda grads, _: core.assume_equal(grads, axes))

    with mock.patch.object(optim, "all_reduce_mean", alone):
        yield


@contextlib.contextmanager
def keyed() -> Iterator[None]:
    """Each device draws by its own key what it should draw by the examples' numbers."""
    import jax

    from hpcjax import core
    from hpcjax.train import step

    def own(key: Any, rows: Any) -> core.BatchKey:
        device = jax.lax.axis_index(core.DATA_AXIS)
        return core.BatchKey(key=jax.random.fold_in(key, device), rows=rows)

    with mock.patch.object(step, "BatchKey", own):
        yield
