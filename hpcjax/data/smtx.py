"""The text format of the sparse matrices of the Deep Learning Matrix Collection.

The first line has the numbers of rows, columns and nonzeros, with commas; the second
the begin of each row and the end of the last; the third the column of each nonzero, row
by row. Only where a matrix has nonzeros is there, not which.

References:
  Gale, Zaharia, Young and Elsen, Sparse GPU Kernels for Deep Learning, SC 2020.
"""

import pathlib

import numpy as np
import scipy.sparse

from hpcjax.core.errors import DataFormatError
from hpcjax.data.records import read_lines

# The largest index of int32.
_MOST = 2**31 - 1


def read_smtx(path: pathlib.Path) -> "scipy.sparse.csr_array":
    """Returns the pattern of a matrix, true where it has a nonzero.

    Kernels of column vectors take each nonzero for a vector of V rows: the pattern is
    then the `mask` of `kernels.sr_bcrs`, of a matrix with V times as many rows.

    Raises:
      DataMissing: no such file.
      DataFormatError: damaged; the message names the line.
    """
    lines = list(read_lines(path))
    if len(lines) < 2:
        raise DataFormatError(
            f"{path}: line {len(lines) + 1}: expected offsets of rows"
        )
    # Without a nonzero, the last line is empty or not there.
    lines.append((f"{path}: line 3", ""))
    place, text = lines[0]
    header = _read_integers(place, text.replace(",", " "), 3)
    rows, columns, count = header.tolist()
    place, text = lines[1]
    offsets = _read_integers(place, text, rows + 1)
    if offsets[0] != 0 or offsets[-1] != count or np.any(np.diff(offsets) < 0):
        raise DataFormatError(
            f"{place}: expected ascending offsets from 0 to {count}, found "
            f"{offsets[0]} to {offsets[-1]}"
        )
    place, text = lines[2]
    indices = _read_integers(place, text, count)
    # Within a row columns ascend; at the begin of a row they may fall.
    begins = np.zeros(count + 1, bool)
    begins[offsets] = True
    falls = (np.diff(indices) <= 0) & ~begins[1:count]
    if np.any(indices >= columns) or np.any(falls):
        raise DataFormatError(
            f"{place}: expected columns below {columns} that ascend in each row, found "
            f"{int(indices[np.argmax(falls) + 1]) if np.any(falls) else indices.max()}"
        )
    found = np.ones(count, bool)
    return scipy.sparse.csr_array((found, indices, offsets), shape=(rows, columns))


def _read_integers(place: str, text: str, count: int) -> np.ndarray:
    words = text.split()
    if len(words) != count:
        raise DataFormatError(f"{place}: expected {count} integers, found {len(words)}")
    for word in words:
        if not word.isascii() or not word.isdigit() or int(word) > _MOST:
            raise DataFormatError(f"{place}: expected an integer, found {word[:20]!r}")
    return np.array(words, np.int64)
