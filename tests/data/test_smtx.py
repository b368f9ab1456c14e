"""The text format of sparse patterns: a file written by hand, and damaged ones."""

import numpy as np
import pytest

from hpcjax import data, kernels
from hpcjax.core import DataFormatError

GOOD = "3, 5, 4\n0 2 2 4\n1 4 0 3\n"


def write(folder, text):
    path = folder / "pattern.smtx"
    path.write_text(text)
    return path


@pytest.mark.acceptance("magicube", 6)
def test_a_file_written_by_hand(tmp_path):
    found = data.read_smtx(write(tmp_path, GOOD))
    expected = np.zeros((3, 5), bool)
    expected[0, [1, 4]] = expected[2, [0, 3]] = True
    np.testing.assert_array_equal(found.toarray(), expected)
    empty = data.read_smtx(write(tmp_path, "2, 5, 0\n0 0 0\n"))
    assert (empty.shape, empty.nnz) == ((2, 5), 0)


@pytest.mark.acceptance("magicube", 6)
@pytest.mark.parametrize("vector", [2, 8])
def test_every_nonzero_becomes_a_vector_of_a_taller_matrix(tmp_path, vector):
    pattern = data.read_smtx(write(tmp_path, GOOD)).toarray()
    dense = np.arange(1, 15 * vector + 1).reshape(3 * vector, 5) % 100
    matrix = kernels.sr_bcrs(dense, vector=vector, mask=pattern)
    assert matrix.shape == (3 * vector, 5)
    expected = dense * np.repeat(pattern, vector, axis=0)
    np.testing.assert_array_equal(matrix.to_dense(), expected)


@pytest.mark.acceptance("magicube", 6)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected a line"),
        ("3, 5\n", "line 2: expected offsets"),
        ("3, 5\n0 2 2 4\n1 4 0 3\n", "line 1: expected 3 integers, found 2"),
        ("3, x, 4\n0 2 2 4\n1 4 0 3\n", "line 1: expected an integer, found 'x'"),
        ("3, 5, -4\n0 2 2 4\n1 4 0 3\n", "line 1: expected an integer, found '-4'"),
        ("3, 5, 4\n0 2 4\n1 4 0 3\n", "line 2: expected 4 integers, found 3"),
        ("3, 5, 4\n0 3 2 4\n1 4 0 3\n", "line 2: expected ascending offsets"),
        ("3, 5, 4\n0 2 2 3\n1 4 0 3\n", "line 2: .* from 0 to 4, found 0 to 3"),
        ("3, 5, 4\n0 2 2 4\n1 4 0\n", "line 3: expected 4 integers, found 3"),
        ("3, 5, 4\n0 2 2 4\n1 5 0 3\n", "line 3: expected columns below 5.*found 5"),
        ("3, 5, 4\n0 2 2 4\n4 1 0 3\n", "line 3: .*ascend in each row, found 1"),
        ("3, 5, 4\n0 2 2 4\n4 4 0 3\n", "line 3: .*ascend in each row, found 4"),
    ],
)
def test_a_damaged_file_is_told_by_its_line(tmp_path, text, message):
    with pytest.raises(DataFormatError, match=message):
        data.read_smtx(write(tmp_path, text))
