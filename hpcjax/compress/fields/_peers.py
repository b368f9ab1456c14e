"""What fields are compressed with otherwise: SZ3, cosine transforms, and EOFs."""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from hpcjax.compress.fields._container import pack, unpack
from hpcjax.core.errors import UnsupportedOp

Algorithm = Literal["INTERP_LORENZO", "LORENZO_REG"]
_MOST = 255  # what a byte of a gap counts; it is followed by more


def _import_sz3() -> Any:
    try:
        import pysz
    except ImportError as error:
        raise UnsupportedOp(
            "SZ3 needs the package pysz: pip install 'hpcjax[fields]'"
        ) from error
    return pysz


def sz3_encode(
    values: Float[np.ndarray, "..."],
    bound: float,
    algorithm: Algorithm = "INTERP_LORENZO",
) -> bytes:
    """Returns SZ3's stream; its shape is not in it.

    Args:
      values: float32, in the shape along whose axes SZ3 predicts.
      bound: largest error, over the range of values.
      algorithm: of prediction: of interpolation and Lorenzo the better one, or Lorenzo.

    Raises:
      UnsupportedOp: the package `pysz` is missing.
    """
    sz = _import_sz3()
    config = sz.szConfig(values.shape)
    config.errorBoundMode = sz.szErrorBoundMode.REL
    config.relErrorBound = bound
    config.cmprAlgo = getattr(sz.szAlgorithm, algorithm)
    stream, _ = sz.sz.compress(np.ascontiguousarray(values, np.float32), config)
    return stream.tobytes()


def sz3_decode(content: bytes, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """Returns the values of a stream of `sz3_encode`, float32."""
    sz = _import_sz3()
    stream = np.frombuffer(content, np.uint8)
    return sz.sz.decompress(stream, np.float32, shape)[0]


def dct_encode(values: Float[np.ndarray, "..."], keep: int) -> bytes:
    """Returns the `keep` largest coefficients of a DCT-II over all axes, as bytes.

    Coefficients are float16, of the largest. Places are counted from one to the next, a
    byte of 255 is followed by what is missing.
    """
    from scipy import fft

    found = fft.dctn(values.astype(np.float64), norm="ortho").ravel()
    keep = min(keep, found.size)
    places = np.sort(np.argpartition(-np.abs(found), keep - 1)[:keep])
    gaps = np.diff(places, prepend=0)
    ends = np.cumsum(gaps // _MOST + 1)
    gap_bytes = np.full(ends[-1], _MOST, np.uint8)
    gap_bytes[ends - 1] = gaps % _MOST
    scale = float(np.abs(found).max()) or 1.0
    header = {"kind": "dct", "shape": list(values.shape), "scale": scale}
    kept = (found[places] / scale).astype(np.float16)
    return pack(header, {"gaps": gap_bytes, "kept": kept})


def dct_decode(content: bytes) -> Float[np.ndarray, "..."]:
    """Returns the values of `dct_encode`'s bytes, float32."""
    from scipy import fft

    header, arrays = unpack(content)
    gaps = arrays["gaps"]
    # A gap ends with its first byte that is not 255.
    places = np.cumsum(gaps.astype(np.int64))[gaps < _MOST]
    found = np.zeros(header["shape"])
    found.ravel()[places] = header["scale"] * arrays["kept"].astype(np.float64)
    return fft.idctn(found, norm="ortho").astype(np.float32)


def eof_encode(
    values: Float[np.ndarray, "t ..."], weights: Float[np.ndarray, "..."], rank: int
) -> bytes:
    """Returns the leading empirical orthogonal functions, float16, as bytes.

    Of all products of `rank` series and patterns theirs has the least weighted square
    error. No mean is taken off first, which would be a pattern more.

    Args:
      values: time first.
      weights: of points, broadcast against values of one time.
      rank: how many.
    """
    rows = values.reshape(len(values), -1).astype(np.float64)
    root = np.sqrt(np.broadcast_to(weights, values.shape[1:])).ravel()
    # The poles have no weight, and would have no pattern.
    root = np.maximum(root, 1e-3)
    # Left singular vectors; the largest ones lose no digits by squaring.
    series = np.linalg.eigh((rows * root) @ (rows * root).T)[1][:, ::-1][:, :rank]
    patterns = series.T @ rows
    # Both in units of their largest, where float16 has most digits.
    peaks = _largest(patterns, 1)
    series = series * peaks.T
    scale = _largest(series, 0)
    arrays = {
        "scale": scale.astype(np.float32),
        "series": (series / scale).astype(np.float16),
        "patterns": (patterns / peaks).astype(np.float16),
    }
    return pack({"kind": "eof", "shape": list(values.shape)}, arrays)


def eof_decode(content: bytes) -> Float[np.ndarray, "..."]:
    """Returns the values of `eof_encode`'s bytes, float32."""
    header, arrays = unpack(content)
    series = arrays["series"].astype(np.float32) * arrays["scale"]
    return (series @ arrays["patterns"].astype(np.float32)).reshape(header["shape"])


def _largest(x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the largest size along an axis, which is kept; 1 where it is zero."""
    largest = np.abs(x).max(axis=axis, keepdims=True)
    return np.where(largest > 0, largest, 1)
