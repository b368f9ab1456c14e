"""What tests of kernels need Triton for, which `make kernels` installs."""

import pytest


@pytest.fixture
def hopper():
    """See `tests.kernels.hopper`."""
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    from tests.kernels import hopper

    return hopper


@pytest.fixture
def lowering():
    """See `tests.kernels.lowering`."""
    pytest.importorskip(
        "jax_triton",
        reason="`make kernels` has not been called",
        exc_type=ImportError,
    )
    from tests.kernels import lowering

    return lowering
