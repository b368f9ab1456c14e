"""Bytes that say what they hold: a header, arrays, and a checksum of both."""

import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from hpcjax.core.errors import DataFormatError

MAGIC = b"hpcjaxF1"
_DTYPES = ("<f2", "<f4", "<f8", "<i8", "|u1")
_HEAD = struct.Struct("<8sI")
_DIGEST = 8


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns a header and arrays as bytes.

    First come 8 bytes of magic and the length of the compressed header, then the
    header, the compressed arrays, and 8 bytes xxh3 of all before. Of all numbers of a
    dtype the first bytes come first, then the second ones: exponents are much alike.

    Args:
      header: what JSON can say.
      arrays: float16, float32, float64, int64 or uint8, by name.

    Examples:
      >>> header, arrays = unpack(pack({"a": 1}, {"x": np.arange(3.0)}))
      >>> header, arrays["x"].tolist()
      ({'a': 1}, [0.0, 1.0, 2.0])
    """
    listed = [[name, x.dtype.str, list(x.shape)] for name, x in arrays.items()]
    head = zlib.compress(json.dumps([header, listed]).encode(), 9)
    planes = b"".join(
        np.concatenate([x.ravel() for x in arrays.values() if x.dtype.str == dtype])
        .view(np.uint8)
        .reshape(-1, np.dtype(dtype).itemsize)
        .T.tobytes()
        for dtype in _find_dtypes(dtype for _, dtype, _ in listed)
    )
    content = _HEAD.pack(MAGIC, len(head)) + head + zlib.compress(planes, 9)
    return content + xxhash.xxh3_64_digest(content)


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and the arrays of bytes from `pack`.

    Raises:
      DataFormatError: they are of another kind, truncated, or any of them has changed.
    """
    if len(content) < _HEAD.size + _DIGEST or not content.startswith(MAGIC):
        raise DataFormatError(
            f"expected a compressed field, which begins with {MAGIC!r}: found "
            f"{len(content)} bytes that begin with {bytes(content[:8])!r}"
        )
    body, digest = content[:-_DIGEST], content[-_DIGEST:]
    if xxhash.xxh3_64_digest(body) != digest:
        raise DataFormatError(
            f"damaged or truncated: the checksum of {len(body)} bytes is "
            f"{xxhash.xxh3_64_hexdigest(body)}, expected {digest.hex()}"
        )
    _, length = _HEAD.unpack_from(body)
    try:
        start = _HEAD.size + length
        header, listed = json.loads(zlib.decompress(body[_HEAD.size : start]))
        return header, _cut(zlib.decompress(body[start:]), listed)
    except (zlib.error, ValueError, TypeError, KeyError) as error:
        raise DataFormatError(f"no compressed field: {error}") from error


def _find_dtypes(found: Any) -> list[str]:
    """Returns dtypes in the order in which they are stored."""
    found = set(found)
    if odd := found - set(_DTYPES):
        raise ValueError(f"dtypes must be of {_DTYPES}: got {sorted(odd)}")
    return [dtype for dtype in _DTYPES if dtype in found]


def _cut(planes: bytes, listed: list[Any]) -> dict[str, np.ndarray]:
    """Returns the listed arrays of what `pack` compressed."""
    arrays, start = {}, 0
    for dtype in _find_dtypes(each for _, each, _ in listed):
        own = [(name, shape) for name, each, shape in listed if each == dtype]
        sizes = [math.prod(shape) for _, shape in own]
        width = np.dtype(dtype).itemsize
        end = start + width * sum(sizes)
        block = np.frombuffer(planes[start:end], np.uint8).reshape(width, -1)
        flat = np.ascontiguousarray(block.T).view(dtype).ravel()
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        for (name, shape), part in zip(own, parts, strict=True):
            arrays[name] = part.reshape(shape)
        start = end
    return arrays
