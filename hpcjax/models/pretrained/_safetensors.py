"""Reading safetensors files, single or sharded by an index, and writing single ones."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from hpcjax.core import files, tensor_files
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DataMissing,
    UnsupportedOp,
)
from hpcjax.models.pretrained.stored import PARTS, Stored

SINGLE = "model.safetensors"
KINDS = ("F64", "F32", "F16", "BF16")
INDEX = "model.safetensors.index.json"


def read_safetensors(folder: pathlib.Path) -> dict[str, Stored]:
    """Opens `model.safetensors`, or the shards that its index names, in a folder.

    Only the headers of the files are read; a tensor is copied from the mapped file when
    its `read` is called.

    Args:
      folder: a folder in Hugging Face's layout.

    Returns:
      The tensors by name; bfloat16 arrays have the dtype of `ml_dtypes`.

    Raises:
      DataMissing: neither file is there, or a shard is not.
      DataFormatError: a file is truncated or damaged, or lacks a tensor of the index.
      UnsupportedOp: by a tensor's `read`, if it does not hold floating-point numbers.
    """
    if (folder / SINGLE).exists():
        return read_file(folder / SINGLE)
    if not (folder / INDEX).exists():
        other = (folder / "pytorch_model.bin").exists()
        hint = (
            "; pytorch_model.bin is not read: save it as safetensors" if other else ""
        )
        raise DataMissing(f"no {SINGLE} and no {INDEX} in {folder}{hint}")
    places = _weight_map(folder / INDEX)
    shards = {name: read_file(folder / name) for name in sorted(set(places.values()))}
    absent = [name for name, shard in places.items() if name not in shards[shard]]
    if absent:
        raise DataFormatError(
            f"{folder / INDEX}: lists tensors that its shards lack: {sorted(absent)}"
        )
    return {name: shards[shard][name] for name, shard in places.items()}


def _weight_map(path: pathlib.Path) -> Mapping[str, str]:
    """Returns `{tensor: file}` of an index; file names must not leave the folder."""
    places = files.read_object(path).get("weight_map")
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


def read_file(path: pathlib.Path) -> dict[str, Stored]:
    """Opens one file; see `read_safetensors`."""
    opened = tensor_files.open_safetensors(path)
    return {name: _make_stored(opened, name, path) for name in opened.keys()}  # noqa: SIM118


def _make_stored(opened: Any, name: str, path: pathlib.Path) -> Stored:
    """Returns a tensor of an open file; only GPTQ's parts may hold integers."""
    head = opened.get_slice(name)
    readable = (*KINDS, "I32") if name.rpartition(".")[2] in PARTS else KINDS

    def read() -> np.ndarray:
        if head.get_dtype() not in readable:
            raise UnsupportedOp(
                f"{path}: tensor {name!r} is stored as {head.get_dtype()}; readable "
                f"are {', '.join(readable)}"
            )
        return opened.get_tensor(name)

    return Stored(tuple(head.get_shape()), head.get_dtype(), read)


def save_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file as `transformers` expects it; see `files.replacing`."""
    whole = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    safetensors.numpy.save_file(whole, path, metadata={"format": "pt"})
