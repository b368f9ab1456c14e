"""Reading and writing matrices in the layout of GPTQ's checkpoints.

A safetensors file holds for each layer `<name>.qweight` int32 `[inputs·bits/32,
outputs]`, packed along the inputs; `<name>.qzeros` int32 `[groups, outputs·bits/32]`,
packed along the outputs; `<name>.scales` float16 `[groups, outputs]`; `<name>.g_idx`
int32 `[inputs]`, the group of each input. `quantize_config.json` beside it, or the
`quantization_config` of a model's `config.json`, tells bits, group size, and the format
of zero points: "gptq" stores zero − 1, "gptq_v2" zero.
"""

import os
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import kernels
from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.kernels import QuantizedMatrix
from hpcjax.models.pretrained import _gptq_config as configs
from hpcjax.models.pretrained._safetensors import read_file, save_tensors
from hpcjax.models.pretrained.stored import PACKED, PARTS, Stored

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

    Both files are replaced after both have been written. Scales become float16.

    Args:
      path: the safetensors file.
      layers: matrices by name, all two-dimensional, of the same bits and group size.
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
    config = configs.describe_matrices(layers, checkpoint_format)
    path = pathlib.Path(path)
    with (
        files.replacing(path.with_name(configs.QUANTIZE_CONFIG)) as beside,
        files.replacing(path) as temporary,
    ):
        save_tensors(temporary, tensors)
        files.write_json(beside, config)


def load_gptq(
    path: str | os.PathLike[str], *, checkpoint_format: str | None = None
) -> dict[str, QuantizedMatrix]:
    """Reads the quantized matrices of a safetensors file; ignores other tensors.

    Writers disagree about `checkpoint_format`. Where the config says that grids are
    symmetric, the stored zero points tell it: all are 2^(bits−1), or one less.
    Otherwise the config is trusted, and if it does not tell the format, this is "gptq".

    Args:
      path: the safetensors file, with `quantize_config.json` beside it or a
        `quantization_config` in `config.json`.
      checkpoint_format: "gptq" or "gptq_v2", overriding file and config.

    Returns:
      Matrices by name; scales as stored, inputs sorted by group where `g_idx` is not in
      order.

    Raises:
      DataMissing: no such file, or no config beside it.
      DataFormatError: a file that is truncated or not in this layout.
      UnsupportedOp: a method of quantization other than GPTQ.
      ConfigError: an unknown `checkpoint_format`.
    """
    path = pathlib.Path(path)
    packed = join_packed(read_file(path), path, checkpoint_format)
    matrices = {
        name.removesuffix(".weight"): each.read()
        for name, each in packed.items()
        if each.kind == PACKED
    }
    if not matrices:
        raise DataFormatError(f"{path}: expected tensors '<name>.qweight', found none")
    return matrices


