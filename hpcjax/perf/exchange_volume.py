"""Words that each worker sends in an all-reduce, dense or sparse, and their latency.

A word is one float32 value or one int32 index; a sparse entry has two. Entries that a
worker owns itself are not counted.

References:
  Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
  2022, table 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hpcjax.collectives.config import dense_words
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest


class Volume(NamedTuple):
    """What a worker sends.

    Attributes:
      least: words, where large entries lie as they should.
      most: words, wherever they lie; equal to `least` where it does not matter.
      rounds: messages that wait for each other, the factor of alpha.
    """

    least: float
    most: float
    rounds: float

    def between(self, place: float) -> float:
        """Returns the words at `place` of the way from `least`, 0, to `most`, 1."""
        return self.least + place * (self.most - self.least)


def _dense(n: int, k: int, p: int) -> Volume:
    words = dense_words(n, p)
    return Volume(words, words, 2 * math.log2(p))


def _gathered(n: int, k: int, p: int) -> Volume:
    words = 2.0 * k * (p - 1)
    return Volume(words, words, math.log2(p))


def _topk_dsa(n: int, k: int, p: int) -> Volume:
    # From sums that all fall together to regions that have become dense.
    least, most = sorted((4 * k * (p - 1) / p, (2 * k + n) * (p - 1) / p))
    return Volume(least, most, p + 2 * math.log2(p))


def _gtopk(n: int, k: int, p: int) -> Volume:
    checks.require(p & (p - 1) == 0, "gtopk needs a power of two", processes=p)
    words = 4 * k * math.log2(p)
    return Volume(words, words, 2 * math.log2(p))


def _ok_topk(n: int, k: int, p: int) -> Volume:
    part = k * (p - 1) / p
    return Volume(2 * part, 6 * part, 2 * p + 2 * math.log2(p))


VOLUMES: Mapping[str, Callable[[int, int, int], Volume]] = {
    "dense": _dense,
    "topk_a": _gathered,
    "topk_dsa": _topk_dsa,
    "gtopk": _gtopk,
    "gaussian_k": _gathered,
    "ok_topk": _ok_topk,
}


def comm_volume(algorithm: str, n: int, k: int, processes: int) -> Volume:
    """Returns what each of P workers sends to sum gradients of n numbers.

    Args:
      algorithm: "dense" (2n (P-1)/P), "topk_a" and "gaussian_k" (2k (P-1)), "topk_dsa"
        (4k (P-1)/P to (2k + n)(P-1)/P), "gtopk" (4k log₂ P), "ok_topk" (2k (P-1)/P to
        6k (P-1)/P).
      n: numbers of a gradient.
      k: entries that a worker selects; dense sums take no notice of it.
      processes: P.

    Raises:
      ConfigError: an unknown algorithm; k not in 1 … n; a P that is none, or for gtopk
        no power of two.

    Examples:
      >>> comm_volume("ok_topk", 1000, 10, 4)[:2], comm_volume("topk_a", 1000, 10, 4)[0]
      ((15.0, 45.0), 60.0)
    """
    if algorithm not in VOLUMES:
        hint = nearest(algorithm, VOLUMES)
        raise ConfigError(f"no algorithm of that name: got {algorithm!r}{hint}")
    checks.require_count(1, n=n, k=k, processes=processes)
    checks.require(k <= n, "k must be at most n", k=k, n=n)
    if processes == 1:
        return Volume(0.0, 0.0, 0.0)
    return VOLUMES[algorithm](n, k, processes)
