"""What speculative decoding gains: tokens an iteration, seconds, the best lookahead.

References:
  Yan, Agarwal and Venkataraman, Decoding Speculative Decoding, NAACL 2025.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

_ONE = 1e-6


def tokens_per_iteration(rate: float, ahead: int) -> float:
    """Returns (1 − α^(γ+1)) / (1 − α), the tokens that an iteration emits.

    Of γ draft tokens each is accepted with probability α, whatever its place, and one
    token of the target's follows.

    Args:
      rate: α, in [0, 1].
      ahead: γ, at least 0.

    Raises:
      ConfigError: either is out of its range.

    Examples:
      >>> tokens_per_iteration(0.5, 2)
      1.75
    """
    if not 0 <= rate <= 1 or ahead < 0:
        raise ConfigError(
            f"rate must be in [0, 1], ahead >= 0: got rate={rate}, ahead={ahead}"
        )
    if 1 - rate < _ONE:
        return ahead + 1.0
    return (1 - rate ** (ahead + 1)) / (1 - rate)


def tokens_of_counts(counts: Sequence[int] | Shaped[np.ndarray, " places"]) -> float:
    """Returns the mean of tokens emitted, 1 + Σⱼ Πᵢ≤ⱼ aᵢ, from a histogram.

    aᵢ is the share accepted at place i of the iterations that came to it.

    Args:
      counts: `counts[k]` iterations accepted k tokens, k = 0 … γ.

    Raises:
      ConfigError: no iteration, or a negative count.

    Examples:
      >>> tokens_of_counts([1, 0, 1])
      2.0
    """
    found = np.asarray(counts, dtype=np.float64)
    if found.ndim != 1 or found.sum() <= 0 or (found < 0).any():
        raise ConfigError(f"counts must be of at least one iteration: got {counts}")
    came = found[::-1].cumsum()[::-1]
    return float(1 + (came[1:] / came[0]).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingTimes:
    """Seconds of the parts of an iteration.

    Attributes:
      draft: one step of the draft model.
      verify: one pass of the target over so many tokens, `{tokens: seconds}`; what
        lies between is interpolated. One token is plain decoding.
      other: accepting, sampling, bookkeeping.
    """

    draft: float
    verify: Mapping[int, float]
    other: float = 0.0

    def __post_init__(self) -> None:
        times = [self.draft, self.other, *self.verify.values()]
        good = all(0 <= t < np.inf for t in times) and min(self.verify, default=0) == 1
        if not good or min(self.verify.values()) == 0:
            raise ConfigError(
                "times must be finite and >= 0, verify's positive and of 1 token and "
                f"more: got draft={self.draft}, verify={dict(self.verify)}, "
                f"other={self.other}"
            )

    def iteration(self, ahead: int) -> float:
        """Returns γ draft + verify(γ + 1) + other; plain decoding for γ = 0.

        Raises:
          ConfigError: more tokens than were measured.
        """
        known = sorted(self.verify)
        if not 0 <= ahead < known[-1]:
            raise ConfigError(
                f"ahead must be in [0, {known[-1] - 1}], as verify is known up to "
                f"{known[-1]} tokens: got ahead={ahead}"
            )
        if ahead == 0:
            return self.verify[1]
        seconds = [self.verify[tokens] for tokens in known]
        verify = float(np.interp(ahead + 1, known, seconds))
        return ahead * self.draft + verify + self.other

    def speedup(self, tokens: float, ahead: int) -> float:
        """Returns plain decoding's seconds a token over speculative decoding's.

        Args:
          tokens: emitted in an iteration.
          ahead: γ.
        """
        return tokens * self.verify[1] / self.iteration(ahead)


class Lookahead(NamedTuple):
    """The best γ, 0 for plain decoding, and its speed-up."""

    ahead: int
    speedup: float


def best_lookahead(times: DecodingTimes, rate: float, most: int = 16) -> Lookahead:
    """Returns the γ of the largest speed-up, by trying all from 0 on.

    Args:
      times: of the parts.
      rate: α.
      most: largest γ that is tried; no more than `times` knows.

    Raises:
      ConfigError: most is negative.

    Examples:
      >>> verify = {1: 3.07, 2: 3.2, 17: 3.2}
      >>> times = DecodingTimes(draft=0.25, verify=verify, other=0.1)
      >>> best = best_lookahead(times, 0.7)
      >>> best.ahead, round(best.speedup, 2)
      (5, 1.98)
    """
    checks.require_count(0, most=most)
    tried = range(min(most, max(times.verify) - 1) + 1)
    gains = [times.speedup(tokens_per_iteration(rate, g), g) for g in tried]
    ahead = int(np.argmax(gains))
    return Lookahead(ahead, gains[ahead])


def tokens_to_match(
    times: DecodingTimes, ahead: int, other: DecodingTimes, other_ahead: int
) -> float:
    """Returns the ratio of tokens an iteration at which two drafts are equally fast.

    A draft with `times` pays over the other one from that many times its tokens on.
    """
    return times.iteration(ahead) / other.iteration(other_ahead)


class DraftLatency(NamedTuple):
    """Seconds of a draft step, depth · (layer + bytes of a layer · byte) + head.

    Attributes:
      layer: of a layer, whatever its width.
      byte: of a byte of weights and cache.
      head: of what there is once.
      r_squared: share of the measurements' variance that is told.
    """

    layer: float
    byte: float
    head: float
    r_squared: float

    def seconds(self, depth: int, layer_bytes: float, head_bytes: float) -> float:
        """Returns the time of a step."""
        return (
            self.layer * depth
            + self.byte * (depth * layer_bytes + head_bytes)
            + (self.head)
        )


def fit_draft_latency(
    depth: Shaped[np.ndarray, " runs"],
    layer_bytes: Shaped[np.ndarray, " runs"],
    head_bytes: Shaped[np.ndarray, " runs"],
    seconds: Float[np.ndarray, " runs"],
) -> DraftLatency:
    """Fits a draft's latency by least squares of relative errors, nothing negative.

    Depths and widths must both vary, more than once: along a line of equal parameters
    the time of a byte and that of the head cannot be told apart.

    Raises:
      ConfigError: fewer than four depths or three widths.
    """
    from scipy.optimize import nnls

    if len(np.unique(depth)) < 4 or len(np.unique(layer_bytes)) < 3:
        raise ConfigError(
            "a fit needs at least 4 depths and 3 widths: got "
            f"{len(np.unique(depth))} and {len(np.unique(layer_bytes))}"
        )
    moved = depth * layer_bytes + head_bytes
    columns = np.stack([depth, moved, np.ones(len(depth))], axis=1).astype(np.float64)
    # Bytes are many and seconds few: columns of size one.
    scale = columns.max(0)
    found, _ = nnls(columns / scale / seconds[:, None], np.ones(len(depth)))
    left = np.sum((columns / scale @ found - seconds) ** 2)
    spread = np.sum((seconds - seconds.mean()) ** 2)
    layer, byte, head = (found / scale).tolist()
    return DraftLatency(layer, byte, head, float(1 - left / spread))
