"""How much of the communication of split layers hides behind computation.

A device has two queues, of computation and of its link. A layer's all-reduce begins
when what it sums is computed and the link is free. With two independent pieces of the
batch one computes while the other is summed.
"""

from typing import NamedTuple

from hpcjax.core import checks
from hpcjax.cost.timelines import Bar


class Overlap(NamedTuple):
    """A training step in time.

    Attributes:
      makespan: from begin to end.
      exposed: the part of it in which nothing is computed.
      bars: of device 0, the computation, and device 1, its link.
    """

    makespan: float
    exposed: float
    bars: tuple[Bar, ...]


class _Queues:
    """What has been computed and sent so far."""

    def __init__(self) -> None:
        self.ends, self.bars = [0.0, 0.0], []

    def put(self, queue: int, ready: float, seconds: float, kind: str) -> float:
        """Returns when work ends that begins when it is ready and its queue is free."""
        start = max(self.ends[queue], ready)
        self.ends[queue] = start + seconds
        self.bars.append(Bar(queue, start, self.ends[queue], kind, ""))
        return self.ends[queue]


def overlap_pieces(
    layers: int,
    ratio: float,
    *,
    pieces: int = 2,
    early: bool = True,
    in_turn: bool = False,
) -> Overlap:
    """Simulates the forward and backward pass of equal layers that are split in two.

    A layer has three products of one unit each, all pieces together, y = x W, dx and
    dW, and two all-reduces, of y and of dx.

    Args:
      layers: how many.
      ratio: time of the products over that of the all-reduces.
      pieces: of the batch, independent of each other.
      early: whether dx is summed while dW is computed.
      in_turn: whether a piece waits until the one before is summed, a control.

    Raises:
      ConfigError: fewer than one layer or piece, or a ratio not above 0.

    References:
      Singh, Sating and Bhatele, arXiv 2305.13525, 2023, section 5.

    Examples:
      >>> one, two = (overlap_pieces(24, 1.0, pieces=n, early=False) for n in (1, 2))
      >>> round(two.exposed / one.exposed, 2)
      0.17
    """
    checks.require_count(1, layers=layers, pieces=pieces)
    checks.require(ratio > 0, "ratio must be above 0", ratio=ratio)
    queues, ready = _Queues(), [0.0] * pieces
    product, reduce = 1 / pieces, 1.5 / ratio / pieces
    for number in range(2 * layers):
        forward = number < layers
        for piece in range(pieces):
            begin = max(ready) if in_turn else ready[piece]
            done = queues.put(0, begin, product, "y" if forward else "dx")
            if not forward and not early:
                done = queues.put(0, done, product, "dW")
            ready[piece] = queues.put(1, done, reduce, "all-reduce")
            if not forward and early:
                queues.put(0, done, product, "dW")
    makespan = max(queues.ends)
    return Overlap(makespan, makespan - 3 * layers, tuple(queues.bars))
