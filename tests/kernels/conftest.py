"""What tests of kernels need Triton for, which the extra `oracles` has."""

import pytest


@pytest.fixture
def hopper():
    """See `tests.kernels.hopper`."""
    pytest.importorskip("triton", reason="the extra `oracles` is missing")
    from tests.kernels import hopper

    return hopper


@pytest.fixture
def lowering():
    """See `tests.kernels.lowering`."""
    pytest.importorskip(
        "jax_triton",
        reason="the extra `oracles`, or CUDA's plugin for JAX, is missing",
        exc_type=ImportError,
    )
    from tests.kernels import lowering

    return lowering
