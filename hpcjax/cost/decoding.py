"""Model of speculative decoding: tokens per iteration, time, and the best lookahead.

In one iteration the draft model proposes γ tokens (the lookahead, `ahead` here), and
the target model verifies them in one pass. It emits the accepted ones and one token of
its own.

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
from hpcjax.core.least_squares import fit_costs

# Acceptance rates closer than this to 1 are taken for 1.
_NEAR_ONE = 1e-6


def tokens_per_iteration(rate: float, ahead: int) -> float:
    """Returns (1 − α^(γ+1)) / (1 − α), the expected tokens that an iteration emits.

    Each of γ draft tokens is taken to be accepted with the same probability α; those
    behind the first rejection are lost. One token of the target follows.

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
    # The j-th draft token is emitted if all up to it are accepted, with probability
    # α^j: 1 + Σ_{j=1..γ} α^j, a geometric sum, which is 0 / 0 at α = 1.
    if 1 - rate < _NEAR_ONE:
        return ahead + 1.0
    return (1 - rate ** (ahead + 1)) / (1 - rate)


def tokens_of_counts(
    counts: Sequence[int] | Shaped[np.ndarray, " places"], ahead: int | None = None
) -> float:
    """Returns the mean number of emitted tokens, 1 + Σⱼ Πᵢ≤ⱼ aᵢ, from a histogram.

    aᵢ is the share of the iterations that reached position i and accepted the token
    there, i = 1 … γ.

    Args:
      counts: `counts[k]` iterations accepted k draft tokens, k = 0 … γ.
      ahead: j up to this, as if only so many had been drafted; None for γ.

    Raises:
      ConfigError: no iteration, or a negative count.

    Examples:
      >>> tokens_of_counts([1, 0, 1]), tokens_of_counts([1, 0, 1], ahead=1)
      (2.0, 1.5)
    """
    histogram = np.asarray(counts, dtype=np.float64)
    if histogram.ndim != 1 or histogram.sum() <= 0 or (histogram < 0).any():
        raise ConfigError(f"counts must be of at least one iteration: got {counts}")
    # reached[j] iterations accepted at least j tokens. As aᵢ = reached[i] /
    # reached[i - 1], the product over i ≤ j telescopes to reached[j] / reached[0].
    reached = histogram[::-1].cumsum()[::-1]
    last = None if ahead is None else ahead + 1
    return float(1 + (reached[1:last] / reached[0]).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingTimes:
    """Seconds of the parts of an iteration.

    Attributes:
      draft: one step of the draft model.
      verify: one pass of the target model by its number of tokens,
        `{tokens: seconds}`; times in between are interpolated. The pass over one token
        is a step of plain decoding.
      other: acceptance, sampling and bookkeeping.
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
        """Returns γ · draft + verify(γ + 1) + other; for γ = 0, plain decoding.

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
        """Returns seconds per token of plain decoding over those with a draft.

        Args:
          tokens: mean number emitted in an iteration.
          ahead: γ.
        """
        return tokens * self.verify[1] / self.iteration(ahead)


class Lookahead(NamedTuple):
    """The best γ and its speed-up.

    Attributes:
      ahead: γ; 0 if plain decoding is fastest.
      speedup: over plain decoding.
    """

    ahead: int
    speedup: float


def best_lookahead(times: DecodingTimes, rate: float, most: int = 16) -> Lookahead:
    """Returns the γ with the largest speed-up, by enumeration from 0.

    Args:
      times: of the parts of an iteration.
      rate: α, the acceptance rate.
      most: largest γ to try; limited further by the tokens of `times.verify`.

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
    """Returns the ratio of tokens per iteration at which two drafts are equally fast.

    The draft with `times` is the faster one if it emits more than this many times the
    tokens of the draft with times `other`. Tokens per second are tokens per iteration
    over seconds per iteration; so this is the ratio of the latter.

    Args:
      times: of the first draft.
      ahead: its γ.
      other: times of the second draft.
      other_ahead: the second draft's γ.
    """
    return times.iteration(ahead) / other.iteration(other_ahead)


class DraftLatency(NamedTuple):
    """Linear model of a draft step's seconds.

    seconds = layer · depth + byte · (depth · layer_bytes + head_bytes) + head

    Attributes:
      layer: overhead of a layer, independent of its width.
      byte: time to read one byte of weights or cache.
      head: overhead that does not depend on the depth.
      r_squared: share of the variance of the measurements that the model explains.
    """

    layer: float
    byte: float
    head: float
    r_squared: float

    def seconds(self, depth: int, layer_bytes: float, head_bytes: float) -> float:
        """Returns the seconds of a step.

        Args:
          depth: number of layers.
          layer_bytes: weights and cache of one layer.
          head_bytes: weights outside the layers.
        """
        read_bytes = depth * layer_bytes + head_bytes
        return self.layer * depth + self.byte * read_bytes + self.head


def fit_draft_latency(
    depth: Shaped[np.ndarray, " runs"],
    layer_bytes: Shaped[np.ndarray, " runs"],
    head_bytes: Shaped[np.ndarray, " runs"],
    seconds: Float[np.ndarray, " runs"],
) -> DraftLatency:
    """Fits a draft's latency by non-negative least squares of the relative errors.

    Depths and widths must vary independently. Among drafts with equally many
    parameters, the bytes are the same for all, and their time cannot be told from the
    constant `head`.

    Args:
      depth: layers of each measured draft.
      layer_bytes: weights and cache of one of its layers.
      head_bytes: weights outside its layers.
      seconds: of one step.

    Raises:
      ConfigError: fewer than four depths or three widths.
    """
    if len(np.unique(depth)) < 4 or len(np.unique(layer_bytes)) < 3:
        raise ConfigError(
            "a fit needs at least 4 depths and 3 widths: got "
            f"{len(np.unique(depth))} and {len(np.unique(layer_bytes))}"
        )
    read_bytes = depth * layer_bytes + head_bytes
    columns = np.stack([depth, read_bytes, np.ones(len(depth))], axis=1)
    columns = columns.astype(np.float64)
    coefficients = fit_costs(columns, seconds)
    residual = np.sum((columns @ coefficients - seconds) ** 2)
    variance = np.sum((seconds - seconds.mean()) ** 2)
    layer, byte, head = coefficients.tolist()
    return DraftLatency(layer, byte, head, float(1 - residual / variance))
