"""What the sparse kernels are compiled to for Hopper, on any machine."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from experiments.magicube import products
from hpcjax import kernels, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A kernel of sparse integers.

    Attributes:
      kernel: "spmm"; "sddmm"; or "plain", a product with the vectors' rows on the
        tensor cores' longer side, in int8.
      pair: bits of the sparse and of the dense operand; of sddmm those of both.
      vector: V.
      outputs: columns of the dense operand.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"outputs": "64"}
    figures: ClassVar[Mapping[str, str]] = {
        "wgmma saturating": ": kinds of products",
        "registers": ": of a thread",
        "spilled shared": ": bytes spilled, and of shared memory",
    }

    kernel: Literal["spmm", "sddmm", "plain"] = "spmm"
    pair: tuple[int, int] = (8, 8)
    vector: Literal[2, 4, 8] = 8
    outputs: config.Size = 256
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pair not in products.PAIRS:
            raise ConfigError(
                f"pair must be one of {products.PAIRS}: got pair={self.pair}"
            )


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Compiles the kernel for Hopper."""
    del ctx
    compile_ = {"spmm": _spmm, "sddmm": _sddmm, "plain": _plain}[cfg.kernel]
    (code,) = compile_(cfg)
    kinds = code.tensor_core_products
    return runs.measured(
        {
            "wgmma": sum(kind.startswith("wgmma") for kind in kinds),
            "saturating": sum("satfinite" in kind for kind in kinds),
            "registers": code.registers,
            "spilled": code.spilled,
            "shared": code.shared,
        }
    )


def _spmm(cfg: Config) -> Any:
    left, right = cfg.pair
    ones = np.ones((8 * cfg.vector, 64), int)
    limb = 4 if right == 4 else 8
    matrix = kernels.sr_bcrs(ones, vector=cfg.vector, bits=left, limb=limb)
    b = products.pack_operand(np.ones((64, cfg.outputs), int), right)
    product = functools.partial(kernels.spmm, implementation="triton")
    return perf.machine_code(product, matrix, b)


def _sddmm(cfg: Config) -> Any:
    pattern = kernels.sr_bcrs(np.ones((8 * cfg.vector, 64), int), vector=cfg.vector)
    x, y = (
        products.pack_operand(np.ones((rows, cfg.outputs), int), cfg.pair[1])
        for rows in (8 * cfg.vector, 64)
    )
    product = functools.partial(kernels.sddmm, implementation="triton")
    return perf.machine_code(product, x, y, pattern)


def _plain(cfg: Config) -> Any:
    import jax

    # Triton takes no product of fewer than 16 rows.
    rows, groups = 16, 4
    launch = kernels.Launch(
        kernel="experiments.magicube.kernel:plain_product",
        grid=(1, 1, 1),
        outputs=(jax.ShapeDtypeStruct((rows, cfg.outputs), "int32"),),
        constants={"GROUPS": groups, "N": cfg.outputs, "V": rows},
    )
    return perf.machine_code(
        functools.partial(kernels.run, launch),
        jax.ShapeDtypeStruct((groups, rows, 32), "int8"),
        jax.ShapeDtypeStruct((groups * 32,), "int32"),
        jax.ShapeDtypeStruct((64, cfg.outputs), "int8"),
    )
