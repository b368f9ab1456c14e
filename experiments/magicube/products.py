"""Products of sparse integers: whether they are exact, and the bytes that they read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import kernels, runs
from hpcjax.core import config

# Bits of the sparse and of the dense operand.
PAIRS = ((16, 16), (16, 8), (8, 8), (16, 4), (12, 4), (8, 4), (4, 4))
NAMES = tuple(f"L{left}-R{right}" for left, right in PAIRS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A sparse matrix, and its product in all pairs of precisions.

    Attributes:
      rows: of the pattern, each of which becomes `vector` rows.
      columns: of the pattern.
      zeros: share of the pattern that is zero.
      kind: "random"; "magnitude", the largest of Gaussians whose rows differ in size;
        or "long", random with one row that is full.
      vector: V.
      outputs: columns of the dense operand.
      seed: of pattern and numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {"rows": "4", "columns": "40"}
    figures: ClassVar[Mapping[str, str]] = {
        "wrong": "pair: entries that differ from the product in 64 bits modulo 2³²",
        "saturated": "pair: that would if sums stopped at the ends of 32 bits",
        "bytes": "pair: of indices, values and gathered rows",
        "padding": ": vectors that are padding, over others",
    }

    rows: config.Size = 32
    columns: config.Size = 600
    zeros: config.Share = 0.9
    kind: Literal["random", "magnitude", "long"] = "random"
    vector: Literal[2, 4, 8] = 8
    outputs: config.Size = 64
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"pair": list(NAMES)}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Multiplies in all pairs."""
    del ctx
    rng = np.random.default_rng(cfg.seed)
    mask = _pattern(cfg, rng)
    found = [_multiply(cfg, rng, mask, *pair) for pair in PAIRS]
    vectors = int(mask.sum())
    matrix = kernels.sr_bcrs(
        np.ones((cfg.rows * cfg.vector, cfg.columns), int), vector=cfg.vector, mask=mask
    )
    figures: dict[str, Any] = {
        name: ("pair", [each[name] for each in found]) for name in found[0]
    }
    figures["padding"] = kernels.count_padding(matrix) / vectors
    return runs.measured(figures, coords={"pair": list(NAMES)})


def _pattern(cfg: Config, rng: np.random.Generator) -> np.ndarray:
    """Returns which vectors there are, [rows, columns]."""
    shape = (cfg.rows, cfg.columns)
    size = np.abs(rng.normal(size=shape))
    if cfg.kind == "magnitude":
        size *= rng.lognormal(size=(cfg.rows, 1))
    mask = size > np.quantile(size, cfg.zeros)
    if cfg.kind == "long":
        mask[cfg.rows // 2] = True
    return mask


def _draw(rng: np.random.Generator, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """Returns integers of all bits, a row of which has the least number."""
    end = 2 ** (bits - 1)
    drawn = rng.integers(-end, end, shape)
    drawn[len(drawn) // 2] = -end
    return drawn


def _multiply(
    cfg: Config, rng: np.random.Generator, mask: np.ndarray, left: int, right: int
) -> dict[str, float]:
    a = _draw(rng, left, (cfg.rows * cfg.vector, cfg.columns))
    # The row of vectors that may be full has the least number in all its rows.
    middle = cfg.rows // 2 * cfg.vector
    a[middle : middle + cfg.vector] = -(2 ** (left - 1))
    a *= np.repeat(mask, cfg.vector, axis=0)
    b = _draw(rng, right, (cfg.columns, cfg.outputs))
    b[:, 0] = -(2 ** (right - 1))
    limb = 4 if right == 4 else 8
    matrix = kernels.sr_bcrs(a, vector=cfg.vector, bits=left, limb=limb, mask=mask)
    exact = a.astype(np.int64) @ b.astype(np.int64)
    wanted = exact.astype(np.int32)
    found = np.asarray(kernels.spmm(matrix, pack_operand(b, right)))
    counts = kernels.operand_bytes(matrix, cfg.outputs, right)
    ends = np.iinfo(np.int32)
    return {
        "wrong": float(np.sum(found != wanted)),
        "saturated": float(np.sum(np.clip(exact, ends.min, ends.max) != wanted)),
        "bytes": float(counts["operands"]),
    }


def pack_operand(b: np.ndarray, bits: int) -> Any:
    """Returns the dense operand as `kernels.spmm` takes it."""
    import jax.numpy as jnp

    if bits == 4:
        return kernels.pack_nibbles(jnp.asarray(b, "int8"))
    return jnp.asarray(b, {8: "int8", 16: "int16"}[bits])
