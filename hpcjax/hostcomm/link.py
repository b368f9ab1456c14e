"""Links as slow as one likes: what a process sends is let out at a rate."""

import dataclasses
import math
import threading
import time

from hpcjax.core import checks

PIECE = 64 * 1024  # bytes that leave at once, and that a late sender may catch up with


class Clock:
    """The time of this machine; a test may have another one."""

    def time(self) -> float:
        """Returns the seconds since some moment."""
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        """Returns once `time()` is at least `moment`."""
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What connects a process with all others.

    Attributes:
      rate: bytes/s that leave the process, to all others together.
      latency: seconds from the arrival of a message's last byte until it is delivered;
        nobody else waits for them.

    Examples:
      >>> fast_ethernet = Link(rate=100e6 / 8, latency=50e-6)
      >>> 1e6 / fast_ethernet.rate
      0.08
    """

    rate: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        checks.require(self.rate > 0, "rate must be > 0", rate=self.rate)
        checks.require_finite(0.0, latency=self.latency)


class Egress:
    """The token bucket through which everything leaves that a process sends.

    It holds what is sent back until its last byte would have left, so that n bytes
    never take less than n / rate. Tokens gather only while somebody has bytes waiting,
    64 KiB at most: a sender that is woken too late catches up, an idle link saves none.
    """

    def __init__(self, rate: float, clock: Clock | None = None) -> None:
        """Makes an idle one.

        Args:
          rate: bytes/s.
          clock: another one than the machine's.
        """
        self._rate, self._clock = rate, clock or Clock()
        self._free = -math.inf  # when all that was let out so far has left
        self._lock = threading.Lock()

    def begin(self) -> float:
        """Returns what the first piece of a message passes to `let_out`: now."""
        return self._clock.time()

    def let_out(self, count: int, ready: float) -> float:
        """Waits until a piece has left.

        Args:
          count: its bytes, at most `PIECE`.
          ready: since when it has waited: what the call for the piece before returned.

        Returns:
          The moment at which its last byte leaves.
        """
        with self._lock:
            late = self._clock.time() - PIECE / self._rate
            end = max(ready, self._free, late) + count / self._rate
            self._free = end
        self._clock.sleep_until(end)
        return end
