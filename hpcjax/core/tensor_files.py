"""Opens safetensors files; for a damaged one the error says how many bytes miss."""

import json
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
import safetensors

from hpcjax.core.errors import DataFormatError, DataMissing

# The errors that reading a malformed header can raise.
_DAMAGED = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
)


def open_safetensors(path: pathlib.Path) -> Any:
    """Opens a file and reads its header only; tensors come as NumPy arrays.

    Raises:
      DataMissing: no such file.
      DataFormatError: it is truncated or damaged.
    """
    if not path.is_file():
        raise DataMissing(f"no such file: {path}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise DataFormatError(f"{path}: {_describe_damage(path)}{error}") from error


def _describe_damage(path: pathlib.Path) -> str:
    """Says how many bytes are missing, as far as the header of the file tells."""
    # The format: 8 bytes with the header's length (little endian), the header in JSON,
    # then the tensors; `data_offsets` are [begin, end) from the end of the header.
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
