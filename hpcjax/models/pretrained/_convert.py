"""Converting between the tensors of a checkpoint and a tree of parameters."""

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
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.pretrained.names import Family, Name
from hpcjax.models.pretrained.stored import PACKED, Stored
from hpcjax.models.transformer_config import CausalLmConfig

_STACKED = "{i}"


def read_params(
    family: Family,
    stored: Mapping[str, Stored],
    like: Any,
    config: CausalLmConfig | BertConfig,
    source: str,
) -> Any:
    """Fills a tree of parameters with the tensors of a checkpoint.

    All names and shapes are checked before the first tensor is read. Packed (quantized)
    matrices stay packed, with the scales and zero points of the file.

    Args:
      family: the table of names.
      stored: the checkpoint's tensors.
      like: the shapes and dtypes of the model's parameters.
      config: the model.
      source: the checkpoint's name, for errors.

    Raises:
      DataFormatError: missing or unexpected names, all listed, or a wrong shape.
      UnsupportedOp: a packed tensor that is not a kernel, or that is packed in some
        layers only.
    """
    flat = trees.flatten(like)
    lines = [line for line in family.names if line.path in flat]
    tensors = _index_by_canonical_name(family, stored, source)
    wanted = {
        name: line
        for line in lines
        for name in _tensor_names(line, flat[line.path].shape)
    }
    _check_names(family, set(wanted), tensors, source)
    for name, line in wanted.items():
        shape = _tensor_shape(line, flat[line.path].shape, _is_packed(tensors[name]))
        if tensors[name].shape != shape:
            raise DataFormatError(
                f"{source}: tensor {name!r} should have shape {shape}, as the config "
                f"says: got {tensors[name].shape}"
            )
    leaves: dict[str, Any] = {}
    for line in lines:
        shape, dtype = flat[line.path].shape, flat[line.path].dtype
        layers = [tensors[name] for name in _tensor_names(line, shape)]
        if any(map(_is_packed, layers)):
            leaves[line.path] = _convert_packed(line, layers, config, source)
            continue
        # One parameter at a time: the host holds no second copy of the model.
        whole = np.empty(shape, dtype)
        parts = whole if _STACKED in line.name else whole[None]
        for part, layer in zip(parts, layers, strict=True):
            part[...] = _convert_layer(line, layer.read(), config)
        leaves[line.path] = jnp.asarray(whole)
    return trees.unflatten(like, leaves)


class Written(NamedTuple):
    """Parameters as the tensors of a checkpoint.

    Attributes:
      tensors: plain tensors by full name.
      packed: packed matrices by full name without the ending `.weight`.
    """

    tensors: dict[str, np.ndarray]
    packed: dict[str, QuantizedMatrix]


def write_tensors(
    family: Family, params: Any, config: CausalLmConfig | BertConfig
) -> Written:
    """Returns parameters as the tensors of a new file.

    Args:
      family: the table of names of a Hugging Face layout.
      params: the parameters, all of which must be in the table.
      config: the model.

    Raises:
      ConfigError: query, key and value share a tensor, but only some of them are
        packed, or their packed matrices cannot be joined.
    """
    flat = jax.device_get(trees.flatten(params, is_packed))
    parts: dict[str, list[Any]] = defaultdict(list)
    lines: dict[str, Name] = {}
    for line in family.names:
        if line.path not in flat:
            continue
        ours = flat[line.path]
        for number, name in enumerate(_tensor_names(line, ours.shape)):
            layer = ours
            if _STACKED in line.name:
                layer = jax.tree.map(operator.itemgetter(number), ours)
            parts[family.full(name)].append(layer)
            lines[family.full(name)] = line
    written = Written({}, {})
    # The table lists the thirds of a tensor in their order, so that they concatenate.
    for name, each in parts.items():
        line, order = lines[name], slice(None)
        if line.third is not None:
            outputs = each[0].shape[-1]
            ours = [_outputs_of(line, third, outputs, config) for third in range(3)]
            order = np.argsort(np.concatenate(ours))
        if any(map(is_packed, each)):
            if not all(map(is_packed, each)):
                raise ConfigError(f"the parts of {name!r} must be packed, all or none")
            joined = take_outputs(_join_thirds(name, each), order)
            written.packed[name.removesuffix(".weight")] = joined
        else:
            whole = np.concatenate(each, axis=-1)[..., order]
            written.tensors[name] = whole.T if line.transposed else whole
    return written


