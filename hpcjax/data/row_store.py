"""Rows of tables in host memory, which training fetches and writes back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from hpcjax.core.errors import ConfigError
from hpcjax.data.row_file import RowFile

Rows = dict[str, np.ndarray]


def _at_once(count: int) -> None:
    """Waits for no bytes."""
    del count


class RowStore:
    """Arrays of as many rows each: a table, and what an optimizer keeps for each row.

    They may be `RowFile`s, or `np.memmap`s. Bytes are counted, and may take their
    time: `data.SharedRate(...).take` makes a slow link of each direction.

    Attributes:
      arrays: by name, [rows, ...]; written to in place.
      row_bytes: of one row of all arrays.
      bytes_read: that have been fetched.
      bytes_written: that have come back.

    Examples:
      >>> store = RowStore({"table": np.zeros((4, 2), np.float32)})
      >>> store.write(np.array([3]), {"table": np.ones((1, 2), np.float32)})
      >>> store.read(np.array([3, 0]))["table"].tolist(), store.bytes_read
      ([[1.0, 1.0], [0.0, 0.0]], 16)
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray | RowFile],
        *,
        reading: Callable[[int], None] = _at_once,
        writing: Callable[[int], None] = _at_once,
    ) -> None:
        """Keeps arrays.

        Args:
          arrays: by name, with the same first dimension.
          reading: is called with the bytes of each read, and returns when they are
            here.
          writing: likewise of each write.

        Raises:
          ConfigError: there is none, or their numbers of rows differ.
        """
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            raise ConfigError(f"arrays must have the same number of rows: got {sizes}")
        self.arrays: dict[str, Any] = dict(arrays)
        self.row_bytes = sum(
            math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays.values()
        )
        self.bytes_read = self.bytes_written = 0
        self._reading, self._writing = reading, writing

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, ids: Int[np.ndarray, " ids"]) -> Rows:
        """Returns copies of rows, [ids, ...] of each array."""
        count = len(ids) * self.row_bytes
        self._reading(count)
        self.bytes_read += count
        return {name: array[ids] for name, array in self.arrays.items()}

    def write(
        self, ids: Int[np.ndarray, " ids"], rows: Mapping[str, np.ndarray]
    ) -> None:
        """Puts rows in the place of others."""
        count = len(ids) * self.row_bytes
        self._writing(count)
        self.bytes_written += count
        for name, array in self.arrays.items():
            array[ids] = rows[name]
