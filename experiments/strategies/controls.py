"""What breaks ZeRO, for negative controls."""

import contextlib
from collections.abc import Iterator
from typing import Any


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
