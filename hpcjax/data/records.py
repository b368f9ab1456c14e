"""Files of JSON lines, plain or gzipped, with checks of their fields."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data.catalog import check_regular
from hpcjax.data.text import check_characters

T = TypeVar("T")


def read_lines(path: pathlib.Path, *, ended: bool = False) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of each line of a file, without the end of the line.

    The place is for error messages. A file named "….gz" is decompressed.

    Args:
      path: the file.
      ended: whether the last line of a whole file has an end too; one without is then
        of a file that was cut.

    Raises:
      DataMissing: no such file.
      DataFormatError: no regular file, empty, not UTF-8, or damaged.
    """
    if not path.exists():
        raise DataMissing(f"no file {path}")
    check_regular(path)
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if ended and not line.endswith(b"\n"):
                    raise DataFormatError(
                        f"{path}: line {number}: expected a line with an end, found "
                        f"the end of the file"
                    )
                yield f"{path}: line {number}", line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path}: line {number}: expected UTF-8, found "
            f"0x{error.object[error.start]:02x}"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataFormatError(
            f"{path}: damaged after line {number}: {error}"
        ) from error
    if number == 0:
        raise DataFormatError(f"{path}: line 1: expected a line, found an empty file")


def read_records(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) of each line of a JSON lines file.

    Raises:
      DataMissing: no such file.
      DataFormatError: no regular file, damaged, or a line is no JSON object.
    """
    for place, line in read_lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataFormatError(
                f"{place}: expected a JSON object, found {line[:40]!r}"
            ) from error
        if not isinstance(record, dict):
            raise DataFormatError(
                f"{place}: expected a JSON object, found {line[:40]!r}"
            )
        yield place, record


def field(record: Any, name: str, kind: type[T], place: str) -> T:
    """Returns a field of an object, after checking its type.

    Raises:
      DataFormatError: not an object, no such field, a value of another type, or text
        with a lone surrogate, half a character of UTF-16.

    Examples:
      >>> field({"goal": "sit down"}, "goal", str, "valid.jsonl: line 1")
      'sit down'
    """
    if not isinstance(record, Mapping):
        raise DataFormatError(
            f"{place}: expected an object with {name!r}, found {str(record)[:40]!r}"
        )
    value = record.get(name)
    if not isinstance(value, kind):
        raise DataFormatError(
            f"{place}: expected {name!r} to be a {kind.__name__}, found "
            f"{str(value)[:40]!r}"
        )
    if isinstance(value, str):
        check_characters(value, f"{place}: {name!r}")
    return value
