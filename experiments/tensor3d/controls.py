"""What breaks models that are cut in two dimensions, for negative controls."""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Each of several matrices takes x by itself, and sums its slopes."""
    from hpcjax.models import block

    with mock.patch.object(block, "share_inputs", lambda x, *_: x):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Norms take the moments of a device's own features."""
    from hpcjax.layers import norms

    right = norms._mean
    with mock.patch.object(norms, "_mean", lambda x, _: right(x, ())):
        yield
