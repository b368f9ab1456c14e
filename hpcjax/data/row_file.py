"""An array by rows in a file, read and written a partition at a time.

A file has two slots for each partition, and two states. A state says of each partition
which slot has its rows, and their checksum. Rows that are written go to the slot that
the last state does not name, so that what it says holds until the next one is whole.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

import ml_dtypes  # noqa: F401 - numpy has bfloat16 by name then
import numpy as np
import xxhash

from hpcjax.core import checks, files
from hpcjax.core.errors import DataFormatError, DataMissing

_BLOCK = 4096  # of the disk: where all parts of a file begin
_FORMAT = "hpcjax rows 1"
_NEVER = 2  # in the place of a slot, of rows that were never written: zeros


class RowFile:
    """Rows in a file, which `RowStore` takes as one of its arrays.

    `file[ids]` reads, `file[ids] = rows` writes, `np.asarray(file)` is all of them. The
    partitions that hold the rows are read whole by `preadv`, and checked, and the pages
    of the system's cache given back: there is no memory map. One process has it open at
    a time, and reads what it has written. Others, and who opens it after a crash, find
    the state of the last `flush`, whose sequence number says which it is. Files that
    belong together are opened at a number that all of them have; what is newer is given
    up by the first write, so that no later state takes its number beside it.

    Attributes:
      path: of the file.
      shape: of the array, rows first.
      dtype: of its numbers.
      partition_rows: rows of a partition; the last may have fewer.
      sequence: number of the state that was flushed last; 2 when it is built.
      bytes_read: from the file, for rows.
      bytes_written: to it, likewise.

    Examples:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows"
      >>> pieces = [np.zeros((4, 2), np.float32), np.ones((1, 2), np.float32)]
      >>> with RowFile.build(path, pieces, (5, 2), np.float32, 3) as file:
      ...   file[np.array([0])] = np.full((1, 2), 7, np.float32)
      ...   file.flush(), file[np.array([4, 0])].tolist()
      (3, [[1.0, 1.0], [7.0, 7.0]])
    """

    def __init__(
        self, path: pathlib.Path, sequence: int | None = None, *, writable: bool = True
    ) -> None:
        """Opens a file at a state.

        Args:
          path: of a file that `build` has made.
          sequence: of the state, of which all rows are read if there is a newer one,
            that may have taken their place; None for the newest one.
          writable: whether rows may be written; else the file may be read-only, too.

        Raises:
          ConfigError: it has no such state.
          DataMissing: there is no file.
          DataFormatError: it is none of rows, is cut off, or has no whole state, or
            rows of this one are gone.
        """
        self.path, self.bytes_read, self.bytes_written = path, 0, 0
        self._writable = writable
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            self._file = os.open(path, mode | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DataMissing(f"no such file: {path}") from error
        try:
            self._read_form()
            parts = self.partitions
            states = [state for state in map(self._find, range(2)) if state is not None]
            found = {int(state[1]): state for state in states}
            if not found:
                raise DataFormatError(f"{path}: expected a whole state: found none")
            self.sequence = max(found) if sequence is None else sequence
            rule = f"{path} must have the state, its newest are {sorted(found)}"
            checks.require(self.sequence in found, rule, sequence=self.sequence)
            _, _, *told = found[self.sequence].tolist()
            self._slots, self._sums = np.array(told[:parts]), told[parts:]
            self._newer = max(found) > self.sequence
            if self._newer:
                self.verify()
        except BaseException:
            self.close()
            raise
        self._new = np.zeros(parts, bool)

    @classmethod
    def build(
        cls,
        path: pathlib.Path,
        pieces: Iterable[np.ndarray],
        shape: tuple[int, ...],
        dtype: Any,
        partition_rows: int,
    ) -> Self:
        """Writes a file, whole or not at all, and opens it.

        Args:
          path: of the file; another one there is replaced.
          pieces: rows that follow each other. Those of whole partitions are written
            once; of smaller pieces each writes its partition anew.
          shape: of the array, rows first.
          dtype: of its numbers.
          partition_rows: rows of a partition.

        Raises:
          ConfigError: a row or more of other shape, or another number of rows.
          DiskFull: there is no room.
        """
        checks.require_count(1, rows=shape[0], partition_rows=partition_rows)
        form = {
            "format": _FORMAT,
            "shape": shape,
            "dtype": np.dtype(dtype).name,
            "partition_rows": partition_rows,
        }
        with files.replacing(path) as temporary:
            temporary.write_bytes(json.dumps(form).encode().ljust(_BLOCK, b"\0"))
            parts = -(-shape[0] // partition_rows)
            size = _layout(shape, np.dtype(dtype), partition_rows)[2]
            files.check_room(temporary, size)
            os.truncate(temporary, size)
            first = np.array([0, 0, *[_NEVER] * parts, *[0] * parts], np.uint64)
            with temporary.open("r+b") as file:
                file.seek(_BLOCK)
                file.write(_bytes(_seal(first)))
            with cls(temporary) as made:
                start = 0
                for piece in pieces:
                    made[slice(start, start + len(piece))] = piece
                    start += len(piece)
                rule = "pieces must have the rows of shape"
                checks.require(start == shape[0], rule, rows=start, shape=shape)
                made.flush()
                made.flush()  # in the place of the empty state, too
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; what was written since the last flush is lost."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def partitions(self) -> int:
        """Number of partitions."""
        return -(-len(self) // self.partition_rows)

    @property
    def sums(self) -> np.ndarray:
        """Checksums of partitions, uint64."""
        return np.array(self._sums, np.uint64)

    def __getitem__(self, rows: Any) -> np.ndarray:
        ids = self._numbers(rows)
        found = np.empty((len(ids), *self.shape[1:]), self.dtype)
        for part, where in self._by_partition(ids):
            found[where] = self._read(part)[ids[where] % self.partition_rows]
        return found

    def __setitem__(self, rows: Any, values: Any) -> None:
        self._check_writable()
        ids, values = self._numbers(rows), np.asarray(values)
        want = (len(ids), *self.shape[1:])
        good = values.shape == want and values.dtype == self.dtype
        rule = f"rows must be {self.dtype} {list(want)}"
        checks.require(good, rule, dtype=values.dtype, shape=values.shape)
        for part, where in self._by_partition(ids):
            places = ids[where] % self.partition_rows
            whole = len(np.unique(places)) == self._rows_of(part)
            own = self._empty(part) if whole else self._read(part)
            own[places] = values[where]
            self._write(part, own)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Returns all rows, in memory."""
        del copy
        return self[:].astype(dtype or self.dtype, copy=False)

    def verify(self) -> None:
        """Reads all rows, a partition at a time.

        Raises:
          DataFormatError: some are not those that were written.
        """
        for part in range(self.partitions):
            self._read(part)

    def flush(self) -> int:
        """Makes what was written the newest state; returns its sequence number.

        The one before stays until rows are written again.

        Raises:
          DiskFull: there is no room.
          ValueError: the file was opened for reading only.
        """
        self._check_writable()
        with files.disk_errors(self.path):
            self._give_up()
            os.fsync(self._file)
            told = [0, self.sequence + 1, *self._slots.tolist(), *self._sums]
            place = self._starts[(self.sequence + 1) % 2]
            self._put(_seal(np.array(told, np.uint64)), place)
            os.fsync(self._file)
        self._forget(0, 0)
        self.sequence, self._new[:] = self.sequence + 1, False
        return self.sequence

    def _check_writable(self) -> None:
        if not self._writable:
            raise ValueError(f"{self.path} was opened for reading only: writable=False")

    def _numbers(self, rows: Any) -> np.ndarray:
        """Returns numbers of rows, none of which counts from the end."""
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        ids = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        ids = np.asarray(ids)
        rule = f"rows must be a list of numbers from 0 to {len(self) - 1}"
        good = ids.dtype.kind in "iu" and ids.ndim == 1
        checks.require(good, rule, dtype=ids.dtype, shape=ids.shape)
        least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
        checks.require(0 <= least <= most < len(self), rule, least=least, most=most)
        return ids.astype(np.int64)

    def _by_partition(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields partitions, and where in `ids` are rows of each."""
        parts = ids // self.partition_rows
        order = np.argsort(parts, kind="stable")
        held, starts = np.unique(parts[order], return_index=True)
        if len(ids):
            yield from zip(held.tolist(), np.split(order, starts[1:]), strict=True)

    def _rows_of(self, part: int) -> int:
        return min(self.partition_rows, len(self) - part * self.partition_rows)

    def _empty(self, part: int) -> np.ndarray:
        return np.zeros((self._rows_of(part), *self.shape[1:]), self.dtype)

    def _place(self, part: int, slot: int) -> int:
        return self._first + (2 * part + slot) * self._room

    def _read(self, part: int) -> np.ndarray:
        """Returns the rows of a partition.

        Raises:
          DataFormatError: they are not those that were written.
        """
        rows, slot = self._empty(part), int(self._slots[part])
        if slot == _NEVER:
            return rows
        place = self._place(part, slot)
        self._get(rows, place)
        self.bytes_read += rows.nbytes
        self._forget(place, rows.nbytes)
        if _digest(rows, part) != self._sums[part]:
            raise DataFormatError(
                f"{self.path}: expected partition {part} of state {self.sequence}: "
                "found other bytes"
            )
        return rows

    def _write(self, part: int, rows: np.ndarray) -> None:
        """Writes a partition where no state has its rows."""
        spare = self._slots[part] if self._new[part] else self._slots[part] == 0
        with files.disk_errors(self.path):
            self._give_up()
            self._put(rows, self._place(part, int(spare)))
        self.bytes_written += rows.nbytes
        self._slots[part], self._new[part] = int(spare), True
        self._sums[part] = _digest(rows, part)

    def _give_up(self) -> None:
        """Takes back the state that is newer than ours, if there is one."""
        if self._newer:
            gone = np.zeros(2 + 2 * self.partitions, np.uint64)
            self._put(gone, self._starts[(self.sequence + 1) % 2])
            os.fsync(self._file)
        self._newer = False

    def _read_form(self) -> None:
        """Reads what the file holds, and where.

        Raises:
          DataFormatError: it is another one, or of another size.
        """
        head, size = os.pread(self._file, _BLOCK, 0), os.fstat(self._file).st_size
        try:
            form = json.loads(head.rstrip(b"\0"))
            good = form["format"] == _FORMAT
            self.shape, self.dtype = tuple(form["shape"]), np.dtype(form["dtype"])
            self.partition_rows = form["partition_rows"]
        except (ValueError, TypeError, KeyError):
            good = False
        if not good:
            raise DataFormatError(f"{self.path}: expected a file of rows")
        room = _layout(self.shape, self.dtype, self.partition_rows)
        self._starts, self._room, whole = room
        self._first = whole - 2 * self.partitions * self._room
        if size != whole:
            raise DataFormatError(
                f"{self.path}: expected {whole} bytes: found {size} bytes"
            )

    def _find(self, which: int) -> np.ndarray | None:
        """Returns one of the two states, if it is whole."""
        state = np.zeros(2 + 2 * self.partitions, np.uint64)
        self._get(state, self._starts[which])
        return state if state[0] == _digest(state[1:], 0) else None

    def _get(self, into: np.ndarray, place: int) -> None:
        """Fills an array, in as many reads as it takes."""
        left = _bytes(into)
        while left:
            count = os.preadv(self._file, [left], place)
            if not count:
                raise DataFormatError(
                    f"{self.path}: expected {len(left)} bytes more at {place}: found 0"
                )
            left, place = left[count:], place + count

    def _put(self, data: np.ndarray, place: int) -> None:
        """Writes an array, in as many writes as it takes."""
        left = _bytes(data)
        while left:
            count = os.pwrite(self._file, left, place)
            left, place = left[count:], place + count

    def _forget(self, place: int, size: int) -> None:
        """Gives pages of the system's cache back, where it can be asked to."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, place, size, os.POSIX_FADV_DONTNEED)


def _bytes(data: np.ndarray) -> memoryview:
    """Returns the memory of an array."""
    flat: Any = data.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _digest(data: np.ndarray, seed: int) -> int:
    """Returns the checksum of an array; it differs by partition."""
    return xxhash.xxh3_64_intdigest(_bytes(data), seed=seed)


def _seal(state: np.ndarray) -> np.ndarray:
    """Returns a state with its checksum in front."""
    state[0] = _digest(state[1:], 0)
    return state


def _layout(
    shape: tuple[int, ...], dtype: np.dtype, partition_rows: int
) -> tuple[tuple[int, int], int, int]:
    """Returns where the two states begin, bytes of a slot, and those of the file."""
    parts = -(-shape[0] // partition_rows)
    state = -(-16 * (1 + parts) // _BLOCK) * _BLOCK
    rows = partition_rows * math.prod(shape[1:]) * dtype.itemsize
    slot = -(-rows // _BLOCK) * _BLOCK
    return (_BLOCK, _BLOCK + state), slot, _BLOCK + 2 * state + 2 * parts * slot
