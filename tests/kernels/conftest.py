"""What tests of kernels need Triton for, which `make kernels` installs."""

import pytest

from hpcjax import perf


@pytest.fixture
def machine_code():
    """See `perf.machine_code`."""
    pytest.importorskip(
        "jax_triton",
        reason="`make kernels` has not been called",
        exc_type=ImportError,
    )
    return perf.machine_code


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
