"""What sends everything and only computes as if it were compressed."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Codes are decoded where they are made, and float32 is summed."""
    from jax import lax

    from hpcjax.compress import _codes

    def summed(codec: Any, axes: tuple[str, ...], y: Any, given: Any) -> Any:
        code = codec.encode(y, given)
        return lax.psum(codec.decode(code, y, given), axes), codec.count(code)

    with mock.patch.object(_codes, "gather_codes", summed):
        yield
