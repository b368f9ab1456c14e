"""Parameters from the tensors of a checkpoint, and tensors from parameters."""

import operator
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, DataFormatError, UnsupportedOp
from hpcjax.kernels import (
    QuantizedMatrix,
    join_outputs,
    stack_matrices,
    take_outputs,
)
from hpcjax.models.config import BertConfig, CausalLmConfig
from hpcjax.models.pretrained.names import Family, Name
from hpcjax.models.pretrained.stored import PACKED, Stored

_STACKED = "{i}"


def read_params(
    family: Family,
    stored: Mapping[str, Stored],
    like: Any,
    config: CausalLmConfig | BertConfig,
    source: str,
) -> Any:
    """Fills a tree of parameters with the tensors of a checkpoint.

    All names and shapes are checked before the first tensor is read. A packed matrix
    stays packed, on the grid of its file.

    Args:
      family: the table of names.
      stored: the checkpoint's tensors.
      like: the shapes and dtypes of the model's parameters.
      config: the model.
      source: the checkpoint's name, for errors.

    Raises:
      DataFormatError: names that are missing or unexpected, all listed, or a tensor of
        another shape.
      UnsupportedOp: a packed tensor that is no kernel, or of which some layers are
        packed and some are not.
    """
    flat = trees.flatten(like)
    lines = [line for line in family.names if line.path in flat]
    found = _by_canonical_name(family, stored, source)
    wanted = {
        name: line for line in lines for name in _names(line, flat[line.path].shape)
    }
    _check_names(family, set(wanted), found, source)
    for name, line in wanted.items():
        shape = _shape(line, flat[line.path].shape, _is_packed(found[name]))
        if found[name].shape != shape:
            raise DataFormatError(
                f"{source}: tensor {name!r} should have shape {shape}, as the config "
                f"says: got {found[name].shape}"
            )
    leaves: dict[str, Any] = {}
    for line in lines:
        shape, dtype = flat[line.path].shape, flat[line.path].dtype
        layers = [found[name] for name in _names(line, shape)]
        if any(map(_is_packed, layers)):
            leaves[line.path] = _our_matrix(line, layers, source)
            continue
        # One parameter at a time: the host holds no second copy of the model.
        whole = np.empty(shape, dtype)
        parts = whole if _STACKED in line.name else whole[None]
        for part, layer in zip(parts, layers, strict=True):
            part[...] = _ours(line, layer.read(), config)
        leaves[line.path] = jnp.asarray(whole)
    return trees.unflatten(like, leaves)


class Written(NamedTuple):
    """Parameters as a checkpoint has them, by full name.

    Attributes:
      tensors: the plain ones.
      packed: the packed ones, by the name of their layer, without an ending.
    """

    tensors: dict[str, np.ndarray]
    packed: dict[str, QuantizedMatrix]


def write_tensors(family: Family, params: Any) -> Written:
    """Returns parameters as the tensors of a new file.

    Args:
      family: the table of names, of a Hugging Face layout.
      params: the parameters; every one has to be in the table.

    Raises:
      ConfigError: thirds of one tensor of which some are packed and some are not, or
        that cannot be side by side.
    """
    flat = jax.device_get(trees.flatten(params, is_packed))
    parts: dict[str, list[Any]] = defaultdict(list)
    for line in family.names:
        if line.path not in flat:
            continue
        ours = flat[line.path]
        for number, name in enumerate(_names(line, ours.shape)):
            layer = ours
            if _STACKED in line.name:
                layer = jax.tree.map(operator.itemgetter(number), ours)
            turned = line.turned and not is_packed(layer)
            parts[family.full(name)].append(layer.T if turned else layer)
    written = Written({}, {})
    # The thirds of a tensor stand in the table in their order.
    for name, each in parts.items():
        if any(map(is_packed, each)):
            if not all(map(is_packed, each)):
                raise ConfigError(f"the parts of {name!r} must be packed, all or none")
            written.packed[name.removesuffix(".weight")] = _joined(name, each)
        else:
            written.tensors[name] = np.concatenate(each, axis=-1)
    return written


def _joined(name: str, thirds: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    if len(thirds) == 1:
        return thirds[0]
    try:
        return join_outputs(thirds)
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from error


def is_packed(leaf: Any) -> bool:
    """Says whether a parameter is a packed matrix."""
    return isinstance(leaf, QuantizedMatrix)


def _names(line: Name, shape: tuple[int, ...]) -> list[str]:
    """Returns the tensors behind one of our parameters, layer by layer."""
    if _STACKED not in line.name:
        return [line.name]
    return [line.name.replace(_STACKED, str(layer)) for layer in range(shape[0])]


def _shape(line: Name, ours: tuple[int, ...], packed: bool) -> tuple[int, ...]:
    """Returns the shape that the tensor of one layer should have."""
    shape = ours[1:] if _STACKED in line.name else ours
    if line.turned and not packed:
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


def _our_matrix(line: Name, layers: Sequence[Stored], source: str) -> QuantizedMatrix:
    """Returns our packed parameter, of all layers."""
    packed = sum(map(_is_packed, layers))
    if packed < len(layers):
        raise UnsupportedOp(
            f"{source}: {line.name!r} must be packed in all layers or in none: got "
            f"{packed} of {len(layers)}"
        )
    if not line.path.endswith("/kernel"):
        raise UnsupportedOp(
            f"{source}: only kernels of dense layers can be packed: got {line.name!r}"
        )
    matrices = [layer.read() for layer in layers]
    if line.third is not None:
        width = matrices[0].shape[-1] // 3
        own = slice(line.third * width, (line.third + 1) * width)
        matrices = [take_outputs(matrix, own) for matrix in matrices]
    return stack_matrices(matrices) if _STACKED in line.name else matrices[0]


def _is_packed(stored: Stored) -> bool:
    """Says whether a tensor of the file is a packed matrix."""
    return stored.kind == PACKED


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
    family: Family, wanted: set[str], found: Mapping[str, Stored], source: str
) -> None:
    missing = sorted(wanted - found.keys())
    unexpected = sorted(
        name
        for name in found.keys() - wanted
        if not _harmless(family, name, found[name]) and not _idle_bias(name, found)
    )
    if missing or unexpected:
        raise DataFormatError(
            f"{source}: the tensors are not those of the config: missing {missing}, "
            f"unexpected {unexpected}"
        )


def _harmless(family: Family, name: str, stored: Stored) -> bool:
    # A packed head is no copy of the table.
    return not _is_packed(stored) and any(
        re.fullmatch(pattern, name) for pattern in family.harmless
    )


def _idle_bias(name: str, found: Mapping[str, Stored]) -> bool:
    """Says whether it is the bias of zeros that some writers give a packed matrix."""
    weight = found.get(f"{name.removesuffix('.bias')}.weight")
    if not name.endswith(".bias") or weight is None or not _is_packed(weight):
        return False
    return not found[name].read().any()
