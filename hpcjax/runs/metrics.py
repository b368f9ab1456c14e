"""The records of a run as JSON lines, which are appended completely or not at all."""

import contextlib
import errno
import json
import math
import numbers
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from hpcjax.core import files
from hpcjax.core.errors import DataFormatError
from hpcjax.runs import words
from hpcjax.train.recorder import training_seconds

# Times in records that are not part of `seconds`, which is training and waiting for
# data.
_LOST = (
    "spent_init_seconds",
    "spent_validation_seconds",
    "spent_checkpoint_seconds",
    "lost_seconds",
)

_TAIL = 4096  # bytes in which a few records have room


class Metrics:
    """Records of a run in the order of its steps.

    A record is `{"step": int, name: number or text, ...}`. Infinities and NaN, which
    JSON does not have, are written as words.

    Attributes:
      path: the file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._whole = False
        self._checked: float = math.inf

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record."""
        line = _line(record)
        with files.disk_errors(self.path):
            if not self._whole:
                files.cut_torn_line(self.path)
            self._whole = False
            with self.path.open("ab", buffering=0) as file:
                rest = line[file.write(line) :]
                # Where only a part has room, the rest is refused with the reason.
                if rest and file.write(rest) != len(rest):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._whole = True

    def mark(self) -> dict[str, Any]:
        """Returns size and checksum of the file, which is safe on the disk then."""
        with files.disk_errors(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
        content = self.path.read_bytes()
        return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}

    def check(self, mark: Mapping[str, Any]) -> None:
        """Raises DataFormatError unless the file begins as it was at `mark`.

        What follows, records of later steps, is not checked: `rewind` drops it.
        """
        size, content = mark.get("bytes"), b""
        if self.path.exists():
            content = self.path.read_bytes()
        if xxhash.xxh3_128_hexdigest(content[:size]) == mark.get("xxh3_128"):
            self._checked = len(content[:size])
            return
        lost = "are missing" if len(content) < (size or 0) else "have been changed"
        newest = self.read_newest()
        last = (
            f"the last is of step {newest[-1].get('step')}"
            if newest
            else "none is there"
        )
        raise DataFormatError(
            f"{self.path}: records {lost} that were there when the checkpoint was "
            f"saved; {last}"
        )

    def read(self) -> list[dict[str, Any]]:
        """Returns all complete records, without a last line that a kill truncated."""
        return [record for _, record in self._records()]

    def read_newest(self) -> list[dict[str, Any]]:
        """Returns the last few whole records, in order; none if there are none yet."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")
        newest = []
        for line in lines:
            # The first line may be the end of one, and the last one only its begin.
            with contextlib.suppress(ValueError):
                newest.append(json.loads(line))
        return [
            {name: words.number(value) for name, value in record.items()}
            for record in newest
            if isinstance(record, dict)
        ]

    def rewind(self, step: int) -> float:
        """Removes the records after `step`, which will be taken again.

        The time spent on them is kept in a record with `lost_seconds`. From the first
        line on that is no record, they are removed unread if it is after what `check`
        has found whole.

        Returns:
          `seconds` of the last record that is kept, 0 if there is none.
        """
        records = list(self._records(self._checked))
        kept = [line for line, record in records if record["step"] <= step]
        before = training_seconds(r for _, r in records if r["step"] <= step)
        dropped = [record for _, record in records if record["step"] > step]
        lost = max(0.0, training_seconds(dropped) - before)
        lost += sum(r.get(name, 0.0) for r in dropped for name in _LOST)
        if len(kept) < len(records):
            kept.append(_line({"step": step, "lost_seconds": lost}))
        if self.path.exists():
            files.write_atomic(self.path, b"".join(kept))
        return before

    def _records(
        self, checked: float = math.inf
    ) -> Iterator[tuple[bytes, dict[str, Any]]]:
        if not self.path.exists():
            return
        *lines, _ = self.path.read_bytes().split(b"\n")
        place = 0
        for number, line in enumerate(lines, 1):
            place += len(line) + 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if place > checked:
                    return
                raise DataFormatError(f"{self.path}, line {number}: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise DataFormatError(
                    f'{self.path}, line {number}: expected {{"step": int, ...}}'
                )
            yield (
                line + b"\n",
                {name: words.number(value) for name, value in record.items()},
            )


class NullRecorder:
    """A recorder that drops all records."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Does nothing."""

    def rewind(self, step: int) -> float:
        """Does nothing; returns 0."""
        del step
        return 0.0


def _line(record: Mapping[str, Any]) -> bytes:
    plain = {name: _plain(value) for name, value in record.items()}
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Returns a value, which may be of NumPy or JAX, as JSON can represent it."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, str | bool | numbers.Integral) or value is None:
        return value
    return words.plain(float(value))