def join_packed(
    stored: Mapping[str, Stored],
    path: pathlib.Path,
    checkpoint_format: str | None = None,
) -> dict[str, Stored]:
    """Replaces the parts of each quantized matrix by one tensor `<name>.weight`.

    Such a weight has the shape `[inputs, outputs]` and the kind `PACKED`. Shapes and
    zero points are read and checked now, the other parts when the weight is read.

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
    config, where = configs.read_config(path)
    bits, size = config["bits"], config["group_size"]
    parts = {
        name: _find_parts(path, name, stored, bits, size, config["desc_act"])
        for name in names
    }
    zeros = {
        name: _unpack(each["qzeros"].read().T, bits, each["scales"].shape[1]).T
        for name, each in parts.items()
    }
    if checkpoint_format is None:
        checkpoint_format = configs.choose_format(config, where, zeros.values(), bits)
    subtracted = configs.FORMATS[configs.check_format(checkpoint_format)]

    def weight(name: str) -> Stored:
        # Zero points wrap around: zero − 1 of 0 is stored as 2^bits − 1. With 8 bits
        # the addition in uint8 does this, with fewer the mask.
        zero = (zeros[name] + np.uint8(subtracted)) & np.uint8(2**bits - 1)
        rows, outputs = parts[name]["qweight"].shape

        def read() -> QuantizedMatrix:
            return _read_matrix(path, name, parts[name], zero, bits, size)

        return Stored((rows * 32 // bits, outputs), PACKED, read)

    return rest | {f"{name}.weight": weight(name) for name in names}


def matrix_tensors(
    layers: Mapping[str, QuantizedMatrix], checkpoint_format: str
) -> dict[str, np.ndarray]:
    """Returns the tensors of matrices, by full name.

    Raises:
      ConfigError: see `save_gptq`.
    """
    subtracted = configs.FORMATS[configs.check_format(checkpoint_format)]
    return {
        f"{name}.{part}": value
        for name, matrix in layers.items()
        for part, value in _make_tensors(name, matrix, subtracted).items()
    }


def _make_tensors(
    name: str, matrix: QuantizedMatrix, subtracted: int
) -> dict[str, np.ndarray]:
    """Returns the tensors of one matrix, by their endings."""
    if matrix.ndim != 2:
        raise ConfigError(f"{name}: expected one matrix, got shape {matrix.shape}")
    bits, (inputs, outputs) = matrix.bits, matrix.shape
    if inputs * bits % 32 or outputs * bits % 32:
        raise ConfigError(
            f"{name}: inputs and outputs must fill whole words of 32 bits: got "
            f"{inputs} inputs and {outputs} outputs of {bits} bits; "
            "compress.dequantize_params gives plain parameters"
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
    # Rounding to 11 significant bits errs by 2⁻¹¹ relatively at most; a larger error
    # means that float16 underflows or overflows.
    good = np.abs(stored_scale - scale) <= 2.0**-11 * np.abs(scale)
    if not good.all():
        raise ConfigError(f"{name}: scales must fit float16: got {scale[~good][0]:g}")
    group = np.arange(inputs, dtype=np.int32) // (matrix.group_size or inputs)
    words = np.asarray(matrix.words)
    if matrix.order is not None:
        # `order` lists inputs sorted by group; files have them in their original order.
        place = np.argsort(np.asarray(matrix.order))
        group = group[place]
        words = _pack(_unpack(words, bits, inputs)[place], bits)
    stored = (zero.astype(np.int64) - subtracted) % 2**bits
    return {
        "qweight": words[: inputs * bits // 32].view(np.int32),
        "qzeros": _pack(stored.T, bits)[: outputs * bits // 32].T.view(np.int32),
        "scales": stored_scale,
        "g_idx": group,
    }


def _find_parts(
    path: pathlib.Path,
    name: str,
    stored: Mapping[str, Stored],
    bits: int,
    size: int,
    sorted_: bool,
) -> dict[str, Stored]:
    """Returns the tensors of a layer, after checking their dtypes and shapes.

    Args:
      path: the file, for errors.
      name: the layer.
      stored: all tensors.
      bits: of a weight.
      size: inputs of a group; -1 for all.
      sorted_: whether GPTQ may have sorted the inputs (`desc_act`), so that only
        `g_idx` can tell their groups.
    """
    found = {
        part: stored[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in stored
    }
    words, scales = found["qweight"], found.get("scales")
    if len(words.shape) != 2 or scales is None or len(scales.shape) != 2:
        raise DataFormatError(
            f"{path}: {name}: expected matrices 'qweight' and 'scales', found "
            f"{_describe_parts(found)}"
        )
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    groups = -(-inputs // _group_inputs(size, inputs))
    wanted = {
        "qweight": (inputs * bits // 32, outputs),
        "qzeros": (groups, outputs * bits // 32),
        "scales": (groups, outputs),
        "g_idx": (inputs,),
    }
    # Without `g_idx`, groups consist of consecutive inputs.
    needless = "g_idx" not in found and (groups == 1 or not sorted_)
    expected = {
        part: [f"{kind}{list(shape)}" for kind in _KINDS[part]]
        for part, shape in wanted.items()
        if part != "g_idx" or not needless
    }
    heads = _describe_parts(found)
    good = heads.keys() == expected.keys() and all(
        head in expected[part] for part, head in heads.items()
    )
    if inputs < 1 or not good or outputs * bits % 32:
        one = {part: allowed[0] for part, allowed in expected.items()}
        raise DataFormatError(
            f"{path}: {name}: expected {one} for {bits} bits and a group_size of "
            f"{_group_inputs(size, inputs)}, found {heads}"
        )
    return found


def _group_inputs(size: int, inputs: int) -> int:
    """Returns the number of inputs in a group; -1 stands for all."""
    return size if size > 0 else max(inputs, 1)


def _describe_parts(found: Mapping[str, Stored]) -> dict[str, str]:
    return {part: f"{each.kind}{list(each.shape)}" for part, each in found.items()}


def _read_matrix(
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
            jnp.asarray(_unpack(read["qweight"], bits, inputs)),
            jnp.asarray(scale),
            jnp.asarray(zero.astype(scale.dtype)),
            bits=bits,
            group=group,
            group_size=_group_inputs(size, inputs),
        )
    except ConfigError as error:
        raise DataFormatError(f"{path}: {name}: {error}") from error


def _pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Returns integers `[rows, columns]` packed along axis 0 into 32-bit words."""
    pack = jax.jit(kernels.pack, static_argnums=1)
    return np.asarray(pack(jnp.asarray(integers.astype(np.uint8)), bits))


def _unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns `count` integers of each column of words.

    `kernels.unpack` wants whole runs of words; files end after the last one in use.
    """
    whole = kernels.packed_rows(count, bits)
    filled = np.pad(words.view(np.uint32), ((0, whole - len(words)), (0, 0)))
    unpack = jax.jit(kernels.unpack, static_argnums=(1, 2))
    return np.asarray(unpack(jnp.asarray(filled), bits, count))
