"""A convolution of a sample in blocks: what it sends, and how far it is from serial."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import runs, sharding
from hpcjax.core.config import Config as Base
from hpcjax.core.config import Seed, Size
from hpcjax.sharding import SpatialConfig

BATCH, INPUTS, OUTPUTS = 2, 3, 4
FORWARD, BACKWARD = PASSES = "forward", "backward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Base):
    """Convolutions of cubes that are padded by half a kernel.

    Attributes:
      parallel: blocks of a cube; their number is that of the devices.
      side: points of a cube along each axis.
      kernels: sizes of windows.
      strides: from one to the next.
      halos: "all"; or "no corners", of what is beside a block along one axis alone.
      seed: of numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "side": "4",
        "kernels": "[3]",
        "parallel.depth": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "sent": "kernel stride: bytes of permutations of the forward pass",
        "rule": "kernel stride: analytical: bytes of halos",
        "permutes": "kernel stride pass: how many",
        "distance": "kernel stride: of outputs and slopes from one device's, relative",
        "origin": "y x: device from which a point of the first block with its halos "
        "came, in a plane: -1 past the end, NaN where no point is",
    }

    parallel: SpatialConfig = SpatialConfig(depth=8)
    side: Size = 16
    kernels: tuple[Size, ...] = (1, 3, 5, 7)
    strides: tuple[Size, ...] = (1, 2)
    halos: Literal["all", "no corners"] = "all"
    seed: Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns windows and passes."""
        around = {"y": range(self.side + 4), "x": range(self.side + 4)}
        windows = {"kernel": self.kernels, "stride": self.strides, "pass": PASSES}
        return {**windows, **around}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Compiles and runs a convolution of each window."""
    shape = len(cfg.kernels), len(cfg.strides)
    found: dict[str, Any] = {name: np.zeros(shape) for name in cfg.figures}
    found["permutes"] = np.zeros((*shape, 2))
    found["origin"] = _trace_origins(cfg)
    for i, kernel in enumerate(cfg.kernels):
        for j, stride in enumerate(cfg.strides):
            for name, value in _measure(cfg, kernel, stride).items():
                found[name][i, j] = value
    return found


def _lay_out(cfg: Config) -> tuple[tuple[int, ...], Any]:
    """Returns how many blocks there are along each axis, and their mesh."""
    counts = cfg.parallel.depth, cfg.parallel.height, cfg.parallel.width
    return counts, sharding.make_mesh(
        dict(zip(sharding.SPACE_AXES, counts, strict=True))
    )


def _trace_origins(cfg: Config) -> np.ndarray:
    """Returns the number of the device that each point came from; NaN is no point."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from hpcjax.collectives import halo

    counts, mesh = _lay_out(cfg)
    space, block = cfg.parallel.space(3), [cfg.side // count for count in counts]
    widths = [(0, 0), *((2, 2) if axis else (0, 0) for axis in space[1:])]

    def exchange() -> Any:
        number = jax.lax.axis_index(sharding.SPACE_AXES).astype(float)
        x = jnp.ones((1, *block, 1)) * number
        return halo.exchange_halos(x, widths, space, fill=-1)

    cut = PartitionSpec(None, *sharding.SPACE_AXES)
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=(), out_specs=cut)
    sides = [size + sum(own) for size, own in zip(block, widths, strict=True)]
    plane = jax.jit(mapped)()[0, 0, : sides[1], : sides[2], 0]
    missing = [(0, cfg.side + 4 - size) for size in plane.shape]
    return np.pad(plane, missing, constant_values=np.nan)


def _measure(cfg: Config, kernel: int, stride: int) -> dict[str, Any]:
    """Returns the figures of one window."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from experiments.spatial.controls import without_corners
    from hpcjax import layers, perf

    half, space, rng = kernel // 2, cfg.parallel.space(3), np.random.default_rng(0)
    counts, mesh = _lay_out(cfg)
    x = rng.normal(size=(BATCH, *[cfg.side] * 3, INPUTS)).astype(np.float32)
    w = rng.normal(size=(*[kernel] * 3, INPUTS, OUTPUTS)).astype(np.float32)
    cut = PartitionSpec(None, *space)

    def convolve(x: Any, w: Any, space: Any = ()) -> Any:
        pads, strides = [(half, half)] * 3, (stride,) * 3
        return layers.conv(x, w, strides=strides, padding=pads, space=space)

    blocks = jax.shard_map(
        lambda x, w: convolve(x, w, space),
        mesh=mesh,
        in_specs=(cut, PartitionSpec()),
        out_specs=cut,
    )

    def both(run: Any) -> Any:
        def passes(x: Any, w: Any) -> Any:
            y, pull = jax.vjp(run, x, w)
            return y, *pull(y)

        return passes

    place = NamedSharding(mesh, cut), NamedSharding(mesh, PartitionSpec())
    with without_corners(cfg.halos != "all"):
        forward = jax.jit(blocks, in_shardings=place).lower(x, w).compile()
        whole = jax.jit(both(blocks), in_shardings=place).lower(x, w).compile()
    ours, theirs = whole(*jax.device_put((x, w), place)), jax.jit(both(convolve))(x, w)
    permutes = [
        sum(each.kind == "collective-permute" for each in perf.collectives(program))
        for program in (forward, whole)
    ]
    return {
        "sent": perf.bytes_by_kind(forward)["collective-permute"],
        "rule": rule(cfg.side, counts, kernel, stride),
        "permutes": (permutes[0], permutes[1] - permutes[0]),
        "distance": max(
            np.max(np.abs(a - b)) / np.max(np.abs(b))
            for a, b in zip(*jax.device_get((ours, theirs)), strict=True)
        ),
    }


def rule(side: int, counts: tuple[int, ...], kernel: int, stride: int) -> int:
    """Returns the sum over axes of (lo + hi) * area * channels * 4 bytes."""
    block, total, half = [side // count for count in counts], 0, kernel // 2
    for at, count in enumerate(counts):
        if count > 1:  # even blocks: lo = p, hi = (K - 1) - p - (s - 1), at least 0
            wide = half + max(0, kernel - half - stride)
            total += wide * int(np.prod(block)) // block[at] * INPUTS * BATCH * 4
            block[at] += half + kernel - half - stride
    return total
