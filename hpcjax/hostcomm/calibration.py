"""What a transport costs: alpha seconds for a message, beta seconds for each byte."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.collectives import broadcast
from hpcjax.hostcomm.mailbox import Tag
from hpcjax.hostcomm.transport import Transport


class MessageCost(NamedTuple):
    """The seconds of a message of n bytes: alpha + beta n.

    Attributes:
      alpha: seconds.
      beta: seconds per byte; its inverse is the bandwidth.
    """

    alpha: float
    beta: float

    def seconds(self, count: float) -> float:
        """Returns those of a message of `count` bytes.

        Examples:
          >>> MessageCost(alpha=1e-4, beta=1e-9).seconds(1e6)
          0.0011
        """
        return self.alpha + self.beta * count


def ping_pong(
    transport: Transport,
    sizes: Sequence[int],
    *,
    repetitions: int = 20,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Measures messages between ranks 0 and 1; all ranks call it.

    Args:
      transport: ours.
      sizes: bytes of the messages.
      repetitions: there and back again, of each size; the median counts.
      warmup: that many before, which do not count.
      clock: seconds.

    Returns:
      Seconds of a message of each size, half of there and back, the same in all ranks.

    Raises:
      ConfigError: fewer than two ranks, or sizes that are none.
    """
    checks.require(transport.size > 1, "there must be two ranks", size=transport.size)
    checks.require(
        len(sizes) > 0 and min(sizes) >= 0, "sizes must be >= 0", sizes=list(sizes)
    )
    checks.require_count(1, repetitions=repetitions)
    times = np.zeros((len(sizes), repetitions))
    for place, size in enumerate(sizes):
        ball = np.zeros(size, np.uint8)
        for turn in range(-warmup, repetitions if transport.rank < 2 else -warmup):
            tag = Tag("ping_pong", place, 0)
            begin = clock()
            if transport.rank == 0:
                transport.send(1, tag, ball)
                transport.receive(1, tag)
                if turn >= 0:
                    times[place, turn] = (clock() - begin) / 2
            else:
                transport.send(0, tag, transport.receive(0, tag))
    return broadcast(transport, np.median(times, axis=1), tag=Tag("ping_pong", -1))


def fit_cost(sizes: Sequence[int], seconds: Sequence[float]) -> MessageCost:
    """Fits alpha and beta by least squares of the relative errors.

    Of the absolute errors the largest messages would be all that counts, and alpha
    would be their noise.

    Args:
      sizes: bytes; at least two different ones.
      seconds: what was measured, > 0.

    Raises:
      ConfigError: too few sizes, or times that are none.

    Examples:
      >>> cost = fit_cost([0, 1000, 10**6], [1e-4, 1.01e-4, 1.1e-3])
      >>> f"{cost.alpha:.1e} {cost.beta:.1e}"
      '1.0e-04 1.0e-09'
    """
    n, measured = np.asarray(sizes, float), np.asarray(seconds, float)
    checks.require(
        n.shape == measured.shape and len(set(n.tolist())) > 1,
        "there must be two different sizes, and a time for each",
        sizes=n.tolist(),
    )
    checks.require(
        bool(np.all(measured > 0)), "times must be > 0", seconds=measured.tolist()
    )
    scale = max(n.max(), 1.0)
    terms = np.stack([np.ones_like(n), n / scale], axis=1) / measured[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(terms, np.ones_like(n), rcond=None)
    return MessageCost(float(alpha), float(beta / scale))
