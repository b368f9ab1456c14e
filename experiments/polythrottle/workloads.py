"""Networks whose forward passes are served: their work, by layer, in 16-bit words."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from experiments.gradcomp.networks import PUBLISHED

if TYPE_CHECKING:
    from hpcjax import cost

Network = Literal["resnet50", "bert_base", "efficientnet_b0", "efficientnet_b4"]
WORD = 2
# Cycles of one core for each number of an image, which is resized and normalised here
# and decoded elsewhere; and for each token.
VALUE_CYCLES, TOKEN_CYCLES = 6.0, 1000.0
# Expansion, channels, blocks, stride, kernel (Tan, Le: EfficientNet, 2019, table 1).
_STAGES = (
    *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
    *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
)


class Conv(NamedTuple):
    """A convolution: sizes of its input and output, kernel, and groups."""

    side: int
    channels: int
    kernel: int
    stride: int
    outputs: int
    groups: int = 1


@functools.cache
def work_of(name: Network) -> "cost.Work":
    """Returns the work of a network's forward pass."""
    return _WORK[name]()


def _traced(name: str) -> "cost.Work":
    import jax

    from hpcjax import perf

    network = PUBLISHED[name]
    text = len(network.example) == 1
    dtype, cycles = ("int32", TOKEN_CYCLES) if text else ("float32", VALUE_CYCLES)
    cycles *= math.prod(network.example)
    inputs = jax.ShapeDtypeStruct(network.example, dtype)
    return perf.work_of(network.make(), inputs, word_bytes=WORD, cpu_cycles=cycles)


def _efficientnet(width: float, depth: float, side: int) -> "cost.Work":
    from hpcjax import cost

    convs = list(list_convs(width, depth, side))
    sides = [math.ceil(each.side / each.stride) ** 2 for each in convs]
    kernels = [
        each.outputs * each.channels // each.groups * each.kernel**2 for each in convs
    ]
    moved = [
        each.channels * each.side**2 + each.outputs * out
        for each, out in zip(convs, sides, strict=True)
    ]
    return cost.Work(
        flops=2.0 * np.array(kernels) * np.array(sides),
        query_bytes=WORD * np.array(moved, float),
        batch_bytes=WORD * np.array(kernels, float),
        kernels=np.ones(len(convs)),
        cpu_cycles=VALUE_CYCLES * 3 * side**2,
    )


def list_convs(width: float, depth: float, side: int) -> Iterator[Conv]:
    """Yields the convolutions of an EfficientNet without squeeze and excitation."""
    channels = _round(32 * width)
    yield Conv(side, 3, 3, 2, channels)
    side = math.ceil(side / 2)
    for expansion, plain, blocks, first, kernel in _STAGES:
        outputs = _round(plain * width)
        for block in range(math.ceil(blocks * depth)):
            stride, inner = (first if block == 0 else 1), expansion * channels
            if expansion > 1:
                yield Conv(side, channels, 1, 1, inner)
            yield Conv(side, inner, kernel, stride, inner, inner)
            side = math.ceil(side / stride)
            yield Conv(side, inner, 1, 1, outputs)
            channels = outputs
    last = _round(1280 * width)
    yield Conv(side, channels, 1, 1, last)
    yield Conv(1, last, 1, 1, 1000)


def _round(channels: float) -> int:
    """Returns the nearest multiple of 8, at least 0.9 of the number."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


_WORK: Mapping[Network, Callable[[], "cost.Work"]] = {
    "resnet50": lambda: _traced("resnet50"),
    "bert_base": lambda: _traced("bert_base"),
    "efficientnet_b0": lambda: _efficientnet(1.0, 1.0, 224),
    "efficientnet_b4": lambda: _efficientnet(1.4, 1.8, 380),
}
