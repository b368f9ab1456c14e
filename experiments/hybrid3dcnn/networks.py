"""Sizes of the published networks, and memory of a step on samples in blocks."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import cost, models, perf, runs, sharding
from hpcjax.core import checks
from hpcjax.core.config import Config as Base
from hpcjax.core.config import Seed, Size
from hpcjax.models import CosmoFlowConfig, VolumeUNetConfig

GIGA, GIB, CHANNELS = 1e9, 2**30, 4
WIDTHS = "width: of a cube of CosmoFlow"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Base):
    """CosmoFlow of several widths, a 3-D U-Net, and steps of the first three layers.

    Attributes:
      model: CosmoFlow.
      unet: the U-Net.
      widths: of cubes.
      unet_width: of the U-Net's.
      blocks: numbers of devices that share out the depth of a sample.
      block_width: of the cube that is cut.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"widths": "[32]", "unet_width": "32"},
        **{"blocks": "[1]", "block_width": "16"},
    }
    figures: ClassVar[Mapping[str, str]] = {
        "parameters": f"width: analytical: {WIDTHS}",
        "gigaflop": "width: analytical: of a step's convolutions, of one sample",
        "gibibytes": "width: analytical: of a sample's activations and gradients",
        "unet_parameters": ": analytical: of the U-Net",
        "unet_gigaflop": ": analytical: of its convolutions, forward",
        "temporaries": "blocks: bytes of a device, forward and back to the third pool",
        "data_parallel": ": likewise, where each of the most devices has a sample",
    }

    model: CosmoFlowConfig = CosmoFlowConfig()
    unet: VolumeUNetConfig = VolumeUNetConfig()
    widths: tuple[Size, ...] = (32, 64, 128, 256, 512)
    unet_width: Size = 256
    blocks: tuple[Size, ...] = (1, 2, 4, 8)
    block_width: Size = 128
    seed: Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns widths and numbers of blocks."""
        return {"width": self.widths, "blocks": self.blocks}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Counts from shapes, and compiles."""
    each = [_size(cfg.model, (*[width] * 3, CHANNELS), 4) for width in cfg.widths]
    unet = _size(cfg.unet, (*[cfg.unet_width] * 3, 1), 3)
    return {
        "parameters": np.array([count for count, _ in each]),
        "gigaflop": np.array([work.step / GIGA for _, work in each]),
        "gibibytes": np.array([work.memory / GIB for _, work in each]),
        "unet_parameters": unet[0],
        "unet_gigaflop": unet[1].forward / GIGA,
        "temporaries": np.array([temporaries(cfg, p, True) for p in cfg.blocks]),
        "data_parallel": temporaries(cfg, max(cfg.blocks), False),
    }


def _size(
    config: Any, sample: tuple[int, ...], outputs: int
) -> tuple[int, "cost.ConvWork"]:
    """Returns parameters and work of a network, read from its trace."""
    import jax

    model = config.make(sample, outputs)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, *sample), "float32")
    trace = jax.make_jaxpr(lambda v, x: model.apply(*v, x, train=False))(variables, x)
    return models.num_params(model), cost.conv_work(read_layers(trace.jaxpr), sample)


def read_layers(jaxpr: Any) -> Iterator["cost.WindowLayer"]:
    """Yields the convolutions and pools of volumes in a trace, of one sample."""
    for eqn in jaxpr.eqns:
        name, told = eqn.primitive.name, eqn.params
        shape = eqn.outvars[0].aval.shape[1:]
        if name == "conv_general_dilated":
            *window, inputs, _ = eqn.invars[1].aval.shape
            yield cost.WindowLayer(shape, tuple(window), inputs)
        elif name.startswith("reduce_window"):
            yield cost.WindowLayer(shape, told["window_dimensions"][1:-1])
        elif name == "dot_general" and len(shape) > 3:  # of a transposed convolution
            inputs, outputs = eqn.invars[1].aval.shape
            yield cost.WindowLayer((*shape[:-1], outputs), (1,), inputs)
        for value in told.values():
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                yield from read_layers(inside)


def temporaries(cfg: Config, devices: int, cut: bool) -> int:
    """Returns a device's temporary bytes, forward and back through three pairs.

    Args:
      cfg: with the width of a cube.
      devices: that share out one sample, or have one each.
      cut: whether they share it out.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    axis = sharding.SPACE_AXES[0]
    mesh = sharding.make_mesh({axis: devices})
    space = (axis, None, None) if cut else ()
    spec = PartitionSpec(None, axis) if cut else PartitionSpec(axis)
    rule = "blocks must divide the width in blocks of 8 at least"
    checks.require(cfg.block_width >= 8 * devices, rule, blocks=devices)
    sizes = [CHANNELS, *(width // cfg.model.width_divisor for width in (16, 32, 64))]
    kernels = [
        jax.ShapeDtypeStruct((3, 3, 3, *sizes[at : at + 2]), "float32")
        for at in range(3)
    ]
    whole = (1 if cut else devices, *[cfg.block_width] * 3, CHANNELS)
    x = jax.ShapeDtypeStruct(whole, "float32", sharding=NamedSharding(mesh, spec))

    def slopes(kernels: Any, x: Any) -> Any:
        local = jax.lax.pcast(kernels, axis, to="varying")
        found = jax.grad(lambda k: _first_layers(k, x, space).mean())(local)
        return jax.lax.pmean(found, axis)

    mapped = jax.shard_map(
        slopes, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec()
    )
    return perf.temporary_memory(jax.jit(mapped).lower(kernels, x).compile())


def _first_layers(kernels: Any, x: Any, space: Any) -> Any:
    """Returns what the third pool of CosmoFlow puts out."""
    import jax

    from hpcjax import layers

    pads = [(1, 1)] * 3
    for kernel in kernels:
        y = layers.conv(x, kernel, padding=pads, space=space)
        x = layers.pool(
            *(jax.nn.leaky_relu(y), (3,) * 3, "mean"),
            **{"strides": (2,) * 3, "padding": pads, "space": space},
        )
    return x
