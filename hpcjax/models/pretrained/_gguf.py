"""Reading GGUF files, versions 2 and 3; tensors are dequantised when they are read.

The package `gguf` knows the formats of tensors. Its reader is not used: it believes
every size that a file states, and goes on behind the end of one that is cut.

References:
  The GGUF specification of the ggml project.
"""

import importlib.metadata
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core.errors import DataFormatError, DataMissing, UnsupportedOp
from hpcjax.models.pretrained.stored import Stored

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_AXES = 4
LONGEST = 2**31
# Number types of metadata by their code, in the format of `struct`.
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
# The least bytes of a key with its value (length, type, a byte), and of a tensor's
# description (length, axes, one size, type, offset).
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


class Gguf(NamedTuple):
    """The content of a GGUF file.

    Attributes:
      metadata: values by key; arrays are lists.
      tensors: tensors by name, which are read from the mapped file as float32.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]


class _Cursor:
    """Reads forward through bytes; raises DataFormatError beyond their end."""

    def __init__(self, path: pathlib.Path, content: memoryview) -> None:
        self.path, self.content, self.at = path, content, 0

    def wrong(self, found: str) -> DataFormatError:
        """Returns an error at this place."""
        return DataFormatError(f"{self.path}: byte {self.at}: {found}")

    def need(self, size: int, what: str) -> None:
        """Raises DataFormatError unless `size` more bytes are there."""
        left = len(self.content) - self.at
        if size > left:
            raise self.wrong(
                f"truncated: expected {size} bytes of {what}, found {left}"
            )

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        self.need(size, what)
        (value,) = struct.unpack_from(code, self.content, self.at)
        self.at += size
        return value

    def string(self, what: str) -> str:
        size = self.number("<Q", what)
        self.need(size, what)
        raw = bytes(self.content[self.at : self.at + size])
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"expected {what} in UTF-8: {error}") from error
        self.at += size
        return text

    def value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.wrong(f"expected a type of value for {what}, found {kind}")
        inner, count = self.number("<I", what), self.number("<Q", what)
        if inner in _NUMBERS:
            code = _NUMBERS[inner]
            size = count * struct.calcsize(code)
            self.need(size, what)
            found = np.frombuffer(self.content[self.at : self.at + size], code)
            self.at += size
            return found.tolist()
        if inner != _STRING:
            raise self.wrong(f"expected numbers or strings in {what}, found {inner}")
        self.need(8 * count, what)
        return [self.string(what) for _ in range(count)]


def read_gguf(path: pathlib.Path) -> Gguf:
    """Opens a GGUF file; only its header is read, tensors are memory-mapped.

    Every size is checked against that of the file before memory is allocated for it.

    Args:
      path: the file. Tensors may be in any format that the package `gguf` dequantises,
        such as F32, F16, BF16, Q8_0, Q4_0, Q5_1, Q4_K and Q6_K; reading one in another
        format raises UnsupportedOp.

    Returns:
      Metadata and tensors. The file stores the innermost dimension first; shapes here
      have it last, so that a matrix is `[outputs, inputs]`. Rows of llama's queries and
      keys stay in the order of the file, for interleaved rotation.

    Raises:
      DataMissing: no such file.
      DataFormatError: the file is not GGUF, truncated or damaged.
    """
    if not path.is_file():
        raise DataMissing(f"no file {path}")
    if path.stat().st_size == 0:
        raise DataFormatError(f"{path}: expected a GGUF file, found an empty one")
    content = np.memmap(path, np.uint8, "r")
    cursor = _Cursor(path, content.data)
    keys, described = _read_header(cursor)
    metadata: dict[str, Any] = {}
    for number in range(keys):
        key = cursor.string(f"key {number}")
        kind = cursor.number("<I", f"the type of {key!r}")
        metadata[key] = cursor.value(kind, repr(key))
    infos = [_read_info(cursor, number) for number in range(described)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.wrong(f"expected an alignment of at least 1, found {alignment!r}")
    start = math.ceil(cursor.at / alignment) * alignment
    tensors: dict[str, Stored] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise DataFormatError(f"{path}: two tensors are called {name!r}")
        tensors[name] = _make_stored(path, content, name, shape, kind, start + offset)
    return Gguf(metadata, tensors)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns how many keys and tensors follow."""
    magic = bytes(cursor.content[:4])
    if magic != MAGIC:
        raise cursor.wrong(f"expected {MAGIC!r}, found {magic!r}")
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        order = " (a big-endian file)" if version >> 24 in VERSIONS else ""
        raise cursor.wrong(f"expected a version of {VERSIONS}, found {version}{order}")
    tensors = cursor.number("<Q", "the number of tensors")
    keys = cursor.number("<Q", "the number of keys")
    cursor.need(
        keys * _LEAST_KEY + tensors * _LEAST_TENSOR,
        f"{keys} keys and the descriptions of {tensors} tensors",
    )
    return keys, tensors


def _read_info(cursor: _Cursor, number: int) -> tuple[str, tuple[int, ...], int, int]:
    """Returns name, shape, type and offset of the next tensor."""
    name = cursor.string(f"the name of tensor {number}")
    axes = cursor.number("<I", f"the shape of {name!r}")
    if not 1 <= axes <= MOST_AXES:
        raise cursor.wrong(f"expected 1 to {MOST_AXES} axes of {name!r}, found {axes}")
    sizes = [cursor.number("<Q", f"the shape of {name!r}") for _ in range(axes)]
    kind = cursor.number("<I", f"the type of {name!r}")
    return name, tuple(sizes[::-1]), kind, cursor.number("<Q", f"{name!r}'s offset")


def _make_stored(
    path: pathlib.Path,
    content: np.ndarray,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    at: int,
) -> Stored:
    """Returns a tensor, after checking that the file has all its bytes."""
    import gguf

    def refuse() -> np.ndarray:
        raise UnsupportedOp(
            f"{path}: tensor {name!r} is stored as {label}, which the package gguf "
            f"{gguf_version()} does not dequantise"
        )

    try:
        known = gguf.GGMLQuantizationType(kind)
    except ValueError:
        label = f"type {kind}"
        return Stored(shape, label, refuse)
    label = known.name
    values, width = gguf.GGML_QUANT_SIZES[known]
    if shape[-1] % values:
        raise DataFormatError(
            f"{path}: tensor {name!r}: expected rows of a multiple of {values} values "
            f"for {label}, found shape {shape}"
        )
    size = math.prod(shape) // values * width
    if at + size > len(content):
        raise DataFormatError(
            f"{path}: truncated: tensor {name!r} ({label}, shape {shape}) needs "
            f"bytes {at} to {at + size}, the file has {len(content)}"
        )

    if max(shape) > LONGEST:
        raise DataFormatError(
            f"{path}: tensor {name!r}: expected at most {LONGEST} along an axis, found "
            f"shape {shape}"
        )

    def read() -> np.ndarray:
        if not size:  # the package cannot
            return np.zeros(shape, np.float32)
        rows = np.asarray(content[at : at + size]).reshape(math.prod(shape[:-1]), -1)
        try:
            found = gguf.quants.dequantize(rows, known)
        except NotImplementedError:
            return refuse()
        return found.astype(np.float32, copy=False).reshape(shape)

    return Stored(shape, label, read)


def gguf_version() -> str:
    """Returns that of the package."""
    return importlib.metadata.version("gguf")
