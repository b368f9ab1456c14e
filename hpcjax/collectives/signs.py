"""Exchange of signs as bits, 32 of them in a word."""

import dataclasses
from typing import Any

from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Vector
from hpcjax.collectives.signs_config import SignConfig
from hpcjax.collectives.transfers import Transfer, all_gather

_BITS = 32


def pack_signs(xp: Any, x: Vector) -> Vector:
    """Packs signs: bit i of word w is whether x[32 w + i] >= 0, uint32 [⌈n / 32⌉].

    Args:
      xp: `jax.numpy` or `numpy`.
      x: values, [n].

    Examples:
      >>> import numpy
      >>> pack_signs(numpy, numpy.array([1.0, -2.0, 0.0])).tolist()
      [5]
    """
    words = -(-x.size // _BITS)
    bits = xp.concatenate([x >= 0, xp.zeros(words * _BITS - x.size, bool)])
    place = xp.arange(_BITS, dtype="uint32")
    placed = bits.reshape(words, _BITS).astype("uint32") << place
    return xp.sum(placed, axis=1, dtype="uint32")


def unpack_signs(xp: Any, words: Vector, n: int) -> Vector:
    """Returns the signs that `pack_signs` packed, 1 and −1, as int8 [n].

    Examples:
      >>> import numpy
      >>> unpack_signs(numpy, numpy.array([5], numpy.uint32), 3).tolist()
      [1, -1, 1]
    """
    place = xp.arange(_BITS, dtype="uint32")
    bits = (words[:, None] >> place) & xp.uint32(1)
    return (2 * bits.astype("int8") - 1).reshape(-1)[:n]


@dataclasses.dataclass(frozen=True)
class Signs(VectorMethod):
    """See `SignConfig`."""

    config: SignConfig

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages scaled signs, or takes the sign of the majority."""
        xp, n, scaled = group.xp, x.size, self.config.error_feedback
        packed = pack_signs(xp, x)
        everything = group.all_gather(packed)
        scale = xp.mean(xp.abs(x)) if scaled else xp.float32(1)
        scales = group.all_gather(scale) if scaled else [scale] * group.size
        # One member after the other: unpacked signs of all at once would take P times
        # the memory of x.
        total = xp.zeros(n, "float32")
        for member in range(group.size):
            signs = unpack_signs(xp, everything[member], n)
            total = total + scales[member] * signs
        words = self.words(n, group.size)
        stats = CommStats.of(
            group,
            selected=n,
            kept=n,
            sent_words=words,
            received_words=words,
        )
        mean = total / xp.float32(group.size) if scaled else xp.sign(total)
        rest = x - scale * unpack_signs(xp, packed, n)
        return Outcome(mean, rest, own, shared, stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns the gather of packed signs, and of scales with error feedback."""
        signs = all_gather(-(-n // _BITS), members)
        scaled = self.config.error_feedback
        return (signs, all_gather(1, members)) if scaled else (signs,)
