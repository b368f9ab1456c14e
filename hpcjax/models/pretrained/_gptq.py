"""The layout in which GPTQ's matrices are passed around: in files, and in models.

A safetensors file holds for each layer `<name>.qweight` int32 `[inputs·bits/32,
outputs]`, packed along the inputs; `<name>.qzeros` int32 `[groups, outputs·bits/32]`,
packed along the outputs; `<name>.scales` float16 `[groups, outputs]`; `<name>.g_idx`
int32 `[inputs]`, the group of each input. `quantize_config.json` beside it, or the
`quantization_config` of a model's `config.json`, says which bits and groups, and which
of two formats: "gptq" stores zero − 1, "gptq_v2" zero.
"""

import logging
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import kernels
from hpcjax.core import files
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DataMissing,
    UnsupportedOp,
    nearest,
)
from hpcjax.kernels import BITS, QuantizedMatrix
from hpcjax.models.pretrained._safetensors import read_file, save_tensors
from hpcjax.models.pretrained.stored import PACKED, PARTS, Stored

log = logging.getLogger(__name__)

QUANTIZE_CONFIG = "quantize_config.json"
# What is taken off a zero point before it is stored.
FORMATS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}
_KINDS = {
    "qweight": ("I32",),
    "qzeros": ("I32",),
    "scales": ("F16", "BF16", "F32"),
    "g_idx": ("I32",),
}


def save_gptq(
    path: str | os.PathLike[str],
    layers: Mapping[str, QuantizedMatrix],
    *,
    checkpoint_format: str = "gptq_v2",
) -> None:
    """Writes matrices to a safetensors file and `quantize_config.json` beside it.

    Both files are replaced once both are written. Scales become float16.

    Args:
      path: the safetensors file.
      layers: by name, all of the same bits and group size, without further axes.
      checkpoint_format: "gptq" or "gptq_v2".

    Raises:
      ConfigError: no layers, layers that differ in bits or group size or whose inputs
        or outputs do not fill whole words, scales so large or small that float16 loses
        digits, zero points outside [0, 2^bits), another format.
      DiskFull: no space is left; what was there is untouched.

    Examples:
      >>> import tempfile
      >>> integers, one = jnp.ones((32, 32), jnp.uint8), jnp.ones((1, 32))
      >>> matrix = kernels.quantized_matrix(integers, one, 0 * one, bits=3)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   save_gptq(f"{folder}/model.safetensors", {"layers.0.mlp": matrix})
      ...   read = load_gptq(f"{folder}/model.safetensors")["layers.0.mlp"]
      >>> read.shape, read.dequantize().sum().item()
      ((32, 32), 1024.0)
    """
    tensors = matrix_tensors(layers, checkpoint_format)
    config = described(layers, checkpoint_format)
    path = pathlib.Path(path)
    with (
        files.replacing(path.with_name(QUANTIZE_CONFIG)) as beside,
        files.replacing(path) as temporary,
    ):
        save_tensors(temporary, tensors)
        files.write_json(beside, config)


def load_gptq(
    path: str | os.PathLike[str], *, checkpoint_format: str | None = None
) -> dict[str, QuantizedMatrix]:
    """Reads the quantized matrices of a safetensors file; other tensors are left out.

    Writers disagree about `checkpoint_format`. Where the config says that grids are
    symmetric, the stored zero points tell: all are 2^(bits−1), or one less. Else the
    config is trusted; without a word in it the format is "gptq".

    Args:
      path: the safetensors file, with `quantize_config.json` beside it or a
        `quantization_config` in `config.json`.
      checkpoint_format: "gptq" or "gptq_v2", whatever file and config say.

    Returns:
      Matrices by name; scales as stored, inputs sorted by group where `g_idx` is not in
      order.

    Raises:
      DataMissing: no such file, or no config beside it.
      DataFormatError: a file that is truncated or not in this layout.
      UnsupportedOp: a method of quantization other than GPTQ.
      ConfigError: another format asked for.
    """
    path = pathlib.Path(path)
    packed = packed_weights(read_file(path), path, checkpoint_format)
    matrices = {
        name.removesuffix(".weight"): each.read()
        for name, each in packed.items()
        if each.kind == PACKED
    }
    if not matrices:
        raise DataFormatError(f"{path}: expected tensors '<name>.qweight', found none")
    return matrices


