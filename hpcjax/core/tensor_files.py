"""Opens safetensors files, saying of a damaged one how many bytes are missing."""

import json
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
import safetensors

from hpcjax.core.errors import DataFormatError, DataMissing

# What a head that is not as it should be makes of reading it.
_DAMAGED = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
)


def open_safetensors(path: pathlib.Path) -> Any:
    """Opens a file, of which only the head is read, with tensors in numpy's terms.

    Raises:
      DataMissing: no such file.
      DataFormatError: it is truncated or damaged.
    """
    if not path.is_file():
        raise DataMissing(f"no such file: {path}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise DataFormatError(f"{path}: {_lacking(path)}{error}") from error


def _lacking(path: pathlib.Path) -> str:
    """Says how many bytes are missing, as far as the head of the file tells."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return f"damaged or truncated: the head needs more than {size} bytes; "
        try:
            head = json.loads(file.read(length))
            ends = [
                each["data_offsets"][1]
                for name, each in head.items()
                if name != "__metadata__"
            ]
            wanted = 8 + length + max(ends)
        except _DAMAGED:
            return "damaged head; "
    if wanted > size:
        return f"truncated: expected {wanted} bytes, found {size}; "
    return f"damaged: expected {wanted} bytes, found {size}; "
