"""Parameters from the tensors of a checkpoint, and tensors from parameters."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core import trees
from hpcjax.core.errors import DataFormatError
from hpcjax.models.config import BertConfig, CausalLmConfig
from hpcjax.models.pretrained.names import Family, Name
from hpcjax.models.pretrained.stored import Stored

_STACKED = "{i}"


def read_params(
    family: Family,
    stored: Mapping[str, Stored],
    like: Any,
    config: CausalLmConfig | BertConfig,
    source: str,
) -> Any:
    """Fills a tree of parameters with the tensors of a checkpoint.

    All names and shapes are checked before the first tensor is read.

    Args:
      family: the table of names.
      stored: the checkpoint's tensors.
      like: the shapes and dtypes of the model's parameters.
      config: the model.
      source: the checkpoint's name, for errors.

    Raises:
      DataFormatError: names that are missing or unexpected, all listed, or a tensor of
        another shape.
    """
    flat = trees.flatten(like)
    lines = [line for line in family.names if line.path in flat]
    found = _by_canonical_name(family, stored, source)
    wanted = {
        name: _shape(line, flat[line.path].shape)
        for line in lines
        for name in _names(line, flat[line.path].shape)
    }
    _check_names(family, set(wanted), set(found), source)
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise DataFormatError(
                f"{source}: tensor {name!r} should have shape {shape}, as the config "
                f"says: got {found[name].shape}"
            )
    leaves = {}
    for line in lines:
        shape, dtype = flat[line.path].shape, flat[line.path].dtype
        # One parameter at a time: the host holds no second copy of the model.
        layers = np.empty(shape, dtype)
        parts = layers if _STACKED in line.name else layers[None]
        for part, name in zip(parts, _names(line, shape), strict=True):
            part[...] = _ours(line, found[name].read(), config)
        leaves[line.path] = jnp.asarray(layers)
    return trees.unflatten(like, leaves)


def write_tensors(family: Family, params: Any) -> dict[str, np.ndarray]:
    """Returns parameters as the tensors of a new file, by full name.

    Args:
      family: the table of names, of a Hugging Face layout.
      params: the parameters; every one has to be in the table.
    """
    flat = {path: jax.device_get(leaf) for path, leaf in trees.flatten(params).items()}
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for line in family.names:
        if line.path not in flat:
            continue
        ours = flat[line.path]
        layers = ours if _STACKED in line.name else ours[None]
        for name, layer in zip(_names(line, ours.shape), layers, strict=True):
            parts[family.full(name)].append(layer.T if line.turned else layer)
    # The thirds of a tensor stand in the table in their order.
    return {name: np.concatenate(each, axis=-1) for name, each in parts.items()}


def _names(line: Name, shape: tuple[int, ...]) -> list[str]:
    """Returns the tensors behind one of our parameters, layer by layer."""
    if _STACKED not in line.name:
        return [line.name]
    return [line.name.replace(_STACKED, str(layer)) for layer in range(shape[0])]


def _shape(line: Name, ours: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that the tensor of one layer should have."""
    shape = ours[1:] if _STACKED in line.name else ours
    if line.turned:
        shape = shape[::-1]
    return shape if line.third is None else (*shape[:-1], 3 * shape[-1])


def _ours(
    line: Name, theirs: np.ndarray, config: CausalLmConfig | BertConfig
) -> np.ndarray:
    """Returns our parameter of one layer."""
    if line.third is not None:
        theirs = np.split(theirs, 3, axis=-1)[line.third]
    if line.interleaved:
        # Stored rows 0, 1, 2, ... of a head are ours 0, half, 1, half + 1, ...
        pairs = (-1, config.width // config.heads // 2, 2, theirs.shape[-1])
        theirs = theirs.reshape(pairs).swapaxes(1, 2).reshape(theirs.shape)
    return theirs.T if line.turned else theirs


def _by_canonical_name(
    family: Family, stored: Mapping[str, Stored], source: str
) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        canonical = family.canonical(name)
        if canonical in found:
            raise DataFormatError(f"{source}: {canonical!r} is there twice")
        found[canonical] = tensor
    return found


def _check_names(
    family: Family, wanted: set[str], found: set[str], source: str
) -> None:
    missing = sorted(wanted - found)
    unexpected = sorted(
        name
        for name in found - wanted
        if not any(re.fullmatch(pattern, name) for pattern in family.harmless)
    )
    if missing or unexpected:
        raise DataFormatError(
            f"{source}: the tensors are not those of the config: missing {missing}, "
            f"unexpected {unexpected}"
        )