def packed_weights(
    stored: Mapping[str, Stored],
    path: pathlib.Path,
    checkpoint_format: str | None = None,
) -> dict[str, Stored]:
    """Returns tensors with one `<name>.weight` in place of the parts of each matrix.

    Such a weight has the shape `[inputs, outputs]` and the kind `PACKED`. Heads and
    zero points are read and checked now, the other parts when it is read.

    Args:
      stored: the tensors of a file or a model.
      path: of the file, or the model's folder.
      checkpoint_format: see `load_gptq`.

    Raises:
      DataMissing, DataFormatError, UnsupportedOp, ConfigError: as `load_gptq`.
    """
    names = [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]
    if not names:
        return dict(stored)
    own = {f"{name}.{part}" for name in names for part in PARTS}
    rest = {name: each for name, each in stored.items() if name not in own}
    twice = sorted(rest.keys() & {f"{name}.weight" for name in names})
    if twice:
        raise DataFormatError(f"{path}: both packed and plain: {twice}")
    config, where = _config(path)
    bits, size = config["bits"], config["group_size"]
    parts = {
        name: _parts(path, name, stored, bits, size, config["desc_act"])
        for name in names
    }
    zeros = {
        name: _unpacked(each["qzeros"].read().T, bits, each["scales"].shape[1]).T
        for name, each in parts.items()
    }
    if checkpoint_format is None:
        checkpoint_format = _found_format(config, where, zeros.values(), bits)
    less = FORMATS[_format(checkpoint_format)]

    def weight(name: str) -> Stored:
        # uint8: 255 + 1 is 0, as in every other width.
        zero = (zeros[name] + np.uint8(less)) & np.uint8(2**bits - 1)
        rows, outputs = parts[name]["qweight"].shape

        def read() -> QuantizedMatrix:
            return _matrix(path, name, parts[name], zero, bits, size)

        return Stored((rows * 32 // bits, outputs), PACKED, read)

    return rest | {f"{name}.weight": weight(name) for name in names}


def described(
    layers: Mapping[str, QuantizedMatrix], checkpoint_format: str
) -> dict[str, Any]:
    """Returns what a config says of matrices.

    Raises:
      ConfigError: they differ in bits or group size, or there is none.
    """
    bits, size = _kind(layers)
    return {
        "bits": bits,
        "group_size": size,
        "desc_act": any(matrix.order is not None for matrix in layers.values()),
        "sym": all(bool((m.zero == 2 ** (bits - 1)).all()) for m in layers.values()),
        "quant_method": "gptq",
        "checkpoint_format": checkpoint_format,
    }


def matrix_tensors(
    layers: Mapping[str, QuantizedMatrix], checkpoint_format: str
) -> dict[str, np.ndarray]:
    """Returns the tensors of matrices, by full name.

    Raises:
      ConfigError: see `save_gptq`.
    """
    less = FORMATS[_format(checkpoint_format)]
    return {
        f"{name}.{part}": value
        for name, matrix in layers.items()
        for part, value in _tensors(name, matrix, less).items()
    }


def _format(name: str) -> str:
    if name not in FORMATS:
        raise ConfigError(f"no checkpoint_format {name!r}{nearest(name, FORMATS)}")
    return name


def _kind(layers: Mapping[str, QuantizedMatrix]) -> tuple[int, int]:
    """Returns bits and group size that hold for all layers; -1 is no groups."""
    bits = sorted({matrix.bits for matrix in layers.values()})
    sizes = sorted({matrix.group_size or -1 for matrix in layers.values()})
    size = sizes[-1] if sizes else -1
    # A layer may be so narrow that it has a single group.
    narrow = all(m.group_size or m.inputs <= size for m in layers.values())
    if len(bits) != 1 or (len(sizes) > 1 and not (sizes == [-1, size] and narrow)):
        raise ConfigError(
            "layers must have one number of bits and one group size: got bits "
            f"{bits} and group sizes {sizes}"
        )
    return bits[0], size


def _tensors(name: str, matrix: QuantizedMatrix, less: int) -> dict[str, np.ndarray]:
    if matrix.ndim != 2:
        raise ConfigError(f"{name}: expected one matrix, got shape {matrix.shape}")
    bits, (inputs, outputs) = matrix.bits, matrix.shape
    if inputs * bits % 32 or outputs * bits % 32:
        raise ConfigError(
            f"{name}: inputs and outputs must fill whole words of 32 bits: got "
            f"{inputs} inputs and {outputs} outputs of {bits} bits; "
            "compress.dequantized gives plain parameters"
        )
    zero = np.asarray(matrix.zero, np.float32)
    if not ((zero >= 0) & (zero < 2**bits) & (zero == np.round(zero))).all():
        raise ConfigError(
            f"{name}: zero points must be integers in [0, {2**bits}): got "
            f"{zero.min()} to {zero.max()}"
        )
    scale = np.asarray(matrix.scale, np.float32)
    with np.errstate(over="ignore"):
        stored_scale = scale.astype(np.float16)
    # Half of the last digit, as far as float16 has all of its digits.
    good = np.abs(stored_scale - scale) <= 2.0**-11 * np.abs(scale)
    if not good.all():
        raise ConfigError(f"{name}: scales must fit float16: got {scale[~good][0]:g}")
    group = np.arange(inputs, dtype=np.int32) // (matrix.group_size or inputs)
    words = np.asarray(matrix.words)
    if matrix.order is not None:
        place = np.argsort(np.asarray(matrix.order))
        group = group[place]
        words = _packed(_unpacked(words, bits, inputs)[place], bits)
    stored = (zero.astype(np.int64) - less) % 2**bits
    return {
        "qweight": words[: inputs * bits // 32].view(np.int32),
        "qzeros": _packed(stored.T, bits)[: outputs * bits // 32].T.view(np.int32),
        "scales": stored_scale,
        "g_idx": group,
    }


def _config(path: pathlib.Path) -> tuple[Mapping[str, Any], pathlib.Path]:
    """Returns what is said of the quantization, under one name each, and where.

    Raises:
      DataMissing: nothing is there.
      DataFormatError: nothing is said, something of the wrong type, or two files say
        different things.
      UnsupportedOp: another method, or a format of which nothing is known.
    """
    folder = path if path.is_dir() else path.parent
    own, of_model = folder / QUANTIZE_CONFIG, folder / "config.json"
    said: dict[pathlib.Path, Any] = {}
    if own.is_file():
        said[own] = files.read_object(own)
    if of_model.is_file():
        content = files.read_object(of_model).get("quantization_config")
        if content is not None or not said:
            said[of_model] = content
    if not said:
        raise DataMissing(f"no {QUANTIZE_CONFIG} and no config.json in {folder}")
    read = {where: _read_config(content, where) for where, content in said.items()}
    (where, config), *others = read.items()
    for other, also in others:
        differing = sorted(key for key in config if config[key] != also[key])
        if differing:
            raise DataFormatError(
                f"{where} and {other} differ in {differing}: one of them is not of "
                "these tensors"
            )
    return config, where


def _read_config(content: Any, where: pathlib.Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise DataFormatError(
            f"{where}: expected an object that describes the quantization, found "
            f"{content!r:.60}"
        )

    def said(key: str, alias: str, default: Any) -> Any:
        # Newer writers have other names, and both for a while.
        return content.get(key, content.get(alias, default))

    found = {
        "bits": content.get("bits"),
        "group_size": content.get("group_size", -1),
        "desc_act": content.get("desc_act", False),
        "sym": content.get("sym", False),
        "quant_method": said("quant_method", "method", "gptq"),
        "checkpoint_format": said("checkpoint_format", "format", "gptq"),
    }
    bits, size = found["bits"], found["group_size"]
    whole = all(type(each) is int for each in (bits, size))
    if not whole or bits not in BITS or size == 0 or size < -1:
        raise DataFormatError(
            f"{where}: expected bits from {BITS} and a group_size of -1 or at least 1, "
            f"found bits={bits!r}, group_size={size!r}"
        )
    for key in ("desc_act", "sym"):
        if not isinstance(found[key], bool):
            raise DataFormatError(
                f"{where}: expected true or false as {key!r}, found {found[key]!r}"
            )
    for key, known in (("quant_method", ("gptq",)), ("checkpoint_format", FORMATS)):
        if found[key] not in tuple(known):
            raise UnsupportedOp(
                f"{where}: only {key}={' or '.join(map(repr, known))} is implemented: "
                f"got {found[key]!r}"
            )
    return found


def _parts(
    path: pathlib.Path,
    name: str,
    stored: Mapping[str, Stored],
    bits: int,
    size: int,
    sorted_: bool,
) -> dict[str, Stored]:
    """Returns the parts of a layer, having checked number formats and shapes.

    Args:
      path: the file, for errors.
      name: the layer.
      stored: all tensors.
      bits: of a weight.
      size: inputs of a group; -1 for all.
      sorted_: whether inputs may be in the order of their weight (`desc_act`), so that
        nothing but `g_idx` can tell their groups.
    """
    found = {
        part: stored[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in stored
    }
    words, scales = found["qweight"], found.get("scales")
    if len(words.shape) != 2 or scales is None or len(scales.shape) != 2:
        raise DataFormatError(
            f"{path}: {name}: expected matrices 'qweight' and 'scales', found "
            f"{_heads(found)}"
        )
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    groups = -(-inputs // _size(size, inputs))
    wanted = {
        "qweight": (inputs * bits // 32, outputs),
        "qzeros": (groups, outputs * bits // 32),
        "scales": (groups, outputs),
        "g_idx": (inputs,),
    }
    # Without it, groups are of neighbouring inputs.
    needless = "g_idx" not in found and (groups == 1 or not sorted_)
    expected = {
        part: [f"{kind}{list(shape)}" for kind in _KINDS[part]]
        for part, shape in wanted.items()
        if part != "g_idx" or not needless
    }
    heads = _heads(found)
    good = heads.keys() == expected.keys() and all(
        head in expected[part] for part, head in heads.items()
    )
    if inputs < 1 or not good or outputs * bits % 32:
        one = {part: allowed[0] for part, allowed in expected.items()}
        raise DataFormatError(
            f"{path}: {name}: expected {one} for {bits} bits and a group_size of "
            f"{_size(size, inputs)}, found {heads}"
        )
    return found


def _size(size: int, inputs: int) -> int:
    """Returns the inputs of a group; -1 stands for all."""
    return size if size > 0 else max(inputs, 1)


def _heads(found: Mapping[str, Stored]) -> dict[str, str]:
    return {part: f"{each.kind}{list(each.shape)}" for part, each in found.items()}


def _found_format(
    config: Mapping[str, Any],
    where: pathlib.Path,
    stored: Iterable[np.ndarray],
    bits: int,
) -> str:
    said = config["checkpoint_format"]
    if not config["sym"]:
        return said
    values = {int(value) for zeros in stored for value in np.unique(zeros)}
    for name, less in FORMATS.items():
        if values == {2 ** (bits - 1) - less}:
            if name != said:
                log.warning(
                    "%s says %s, but the zero points of its symmetric grids are those "
                    "of %s",
                    where,
                    said,
                    name,
                )
            return name
    return said


def _matrix(
    path: pathlib.Path,
    name: str,
    parts: Mapping[str, Stored],
    zero: np.ndarray,
    bits: int,
    size: int,
) -> QuantizedMatrix:
    read = {part: each.read() for part, each in parts.items() if part != "qzeros"}
    inputs, scale = len(read["qweight"]) * 32 // bits, read["scales"]
    group = jnp.asarray(read["g_idx"]) if "g_idx" in read else None
    if not np.isfinite(scale).all():
        raise DataFormatError(f"{path}: {name}: expected finite scales")
    try:
        return kernels.quantized_matrix(
            jnp.asarray(_unpacked(read["qweight"], bits, inputs)),
            jnp.asarray(scale),
            jnp.asarray(zero.astype(scale.dtype)),
            bits=bits,
            group=group,
            group_size=_size(size, inputs),
        )
    except ConfigError as error:
        raise DataFormatError(f"{path}: {name}: {error}") from error


def _packed(integers: np.ndarray, bits: int) -> np.ndarray:
    pack = jax.jit(kernels.pack, static_argnums=1)
    return np.asarray(pack(jnp.asarray(integers.astype(np.uint8)), bits))


def _unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the integers of words whose last run may be cut short."""
    whole = kernels.packed_rows(count, bits)
    filled = np.pad(words.view(np.uint32), ((0, whole - len(words)), (0, 0)))
    unpack = jax.jit(kernels.unpack, static_argnums=(1, 2))
    return np.asarray(unpack(jnp.asarray(filled), bits, count))
