"""The control of the table of machine code computes what the kernel does."""

import functools

import numpy as np
import pytest

from experiments.kernels import machine_code
from hpcjax.core import ConfigError
from hpcjax.kernels._triton.launch import find_problem


@pytest.mark.skipif(
    find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)
def test_the_plain_kernel_is_right_and_only_slower():
    cfg = machine_code.Config(kernel="plain_row", dtype="float32")
    x, matrix = machine_code._cases(cfg)["plain_row"].operands(128)
    y = machine_code.plain_row(x, matrix, implementation="interpreted")
    wanted = np.asarray(x[0], float) @ np.asarray(matrix.dequantize(), float)
    np.testing.assert_allclose(y, wanted, atol=1e-4 * np.abs(wanted).max())


def test_the_plain_kernel_has_four_bits():
    make = functools.partial(machine_code.Config, kernel="plain_row")
    with pytest.raises(ConfigError, match="has bits=4: got bits=3"):
        make(bits=3)
