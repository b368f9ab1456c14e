"""A tensor of a checkpoint file: its shape is known, its values are read when asked."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Stored(NamedTuple):
    """One tensor of a file.

    Attributes:
      shape: as in the checkpoint, outermost axis first.
      kind: how the file calls its number format, such as "BF16" or "Q4_1".
      read: returns the values as a numpy array of `shape`.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], np.ndarray]
