"""Reads safetensors files, one or sharded by an index, and writes one."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
import numpy as np
import safetensors
import safetensors.numpy

from hpcjax.core import files
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DataMissing,
    UnsupportedOp,
)
from hpcjax.models.pretrained.stored import Stored

SINGLE = "model.safetensors"
KINDS = ("F64", "F32", "F16", "BF16")
INDEX = "model.safetensors.index.json"


def read_safetensors(folder: pathlib.Path) -> dict[str, Stored]:
    """Opens `model.safetensors`, or the shards that its index names, in a folder.

    Only the heads of the files are read; a tensor is copied out of the mapped file when
    it is asked for.

    Args:
      folder: a folder in Hugging Face's layout.

    Returns:
      The tensors by name; bfloat16 is a dtype of `ml_dtypes`.

    Raises:
      DataMissing: neither file is there, or a shard is not.
      DataFormatError: a file is truncated or damaged, or lacks a tensor of the index.
      UnsupportedOp: by a tensor's `read`, if it does not hold floating-point numbers.
    """
    if (folder / SINGLE).exists():
        return _read_file(folder / SINGLE)
    if not (folder / INDEX).exists():
        other = (folder / "pytorch_model.bin").exists()
        hint = (
            "; pytorch_model.bin is not read: save it as safetensors" if other else ""
        )
        raise DataMissing(f"no {SINGLE} and no {INDEX} in {folder}{hint}")
    places = _weight_map(folder / INDEX)
    shards = {name: _read_file(folder / name) for name in sorted(set(places.values()))}
    absent = [name for name, shard in places.items() if name not in shards[shard]]
    if absent:
        raise DataFormatError(
            f"{folder / INDEX}: lists tensors that its shards lack: {sorted(absent)}"
        )
    return {name: shards[shard][name] for name, shard in places.items()}


def _weight_map(path: pathlib.Path) -> Mapping[str, str]:
    """Returns the file of each tensor."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise DataFormatError(
            f"{path}: expected an object 'weight_map', found {places}"
        )
    for shard in places.values():
        try:
            files.check_name(shard if isinstance(shard, str) else "", "a shard's name")
        except ConfigError as error:
            raise DataFormatError(f"{path}: {error}") from error
    return places


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
      DataMissing: no such file.
      DataFormatError: it holds something else.
    """
    if not path.is_file():
        raise DataMissing(f"no file {path}")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataFormatError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataFormatError(f"{path}: expected a JSON object, found {type(content)}")
    return content


def _read_file(path: pathlib.Path) -> dict[str, Stored]:
    if not path.is_file():
        raise DataMissing(f"no file {path}")
    try:
        opened = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise DataFormatError(f"{path}: {_lacking(path)}{error}") from error
    return {name: _stored(opened, name, path) for name in opened.keys()}  # noqa: SIM118


def _stored(opened: Any, name: str, path: pathlib.Path) -> Stored:
    head = opened.get_slice(name)

    def read() -> np.ndarray:
        if head.get_dtype() not in KINDS:
            raise UnsupportedOp(
                f"{path}: tensor {name!r} is stored as {head.get_dtype()}; readable "
                f"are {', '.join(KINDS)}"
            )
        return opened.get_tensor(name)

    return Stored(tuple(head.get_shape()), head.get_dtype(), read)


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
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "damaged head; "
    if wanted > size:
        return f"truncated: expected {wanted} bytes, found {size}; "
    return f"damaged: expected {wanted} bytes, found {size}; "


def write_safetensors(folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes `model.safetensors`, whole or not at all.

    Raises:
      DiskFull: no space is left.
    """
    whole = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    with files.replacing(folder / SINGLE) as temporary:
        safetensors.numpy.save_file(whole, temporary, metadata={"format": "pt"})
