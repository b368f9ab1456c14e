"""What breaks halos, for negative controls."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_corners(broken: bool = True) -> Iterator[None]:
    """What is beside a block along two axes at once is zero, if `broken`."""
    import jax.numpy as jnp

    from hpcjax.collectives import halo

    right = halo.take_windows

    def wrong(x: Any, axes: Any, *rest: Any, padding: Any, **options: Any) -> Any:
        y, outside = right(x, axes, *rest, padding=padding, **options), 0
        for dim, (axis, (low, _)) in enumerate(zip(axes, padding, strict=True), 1):
            at = jnp.arange(y.shape[dim]) - (low if axis else 0)
            beside = (at < 0) | (at >= x.shape[dim])
            shape = [-1 if other == dim else 1 for other in range(y.ndim)]
            outside = outside + beside.reshape(shape) * (axis is not None)
        return jnp.where(outside > 1, 0, y)

    halo.take_windows = wrong if broken else right
    try:
        yield
    finally:
        halo.take_windows = right
