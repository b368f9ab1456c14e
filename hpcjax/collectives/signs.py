"""Signs as bits: 32 numbers a word."""

import dataclasses
from typing import Any

from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Vector

_BITS = 32


def pack_signs(xp: Any, x: Vector) -> Vector:
    """Returns uint32 [ceil(n / 32)]: bit i of word w says whether x[32 w + i] >= 0.

    Args:
      xp: `jax.numpy` or `numpy`.
      x: numbers, [n].

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
    """Returns int8 [n], 1 and -1: what `pack_signs` has packed.

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
    """See `SignConfig`.

    Attributes:
      scaled: sends the mean magnitude with the signs and averages, instead of a vote.
    """

    scaled: bool = False

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages, or votes."""
        xp, n = group.xp, x.size
        packed = pack_signs(xp, x)
        everything = group.all_gather(packed)
        scale = xp.mean(xp.abs(x)) if self.scaled else xp.float32(1)
        scales = group.all_gather(scale) if self.scaled else [scale] * group.size
        total = xp.zeros(n, "float32")
        for member in range(group.size):
            signs = unpack_signs(xp, everything[member], n)
            total = total + scales[member] * signs
        words = packed.size + self.scaled
        stats = CommStats.of(
            group,
            selected=n,
            kept=n,
            sent_words=words * (group.size - 1),
            received_words=words * (group.size - 1),
        )
        mean = total / xp.float32(group.size) if self.scaled else xp.sign(total)
        rest = x - scale * unpack_signs(xp, packed, n)
        return Outcome(mean, rest, own, shared, stats)
