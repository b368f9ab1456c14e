"""What a transport costs: alpha seconds for a message, beta seconds for each byte."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from hpcjax.core import checks
from hpcjax.core.least_squares import fit_costs
from hpcjax.hostcomm.collectives import broadcast
from hpcjax.hostcomm.mailbox import Tag
from hpcjax.hostcomm.transport import Transport


@dataclasses.dataclass(frozen=True)
class MessageCost:
    """The α–β model: m messages of n bytes in all take alpha m + beta n seconds.

    Attributes:
      alpha: latency, seconds for each message.
      beta: seconds for each byte; its inverse is the bandwidth.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        checks.require_finite(0.0, alpha=self.alpha, beta=self.beta)

    @classmethod
    def of_rate(cls, bytes_per_s: float, alpha: float = 0.0) -> "MessageCost":
        """Returns that of a bandwidth, which may be infinite."""
        checks.require(
            bytes_per_s > 0, "bytes_per_s must be > 0", bytes_per_s=bytes_per_s
        )
        return cls(alpha, 1 / bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth."""
        return 1 / self.beta if self.beta else np.inf

    def seconds(self, count: float, messages: float = 1.0) -> float:
        """Returns those of `count` bytes in so many messages, one after the other.

        Examples:
          >>> MessageCost(alpha=1e-4, beta=1e-9).seconds(1e6)
          0.0011
        """
        return self.alpha * messages + self.beta * count


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


def fit_cost(
    sizes: Sequence[float],
    seconds: Sequence[float],
    messages: Sequence[float] | None = None,
) -> MessageCost:
    """Fits alpha and beta, neither negative, by least squares of the relative errors.

    Args:
      sizes: bytes of each measurement.
      seconds: what was measured, > 0.
      messages: that followed one another in each; None: a single one.

    Raises:
      ConfigError: what was measured does not tell alpha from beta, such as a single
        size, or took no time.

    Examples:
      >>> cost = fit_cost([0, 1000, 10**6], [1e-4, 1.01e-4, 1.1e-3])
      >>> f"{cost.alpha:.1e} {cost.beta:.1e}"
      '1.0e-04 1.0e-09'
    """
    counted = [1.0] * len(sizes) if messages is None else messages
    checks.require(
        len(sizes) == len(seconds) == len(counted),
        "sizes, seconds and messages must be alike in number",
        got=(len(sizes), len(seconds), len(counted)),
    )
    for took in seconds:
        checks.require_positive(seconds=took)
    rows = np.array([counted, sizes], float).T
    # Some row must be no multiple of another one, whatever the units are.
    checks.require(
        any(a * d != b * c for (a, b), (c, d) in itertools.combinations(rows, 2)),
        "sizes and messages must tell alpha from beta, as two different sizes do",
        sizes=list(sizes),
        messages=list(counted),
    )
    return MessageCost(*fit_costs(rows, np.asarray(seconds, float)).tolist())
