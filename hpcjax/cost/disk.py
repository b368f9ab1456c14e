"""Seconds that a disk and memory take to give a batch its neighbours."""

import math

from hpcjax.core import checks


def disk_seconds(
    pages: float,
    cached: float = 0.0,
    *,
    latency: float = 80e-6,
    in_flight: int = 32,
    page: int = 4096,
    rate: float = 2e9,
    memory_rate: float = 10e9,
) -> float:
    """Returns ⌈pages/in flight⌉·latency + pages·page/rate + cached/memory rate.

    Args:
      pages: that are read, each once.
      cached: bytes that come from memory.
      latency: seconds of a read.
      in_flight: reads at once.
      page: bytes.
      rate: of the disk, bytes/s.
      memory_rate: bytes/s.

    Raises:
      ConfigError: a number is negative, or one of the machine's not positive.

    References:
      Liu et al., GraphSnapShot, 2024: S/v for each level of memory; reads by pages, of
      which so many are in flight, are what a disk charges.

    Examples:
      >>> round(1e3 * disk_seconds(447, cached=50_000), 2)
      2.04
    """
    checks.require_finite(0.0, pages=pages, cached=cached)
    machine = {"latency": latency, "rate": rate, "memory_rate": memory_rate}
    positive = min(*machine.values(), in_flight, page) > 0
    checks.require(positive, "a disk's numbers must be above 0", **machine)
    reads = math.ceil(pages / in_flight) * latency + pages * page / rate
    return reads + cached / memory_rate
