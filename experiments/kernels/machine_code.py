"""What each GPU kernel's machine code does, compiled for Hopper on any machine."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from hpcjax import kernels, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import jax

Kernel = Literal["one_row", "several_rows", "plain_row", "attention", "selection"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A kernel and its operands.

    Attributes:
      kernel: a product with a quantized matrix of one row or of 16, one row as it is
        written first, attention of one token, or selection above a threshold.
      bits: of a weight.
      dtype: of x, keys and values.
      size: of the operands for which the kernel is compiled: rows and columns of the
        matrix, positions of the cache, or thousands of values.
      counted: of those on which it is interpreted.
      tile: outputs of a program of plain_row; too many do not fit into registers.
      seed: of their numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {"size": "512", "counted": "128"}
    figures: ClassVar[Mapping[str, str]] = {
        "instructions loads": ": of the inner loop, a thread, for each number",
        "conversions": ": from or to integers",
        "products saturating": ": kinds of tensor-core products, and saturating ones",
        "registers": ": of a thread",
        "spilled": ": bytes",
        "loaded": ": elements read over those there are, the most of large operands",
    }

    kernel: Kernel = "one_row"
    bits: Literal[2, 3, 4, 8] = 4
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    size: config.Size = 8192
    counted: config.Size = 256
    tile: config.Size = 128
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel == "plain_row" and self.bits != 4:
            raise ConfigError(f"kernel=plain_row has bits=4: got bits={self.bits}")


class Case(NamedTuple):
    """How a kernel is called and what is counted.

    Attributes:
      call: takes the operands and a keyword `implementation`.
      operands: makes them of a size.
      once: parameters of the kernel that should be read once.
      values: how many numbers a program handles in a turn of its inner loop, or in all
        if it has none, by the kernel's constants.
    """

    call: Callable[..., Any]
    operands: Callable[[int], tuple[Any, ...]]
    once: tuple[str, ...]
    values: Callable[[Mapping[str, int]], int]


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Compiles the kernel for Hopper, and interprets it."""
    import jax

    del ctx
    case = _cases(cfg)[cfg.kernel]
    large = jax.eval_shape(lambda: case.operands(cfg.size))
    (code,) = perf.machine_code(
        functools.partial(case.call, implementation="triton"), *large
    )
    interpreted = functools.partial(case.call, implementation="interpreted")
    (accesses,) = perf.count_accesses(interpreted, *case.operands(cfg.counted))
    loop = max(code.inner_loops, key=len, default=code.instructions)
    handled = case.values(code.constants) / code.threads
    kinds = [name.partition(".")[0] for name in code.instructions]
    return runs.measured(
        {
            "instructions": len(loop) / handled,
            "loads": sum(name.startswith(("LDG", "LDGSTS")) for name in loop) / handled,
            "conversions": sum(kind in ("I2F", "I2FP", "F2I") for kind in kinds),
            "products": len(code.tensor_core_products),
            "saturating": code.ptx.count("satfinite"),
            "registers": code.registers,
            "spilled": code.spilled,
            "loaded": max(
                accesses.loaded[name] / accesses.sizes[name] for name in case.once
            ),
        }
    )


def _cases(cfg: Config) -> dict[Kernel, Case]:
    product = functools.partial(kernels.quantized_matmul, output="float32")
    select = functools.partial(kernels.select_above, capacity=64)
    one, several = (functools.partial(_matrix_problem, cfg, rows) for rows in (1, 16))
    return {
        "one_row": Case(product, one, ("words",), lambda sizes: 32 * sizes["TILE"]),
        "several_rows": Case(
            product,
            several,
            ("words",),
            lambda sizes: 32 * sizes["CHUNK"] * sizes["TILE"],
        ),
        "plain_row": Case(
            functools.partial(plain_row, tile=cfg.tile),
            one,
            ("words",),
            lambda sizes: 8 * sizes["TILE"],
        ),
        "attention": Case(
            kernels.clustered_attention,
            functools.partial(_attention_problem, cfg),
            ("keys", "values"),
            lambda sizes: sizes["BLOCK"] * sizes["WIDTH"],
        ),
        "selection": Case(
            select,
            functools.partial(_selection_problem, cfg),
            ("x",),
            lambda sizes: sizes["BLOCK"],
        ),
    }


def plain_row(
    x: "jax.Array",
    matrix: "kernels.QuantizedMatrix",
    *,
    implementation: str,
    tile: int = 128,
) -> "jax.Array":
    """Returns x Ŵ of one row by the kernel that is the control, float32."""
    import jax

    group = matrix.group_size or matrix.inputs
    tile = min(tile, matrix.shape[-1])
    launch = kernels.Launch(
        kernel="experiments.kernels.kernel:plain_row",
        grid=(matrix.shape[-1] // tile, 1, 1),
        outputs=(jax.ShapeDtypeStruct(matrix.shape[-1:], "float32"),),
        constants={
            "OUTPUTS": matrix.shape[-1],
            "GROUPS": matrix.inputs // group,
            "GROUP": group // 8,
            "TILE": tile,
        },
        warps=1,
    )
    arrays = (matrix.words, matrix.scale, matrix.zero)
    interpreted = implementation == "interpreted"
    (y,) = kernels.run(launch, x[0].astype("float32"), *arrays, interpreted=interpreted)
    return y


def _matrix_problem(cfg: Config, rows: int, size: int) -> tuple[Any, ...]:
    import jax

    words, x = jax.random.split(jax.random.key(cfg.seed))
    packed = (kernels.packed_rows(size, cfg.bits), size)
    scale = jax.numpy.ones((size // 128, size), "float16")
    matrix = kernels.QuantizedMatrix(
        words=jax.random.bits(words, packed, "uint32"),
        scale=scale,
        zero=scale,
        bits=cfg.bits,
        inputs=size,
        group_size=128,
    )
    return jax.random.normal(x, (rows, size), cfg.dtype), matrix


def _attention_problem(cfg: Config, size: int) -> tuple[Any, ...]:
    """Two requests of eight heads in four clusters, at the end of their caches."""
    import jax
    import jax.numpy as jnp

    query, keys, values = jax.random.split(jax.random.key(cfg.seed), 3)
    draw = functools.partial(jax.random.normal, dtype=cfg.dtype)
    return (
        draw(query, (2, 1, 4, 128)),
        draw(keys, (2, size, 4, 128)),
        draw(values, (2, size, 8, 128)),
        jnp.tile(jnp.arange(8) % 4, (2, 1)),
        jnp.full((2, 1), size - 1),
    )


def _selection_problem(cfg: Config, size: int) -> tuple[Any, ...]:
    import jax

    x = jax.random.normal(jax.random.key(cfg.seed), (1000 * size,))
    return x, kernels.kth_magnitude(kernels.magnitudes(x), 64)
