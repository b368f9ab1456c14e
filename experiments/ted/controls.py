"""What breaks the exchange of tokens, for negative controls."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@contextlib.contextmanager
def scattered() -> Iterator[None]:
    """Slopes of what is gathered, equal on all devices, are summed over them."""
    import jax

    from hpcjax.core import shards

    right = shards.gather_equal

    @jax.custom_vjp
    def wrong(part: "jax.Array") -> "jax.Array":
        return right(part, ((-2, "col"),))

    def backward(_: None, slope: "jax.Array") -> "tuple[jax.Array]":
        return (shards.sum_parts(slope, ((-2, "col"),)),)

    wrong.defvjp(lambda part: (wrong(part), None), backward)
    shards.gather_equal = lambda part, cuts: wrong(part) if cuts else part
    try:
        yield
    finally:
        shards.gather_equal = right