def _outputs_of(
    line: Name, third: int, outputs: int, config: CausalLmConfig | BertConfig
) -> np.ndarray:
    """Returns the places of query's, key's or value's outputs in their common tensor.

    Args:
      line: of one of the three.
      third: 0 for the query, 1 for the key, 2 for the value.
      outputs: of each of the three.
      config: the model.
    """
    places = np.arange(3 * outputs)
    if line.by_head:
        return places.reshape(config.heads, 3, -1)[:, third].ravel()
    return places.reshape(3, -1)[third]


def _join_thirds(name: str, thirds: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Returns one packed matrix of query, key and value; a single one unchanged."""
    if len(thirds) == 1:
        return thirds[0]
    try:
        return join_outputs(thirds)
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from error


def is_packed(leaf: Any) -> bool:
    """Returns whether a parameter is a packed matrix."""
    return isinstance(leaf, QuantizedMatrix)


def _tensor_names(line: Name, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the tensors that make one parameter, layer by layer."""
    if _STACKED not in line.name:
        return [line.name]
    return [line.name.replace(_STACKED, str(layer)) for layer in range(shape[0])]


def _tensor_shape(line: Name, ours: tuple[int, ...], packed: bool) -> tuple[int, ...]:
    """Returns the shape that the tensor of one layer should have.

    Packed matrices are `[inputs, outputs]` in files as well, never transposed.
    """
    shape = ours[1:] if _STACKED in line.name else ours
    if line.third is not None:
        shape = (*shape[:-1], 3 * shape[-1])
    return shape[::-1] if line.transposed and not packed else shape


def _convert_layer(
    line: Name, theirs: np.ndarray, config: CausalLmConfig | BertConfig
) -> np.ndarray:
    """Returns one layer of a parameter from its tensor."""
    if line.third is not None:
        axis = 0 if line.transposed else -1
        width = theirs.shape[axis] // 3
        theirs = theirs.take(_outputs_of(line, line.third, width, config), axis)
    if line.interleaved:
        # GGUF rotates feature pairs (0, 1), (2, 3), …, our rotary embedding the pairs
        # (i, i + half). Stored row 2i + j of a head is therefore our row i + j · half:
        # [half, 2] is transposed to [2, half].
        pairs = (-1, config.width // config.heads // 2, 2, theirs.shape[-1])
        theirs = theirs.reshape(pairs).swapaxes(1, 2).reshape(theirs.shape)
    return theirs.T if line.transposed else theirs


def _convert_packed(
    line: Name,
    layers: Sequence[Stored],
    config: CausalLmConfig | BertConfig,
    source: str,
) -> QuantizedMatrix:
    """Returns a packed parameter, all layers stacked, from its tensors."""
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
        own = _outputs_of(line, line.third, width, config)
        matrices = [take_outputs(matrix, own) for matrix in matrices]
    return stack_matrices(matrices) if _STACKED in line.name else matrices[0]


def _is_packed(stored: Stored) -> bool:
    """Returns whether a tensor of the file is a packed matrix."""
    return stored.kind == PACKED


def _index_by_canonical_name(
    family: Family, stored: Mapping[str, Stored], source: str
) -> dict[str, Stored]:
    """Returns the tensors by their names in the family's table.

    Raises:
      DataFormatError: two tensors have the same canonical name.
    """
    tensors: dict[str, Stored] = {}
    for name, tensor in stored.items():
        canonical = family.canonical(name)
        if canonical in tensors:
            raise DataFormatError(f"{source}: {canonical!r} is there twice")
        tensors[canonical] = tensor
    return tensors


def _check_names(
    family: Family, wanted: set[str], tensors: Mapping[str, Stored], source: str
) -> None:
    """Raises DataFormatError unless the tensors are those of the model."""
    missing = sorted(wanted - tensors.keys())
    unexpected = sorted(
        name
        for name in tensors.keys() - wanted
        if not _may_be_ignored(family, name, tensors[name])
        and not _is_zero_bias(name, tensors)
    )
    if missing or unexpected:
        raise DataFormatError(
            f"{source}: the tensors are not those of the config: missing {missing}, "
            f"unexpected {unexpected}"
        )


def _may_be_ignored(family: Family, name: str, stored: Stored) -> bool:
    """Returns whether a tensor that is not in the model may be ignored."""
    # `lm_head.weight` is ignored as a copy of the tied table, which a packed one is
    # not.
    return not _is_packed(stored) and any(
        re.fullmatch(pattern, name) for pattern in family.harmless
    )


def _is_zero_bias(name: str, tensors: Mapping[str, Stored]) -> bool:
    """Returns whether it is the zero bias that some writers give a packed matrix."""
    weight = tensors.get(f"{name.removesuffix('.bias')}.weight")
    if not name.endswith(".bias") or weight is None or not _is_packed(weight):
        return False
    return not tensors[name].read().any()
