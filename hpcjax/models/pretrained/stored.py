"""A tensor of a checkpoint file: its shape is known, its values are read when asked."""

from collections.abc import Callable
from typing import Any, NamedTuple

PACKED = "GPTQ"
# Endings of the tensors that are no weights by themselves.
PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Stored(NamedTuple):
    """One tensor of a file.

    Attributes:
      shape: as in the checkpoint, outermost axis first.
      kind: how the file calls its number format, such as "BF16" or "Q4_1"; `PACKED`
        for one that was put together from the tensors of GPTQ's layout.
      read: returns the values as a numpy array of `shape`; of a packed one, the
        `QuantizedMatrix`.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Any]
