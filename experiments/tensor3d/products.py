"""The products of Optimus and of Colossal-AI, which Tensor3D is compared with."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import cost, perf, runs, sharding
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

# In a loop, where the compiler does not keep what the backward pass gathers again.
PAIRS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Pairs of layers and their gradients.

    Attributes:
      scheme: "optimus2d" on a square of devices, or "colossal3d" on a cube.
      side: devices along an edge.
      rows: of x.
      inputs: of the layer.
      outputs: of the layer.
      seed: of the numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "rows": "8",
        "inputs": "16",
        "outputs": "24",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "sent": ": bytes of a device for a pair, k to n and n to k features, by rings",
        "formula": ": words, by the cost model",
        "apart": ": of outputs and gradients from float64's, the largest, relative",
        "ours worst": ": words that Tensor3D sends on its best and its worst grid",
    }

    scheme: Literal["optimus2d", "colossal3d"] = "optimus2d"
    side: config.Several = 2
    rows: config.Size = 32
    inputs: config.Size = 64
    outputs: config.Size = 192
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.side**2
        sizes = (self.rows, self.inputs, self.outputs)
        if any(size % parts for size in sizes):
            raise ConfigError(
                f"side² must divide rows, inputs and outputs: got side={self.side}, "
                f"{sizes}"
            )


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Compiles and runs pairs of layers with their gradients."""
    import jax
    from jax.sharding import PartitionSpec as P

    flat = cfg.scheme == "optimus2d"
    mesh = sharding.make_mesh(dict.fromkeys("ij" if flat else "ijl", cfg.side))
    of_x, *of_w = (
        [P("i", "j"), P(None, "i", "j"), P(None, "i", "j")]
        if flat
        else [P("i", ("j", "l")), P(None, ("j", "i"), "l"), P(None, ("l", "i"), "j")]
    )

    def pair(x: Any, ws: Any) -> tuple[Any, None]:
        if flat:
            hidden = sharding.summa(x, ws[0], ("i", "j"))
            return sharding.summa(hidden, ws[1], ("i", "j")), None
        # The outputs of a product are cut as inputs with two axes exchanged.
        hidden = sharding.cube_product(x, ws[0], ("i", "j", "l"))
        return sharding.cube_product(hidden, ws[1], ("i", "l", "j")), None

    def local(x: Any, ws: Any, slope: Any) -> Any:
        y, pull = jax.vjp(lambda x, ws: jax.lax.scan(pair, x, ws)[0], x, ws)
        return y, *pull(slope)

    specs = of_x, tuple(of_w), of_x
    outputs = of_x, of_x, tuple(of_w)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outputs)
    given = _draw(cfg)
    placed = jax.tree.map(
        lambda array, spec: jax.device_put(array, jax.NamedSharding(mesh, spec)),
        given,
        specs,
    )
    compiled = jax.jit(mapped).lower(*placed).compile()
    ours, exact = (jax.tree.leaves(each) for each in (compiled(*placed), _exact(given)))
    distance = max(
        float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())
        for found, wanted in zip(ours, exact, strict=True)
    )
    sizes = cfg.inputs, cfg.outputs
    layers = [
        sharding.MatrixLayer(inputs=k, outputs=n, transposed=turned, count=1)
        for (k, n), turned in ((sizes, False), (sizes[::-1], True))
    ]
    grid = sharding.Grid(col=mesh.size)
    best, *_, worst = cost.best_grid(layers, cfg.rows, mesh.size, parts=mesh.size)
    predicted = cost.comm_volume(layers, cfg.rows, grid, cfg.scheme)
    sent = sum(perf.ring_bytes_by_axis(compiled, mesh).values())
    return {
        "sent": sent / PAIRS,
        "formula": predicted[cfg.scheme],
        "apart": distance,
        "ours": best.total,
        "worst": worst.total,
    }


def _exact(given: Any) -> Any:
    """Returns outputs and gradients in float64."""
    x, (first, second), slope = given
    xs = [np.asarray(x, np.float64)]
    for one, two in zip(first, second, strict=True):
        xs += [xs[-1] @ one, xs[-1] @ one @ two]
    slope, slopes = np.asarray(slope, np.float64), ([], [])
    for number in reversed(range(len(first))):
        slopes[1].insert(0, xs[2 * number + 1].T @ slope)
        slope = slope @ second[number].T
        slopes[0].insert(0, xs[2 * number].T @ slope)
        slope = slope @ first[number].T
    return xs[-1], slope, tuple(map(np.stack, slopes))


def _draw(cfg: Config) -> tuple[Any, ...]:
    """Returns x, the matrices of pairs of layers, and a slope of the outputs."""
    rng = np.random.default_rng(cfg.seed)
    x, slope = rng.normal(size=(2, cfg.rows, cfg.inputs)).astype(np.float32)
    sizes = (cfg.inputs, cfg.outputs), (cfg.outputs, cfg.inputs)
    ws = [rng.normal(size=(PAIRS, *size)) / np.sqrt(size[0]) for size in sizes]
    return x, tuple(w.astype(np.float32) for w in ws), slope
