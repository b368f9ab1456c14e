"""`MANIFEST.json`: the content of a checkpoint with checksums.

Orbax stores no checksums of array data, so that a flipped bit would be restored as a
wrong number. The manifest lists every leaf with the xxh3-128 of its bytes as they were
fetched from the devices, every file with its size and xxh3-128, and a checksum of
itself. It is written last: a checkpoint without one is not complete.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

import hpcjax
from hpcjax.core import files
from hpcjax.core.errors import CheckpointCorrupt

NAME = "MANIFEST.json"
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A contiguous part of a leaf that one process saved; mostly the whole leaf.

    Attributes:
      start: its first index in each dimension of the leaf.
      shape: its size in each dimension.
      xxh3_128: checksum of its bytes in C order.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_128: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a checkpoint.

    Attributes:
      shape: its global shape; of the key data for a typed key.
      dtype: the dtype's name; of the key data for a typed key.
      key: the key dtype, such as `"key<fry>"`, or empty for a plain array.
      blocks: the parts that together cover it.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str = ""
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """Size in bytes and checksum of one file."""

    size: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
      step: the step at which it was saved.
      leaves: by path, such as `"params/dense/kernel"`.
      files: by path inside the checkpoint, the manifest itself excepted.
      extra: JSON values that the caller saved with it.
      version: the hpcjax version that wrote it.
    """

    step: int
    leaves: Mapping[str, Leaf]
    files: Mapping[str, File]
    extra: Mapping[str, Any]
    version: str = hpcjax.__version__


def checksum(array: np.ndarray) -> str:
    """Returns the xxh3-128 of an array's bytes in C order, whatever its dtype.

    Examples:
      >>> checksum(np.zeros(2, np.float32)) == checksum(np.zeros(1, np.float64))
      True
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data)


def scan(directory: pathlib.Path) -> dict[str, File]:
    """Returns size and checksum of every file below `directory` but the manifest."""
    files_by_name = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != NAME:
            size = path.stat().st_size
            files_by_name[name] = File(size=size, xxh3_128=files.checksum(path))
    return files_by_name


def leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    """Returns a leaf as JSON values."""
    return dataclasses.asdict(leaf)


def leaf_from_json(value: Mapping[str, Any]) -> Leaf:
    """Returns the leaf that `leaf_to_json` made `value` from."""
    blocks = tuple(
        Block(
            start=tuple(block["start"]),
            shape=tuple(block["shape"]),
            xxh3_128=block["xxh3_128"],
        )
        for block in value["blocks"]
    )
    return Leaf(
        shape=tuple(value["shape"]),
        dtype=value["dtype"],
        key=value["key"],
        blocks=blocks,
    )


def write(directory: pathlib.Path, manifest: Manifest) -> None:
    """Writes `directory/MANIFEST.json`, completely or not at all.

    Raises:
      DiskFull: there is no space for it.
    """
    files.write_atomic(directory / NAME, _encode(dataclasses.asdict(manifest)))


def read(directory: pathlib.Path, step: int) -> Manifest:
    """Reads the manifest of `step` and checks it against its own checksum.

    Raises:
      CheckpointCorrupt: it cannot be read, was changed, or belongs to another step.
    """
    try:
        text = (directory / NAME).read_bytes()
        body = json.loads(text)["body"]
        intact = _encode(body) == text
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(step, f"file {NAME!r} cannot be read: {error}") from error
    if not intact:
        raise _corrupt(step, f"file {NAME!r} does not match its checksum")
    if body["step"] != step:
        raise _corrupt(step, f"file {NAME!r} belongs to step {body['step']}")
    return Manifest(
        step=body["step"],
        leaves={path: leaf_from_json(leaf) for path, leaf in body["leaves"].items()},
        files={name: File(**entry) for name, entry in body["files"].items()},
        extra=body["extra"],
        version=body["version"],
    )


def check_files(directory: pathlib.Path, manifest: Manifest) -> None:
    """Compares every listed file with its size and checksum.

    Files that are not listed are ignored: nothing refers to them.

    Raises:
      CheckpointCorrupt: names the first file that is missing or differs.
    """
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != entry.size:
                raise _corrupt(
                    manifest.step,
                    f"file {name!r} must have {entry.size} bytes: got {size}",
                )
            if files.checksum(path) != entry.xxh3_128:
                raise _corrupt(
                    manifest.step, f"file {name!r} does not match its checksum"
                )
        except OSError as error:
            raise _corrupt(
                manifest.step, f"file {name!r} cannot be read: {error.strerror}"
            ) from error


def check_leaves(arrays: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Compares restored arrays with the manifest, block by block.

    Raises:
      CheckpointCorrupt: names the first leaf that is missing or differs.
    """
    for path, leaf in manifest.leaves.items():
        array = arrays.get(path)
        if array is None:
            raise _corrupt(manifest.step, f"leaf {path!r} is missing")
        if array.shape != leaf.shape or array.dtype.name != leaf.dtype:
            raise _corrupt(
                manifest.step,
                f"leaf {path!r} must be {leaf.dtype}{list(leaf.shape)}: "
                f"got {array.dtype.name}{list(array.shape)}",
            )
        if sum(int(np.prod(block.shape)) for block in leaf.blocks) != array.size:
            raise _corrupt(manifest.step, f"leaf {path!r} is not wholly covered")
        for block in leaf.blocks:
            if checksum(array[(*_slices(block), ...)]) != block.xxh3_128:
                raise _corrupt(
                    manifest.step, f"leaf {path!r} does not match its checksum"
                )


def merge(parts: Iterable[Mapping[str, Leaf]]) -> dict[str, Leaf]:
    """Joins the leaves of several processes, with the blocks of all of them."""
    merged: dict[str, Leaf] = {}
    for part in parts:
        for path, leaf in part.items():
            before = merged[path].blocks if path in merged else ()
            merged[path] = dataclasses.replace(leaf, blocks=before + leaf.blocks)
    return merged


def _slices(block: Block) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size)
        for start, size in zip(block.start, block.shape, strict=True)
    )


def _encode(body: Any) -> bytes:
    """Returns the canonical text of `body` with its checksum.

    `read` encodes what it has read once more and compares bytes, which verifies the
    whole file and not only the part that the checksum covers.
    """
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    whole = {"body": body, "xxh3_128": digest}
    return (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()


def _corrupt(step: int, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"checkpoint of step {step}: {what}")
