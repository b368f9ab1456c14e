"""How long products of sparse integers take against dense and sparse ones of JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from experiments.magicube.products import PAIRS, pack_operand
from hpcjax import kernels, perf, runs
from hpcjax.core import config

DENSE, BCOO, BCSR = "bfloat16", "bfloat16, BCOO", "bfloat16, BCSR"
OWN = tuple(f"L{left}-R{right}" for left, right in PAIRS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A square sparse matrix, and how its products are measured.

    Attributes:
      size: rows and columns.
      zeros: share of its vectors that is zero.
      vector: V.
      outputs: columns of the dense operand.
      inner: products in one program, whose launch then costs nothing that counts.
      repetitions: rounds of the measurement.
      implementation: of the products of integers.
      seed: of pattern and numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "size": "64",
        "outputs": "16",
        "inner": "2",
        "repetitions": "2",
        "implementation": "reference",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of one product",
        "wrong": "pair: entries that differ from those of 64 bits modulo 2³²",
    }

    size: config.Size = 2048
    zeros: config.Share = 0.9
    vector: Literal[2, 4, 8] = 8
    outputs: config.Size = 512
    inner: config.Size = 20
    repetitions: config.Size = 30
    implementation: Literal["triton", "reference"] = "triton"
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": (DENSE, BCOO, BCSR, *OWN),
            "repetition": range(self.repetitions),
            "pair": OWN,
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times products in turns in one process."""
    del ctx
    rng = np.random.default_rng(cfg.seed)
    mask = rng.random((cfg.size // cfg.vector, cfg.size)) > cfg.zeros
    whole = np.repeat(mask, cfg.vector, axis=0)
    drawn = {pair: _draw(rng, cfg, whole, *pair) for pair in PAIRS}
    problems = _floats(*drawn[8, 8]) | {
        name: _integers(cfg, mask, *drawn[pair], *pair)
        for name, pair in zip(OWN, PAIRS, strict=True)
    }
    thunks = {
        name: perf.chain_calls(multiply, b, matrix, cfg.inner)
        for name, (multiply, b, matrix) in problems.items()
    }
    measured = perf.compare(thunks, DENSE, repetitions=cfg.repetitions, warmup=2)
    wrong = [
        _count_wrong(problems[name], *drawn[pair])
        for name, pair in zip(OWN, PAIRS, strict=True)
    ]
    return runs.measured(
        {"seconds": measured["seconds"] / cfg.inner, "wrong": ("pair", wrong)},
        coords={"pair": list(OWN)},
    )


def _draw(
    rng: np.random.Generator, cfg: Config, kept: np.ndarray, left: int, right: int
) -> tuple[np.ndarray, np.ndarray]:
    ends = [2 ** (bits - 1) for bits in (left, right)]
    a = rng.integers(-ends[0], ends[0], kept.shape) * kept
    return a, rng.integers(-ends[1], ends[1], (cfg.size, cfg.outputs))


def _floats(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Returns JAX's products, each with its operands; integers of 8 bits are exact."""
    import jax.numpy as jnp
    from jax.experimental import sparse

    dense, right = jnp.asarray(a, "bfloat16"), jnp.asarray(b, "bfloat16")

    def multiply(b: Any, matrix: Any, number: int) -> Any:
        return matrix @ b

    return {
        DENSE: (multiply, right, dense),
        BCOO: (multiply, right, sparse.BCOO.fromdense(dense)),
        BCSR: (multiply, right, sparse.BCSR.fromdense(dense)),
    }


def _integers(
    cfg: Config, mask: np.ndarray, a: np.ndarray, b: np.ndarray, left: int, right: int
) -> tuple[Callable[..., Any], Any, Any]:
    limb = 4 if right == 4 else 8
    matrix = kernels.sr_bcrs(a, vector=cfg.vector, bits=left, limb=limb, mask=mask)

    def multiply(b: Any, matrix: Any, number: int) -> Any:
        return kernels.spmm(matrix, b, implementation=cfg.implementation)

    return multiply, pack_operand(b, right), matrix


def _count_wrong(problem: Any, a: np.ndarray, b: np.ndarray) -> int:
    multiply, operand, matrix = problem
    exact = a.astype(float) @ b.astype(float)
    # Sums of these sizes are below 2^53, hence exact in float64.
    wanted = exact.astype(np.int64).astype(np.int32)
    return int(np.sum(np.asarray(multiply(operand, matrix, 0)) != wanted))
