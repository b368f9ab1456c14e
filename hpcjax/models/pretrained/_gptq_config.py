"""The configs that describe GPTQ's matrices, and the format of their zero points."""

import logging
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hpcjax.core import files
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DataMissing,
    UnsupportedOp,
    nearest,
)
from hpcjax.kernels import BITS, QuantizedMatrix

log = logging.getLogger(__name__)

QUANTIZE_CONFIG = "quantize_config.json"
# What is subtracted from a zero point before it is stored.
FORMATS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}


def check_format(name: str) -> str:
    """Returns the name of a format, or raises ConfigError with the nearest one."""
    if name not in FORMATS:
        raise ConfigError(f"no checkpoint_format {name!r}{nearest(name, FORMATS)}")
    return name


def describe_matrices(
    layers: Mapping[str, QuantizedMatrix], checkpoint_format: str
) -> dict[str, Any]:
    """Returns the content of a quantization config that describes matrices.

    Raises:
      ConfigError: they differ in bits or group size, or there are none.
    """
    bits, size = _common_grid(layers)
    return {
        "bits": bits,
        "group_size": size,
        "desc_act": any(matrix.order is not None for matrix in layers.values()),
        "sym": all(bool((m.zero == 2 ** (bits - 1)).all()) for m in layers.values()),
        "quant_method": "gptq",
        "checkpoint_format": checkpoint_format,
    }


def _common_grid(layers: Mapping[str, QuantizedMatrix]) -> tuple[int, int]:
    """Returns the bits and group size of all layers; -1 stands for no groups."""
    bits = sorted({matrix.bits for matrix in layers.values()})
    sizes = sorted({matrix.group_size or -1 for matrix in layers.values()})
    size = sizes[-1] if sizes else -1
    # A layer with no more inputs than a group has no groups, and fits any config.
    narrow = all(m.group_size or m.inputs <= size for m in layers.values())
    if len(bits) != 1 or (len(sizes) > 1 and not (sizes == [-1, size] and narrow)):
        raise ConfigError(
            "layers must have one number of bits and one group size: got bits "
            f"{bits} and group sizes {sizes}"
        )
    return bits[0], size


def read_config(path: pathlib.Path) -> tuple[Mapping[str, Any], pathlib.Path]:
    """Returns the quantization config of a checkpoint, and the file it is from.

    Args:
      path: a safetensors file, or the folder of a model.

    Raises:
      DataMissing: there is neither `quantize_config.json` nor `config.json`.
      DataFormatError: no config in them, a value of the wrong type, or the two files
        contradict each other.
      UnsupportedOp: another method, or an unknown format.
    """
    folder = path if path.is_dir() else path.parent
    own, of_model = folder / QUANTIZE_CONFIG, folder / "config.json"
    contents: dict[pathlib.Path, Any] = {}
    if own.is_file():
        contents[own] = files.read_object(own)
    if of_model.is_file():
        content = files.read_object(of_model).get("quantization_config")
        if content is not None or not contents:
            contents[of_model] = content
    if not contents:
        raise DataMissing(f"no {QUANTIZE_CONFIG} and no config.json in {folder}")
    read = {where: _parse(content, where) for where, content in contents.items()}
    (where, config), *others = read.items()
    for other, also in others:
        differing = sorted(key for key in config if config[key] != also[key])
        if differing:
            raise DataFormatError(
                f"{where} and {other} differ in {differing}: one of them is not of "
                "these tensors"
            )
    return config, where


def _parse(content: Any, where: pathlib.Path) -> dict[str, Any]:
    """Returns the settings of a config under one name each, checked."""
    if not isinstance(content, dict):
        raise DataFormatError(
            f"{where}: expected an object that describes the quantization, found "
            f"{content!r:.60}"
        )

    def get_renamed(key: str, alias: str, default: Any) -> Any:
        # Newer writers have other names; some write both.
        return content.get(key, content.get(alias, default))

    config = {
        "bits": content.get("bits"),
        "group_size": content.get("group_size", -1),
        "desc_act": content.get("desc_act", False),
        "sym": content.get("sym", False),
        "quant_method": get_renamed("quant_method", "method", "gptq"),
        "checkpoint_format": get_renamed("checkpoint_format", "format", "gptq"),
    }
    bits, size = config["bits"], config["group_size"]
    whole = all(type(each) is int for each in (bits, size))
    if not whole or bits not in BITS or size == 0 or size < -1:
        raise DataFormatError(
            f"{where}: expected bits from {BITS} and a group_size of -1 or at least 1, "
            f"found bits={bits!r}, group_size={size!r}"
        )
    for key in ("desc_act", "sym"):
        if not isinstance(config[key], bool):
            raise DataFormatError(
                f"{where}: expected true or false as {key!r}, found {config[key]!r}"
            )
    for key, known in (("quant_method", ("gptq",)), ("checkpoint_format", FORMATS)):
        if config[key] not in tuple(known):
            raise UnsupportedOp(
                f"{where}: only {key}={' or '.join(map(repr, known))} is implemented: "
                f"got {config[key]!r}"
            )
    return config


def choose_format(
    config: Mapping[str, Any],
    where: pathlib.Path,
    stored: Iterable[np.ndarray],
    bits: int,
) -> str:
    """Returns the format of zero points, which configs do not always tell correctly.

    The zero points of symmetric grids are all 2^(bits−1), so that what is stored tells
    the format. For other grids the config is trusted.

    Args:
      config: the quantization config.
      where: its file, for the warning if it is wrong.
      stored: the stored zero points of all matrices.
      bits: of a weight.
    """
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
