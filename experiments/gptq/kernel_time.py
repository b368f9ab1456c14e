"""How long a product with a quantized matrix takes against one in bfloat16."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import kernels, perf, runs
from hpcjax.compress import GridSpec
from hpcjax.core import checks, config

if TYPE_CHECKING:
    import jax

BASELINES = ("bfloat16", "bfloat16 of 8 rows", "bfloat16, transposed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A matrix, and how its product is measured.

    Attributes:
      inputs: of the matrix.
      outputs: of the matrix.
      group_size: inputs that share a scale.
      rows: tokens at once.
      bits: of the weights, one candidate each.
      inner: products in one program, whose launch then costs nothing that counts; they
        take two matrices in turns, so that none stays in a cache.
      repetitions: rounds of the measurement.
      implementation: of the product.
      seed: of all numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "inputs": "256",
        "outputs": "64",
        "inner": "2",
        "repetitions": "2",
        "implementation": "reference",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of one product, and of one copy",
        "bytes": "candidate: that it has to read, of a copy also to write",
        "error": "bits: largest of 64 outputs against float64, over ‖w‖‖x‖",
        "mixed": "bits: the same against another matrix' product",
    }

    inputs: config.Size = 12288
    outputs: config.Size = 49152
    group_size: config.Size = 128
    rows: config.Size = 1
    bits: tuple[int, ...] = (4, 3)
    inner: config.Size = 20
    repetitions: config.Size = 30
    implementation: Literal["triton", "reference"] = "triton"
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # It checks bits and groups.
        for bits in self.bits:
            GridSpec(bits=bits, group_size=self.group_size).groups(self.inputs)
        rule = "bits must be one or more different numbers"
        good = 0 < len(self.bits) == len(set(self.bits))
        checks.require(good, rule, bits=self.bits)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": (*BASELINES, *(f"{bits} bits" for bits in self.bits), "copy"),
            "repetition": range(self.repetitions),
            "bits": self.bits,
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times products in turns in one process, beside a copy of the dense matrix."""
    import jax
    import xarray as xr

    first, dense, *keys = jax.random.split(jax.random.key(cfg.seed), 2 + len(cfg.bits))
    x = jax.random.normal(first, (cfg.rows, cfg.inputs), "float16")
    quantized = {
        bits: [random_matrix(one, cfg, bits) for one in jax.random.split(key)]
        for bits, key in zip(cfg.bits, keys, strict=True)
    }
    pairs = list(quantized.values())
    thunks, size = candidates(x, quantized, cfg, dense)
    measured = perf.compare(thunks, BASELINES[0], repetitions=cfg.repetitions, warmup=2)
    inner = xr.ones_like(measured["candidate"], dtype=int) * cfg.inner
    inner.loc["copy"] = 1
    return runs.measured(
        {
            "seconds": measured["seconds"] / inner,
            "bytes": ("candidate", [size[name] for name in thunks]),
            "error": ("bits", [error_of(x, one, one, cfg) for one, _ in pairs]),
            "mixed": ("bits", [error_of(x, one, two, cfg) for one, two in pairs]),
        },
        coords={"bits": list(cfg.bits)},
    )


def random_matrix(
    key: "jax.Array", cfg: Config, bits: int
) -> "kernels.QuantizedMatrix":
    """Returns a matrix of random words, which are random integers packed already."""
    import jax
    import jax.numpy as jnp

    words, scale, zero = jax.random.split(key, 3)
    shape = cfg.inputs // cfg.group_size, cfg.outputs
    rows = kernels.packed_rows(cfg.inputs, bits)
    return kernels.QuantizedMatrix(
        words=jax.random.bits(words, (rows, cfg.outputs), jnp.uint32),
        scale=jax.random.uniform(scale, shape, jnp.float16, 0.01, 0.02),
        zero=jax.random.randint(zero, shape, 0, 2**bits).astype(jnp.float16),
        bits=bits,
        inputs=cfg.inputs,
        group_size=cfg.group_size,
    )


def product(
    x: "jax.Array", matrix: "kernels.QuantizedMatrix", cfg: Config
) -> "jax.Array":
    """Returns the product, float32."""
    return kernels.quantized_matmul(
        x,
        matrix,
        implementation=cfg.implementation,
        output="float32",
    )


def error_of(
    x: "jax.Array",
    matrix: "kernels.QuantizedMatrix",
    meant: "kernels.QuantizedMatrix",
    cfg: Config,
) -> float:
    """Returns how far 64 outputs are from those of what is meant, over ‖w‖‖x‖."""
    import jax

    some = jax.jit(lambda matrix: matrix.dequantize()[:, :64])(meant)
    weights, wide = np.asarray(some, np.float64), np.asarray(x, np.float64)
    found = np.asarray(product(x, matrix, cfg)[:, :64], np.float64)
    norms = np.linalg.norm(wide, axis=1)[:, None] * np.linalg.norm(weights, axis=0)
    return float(np.max(np.abs(found - wide @ weights) / norms))


def candidates(
    x: "jax.Array",
    quantized: "Mapping[int, Sequence[kernels.QuantizedMatrix]]",
    cfg: Config,
    key: "jax.Array",
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Returns thunks of `cfg.inner` products, or one copy, and bytes of one each."""
    import functools

    import jax
    import jax.numpy as jnp

    def in_turns(multiply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, matrices, n: multiply(x, matrices[n % len(matrices)])

    wide = {"preferred_element_type": jnp.float32}
    shape = cfg.inputs, cfg.outputs
    dense = [jax.random.normal(one, shape, "bfloat16") for one in jax.random.split(key)]
    turned = [jnp.asarray(matrix.T) for matrix in dense]
    low = x.astype("bfloat16")
    eight = jnp.pad(low, ((0, max(0, 8 - cfg.rows)), (0, 0)))
    dot = functools.partial(jnp.dot, **wide)
    across = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), **wide
    )
    own = functools.partial(product, cfg=cfg)
    problems = {
        BASELINES[0]: (dot, low, dense),
        BASELINES[1]: (dot, eight, dense),
        BASELINES[2]: (across, low, turned),
        **{f"{bits} bits": (own, x, found) for bits, found in quantized.items()},
    }
    copy = jax.jit(jnp.negative)
    thunks = {
        name: perf.chain_calls(in_turns(multiply), given, matrices, cfg.inner)
        for name, (multiply, given, matrices) in problems.items()
    }
    size = {name: _bytes(problem[2][0]) for name, problem in problems.items()}
    thunks["copy"], size["copy"] = lambda: copy(dense[0]), 2 * dense[0].nbytes
    return thunks, size


def _bytes(matrix: Any) -> int:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(matrix))
