"""Tensors of checkpoint files, with known shapes and values that are read later."""

from collections.abc import Callable
from typing import Any, NamedTuple

PACKED = "GPTQ"
# Endings of the tensors that together make a packed matrix.
PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Stored(NamedTuple):
    """One tensor of a file.

    Attributes:
      shape: as in the checkpoint, outermost axis first.
      kind: the file's name of the number format, such as "BF16" or "Q4_1"; `PACKED` for
        a matrix that is stored as the several tensors of GPTQ's layout.
      read: returns the values, a numpy array of `shape` or a `QuantizedMatrix`.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Any]
