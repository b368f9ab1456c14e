"""Which draft model to decode with: candidates ranked by predicted throughput.

References:
  Yan, Agarwal and Venkataraman, Decoding Speculative Decoding, NAACL 2025: a draft with
  fewer layers and a lower acceptance may be the faster one.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.cost.decoding import (
    DecodingTimes,
    tokens_of_counts,
    tokens_per_iteration,
)

# Name of the row without a draft.
PLAIN = "plain decoding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCandidate:
    """What was measured of a draft model.

    Attributes:
      step: seconds of one step of the draft, for the whole batch.
      acceptance: the rate α at which a drafted token is accepted, in [0, 1]; or how
        many iterations accepted 0, 1, … γ tokens, such as `Speculated.counts`, which
        supposes nothing about how acceptance depends on the place.
      other: seconds of an iteration for acceptance, sampling and bookkeeping.
    """

    step: float
    acceptance: float | Sequence[int] | Int[np.ndarray, " ahead_and_1"]
    other: float = 0.0

    def tokens(self, ahead: int) -> float:
        """Returns the mean number of tokens that an iteration emits."""
        if isinstance(self.acceptance, float | int):
            return tokens_per_iteration(self.acceptance, ahead)
        return tokens_of_counts(self.acceptance, ahead)

    @property
    def longest(self) -> int:
        """The largest γ of which the acceptance says anything."""
        if isinstance(self.acceptance, float | int):
            return sys.maxsize
        return len(self.acceptance) - 1


class RankedDraft(NamedTuple):
    """A row of `choose_draft`.

    Attributes:
      name: of the candidate; `PLAIN` for no draft.
      ahead: the lookahead γ with which it is fastest; 0 for no draft.
      tokens: mean number that an iteration emits for each sequence.
      seconds: of an iteration.
      throughput: tokens a second, of all sequences together.
      speedup: over plain decoding.
      reason: for its place, in words.
    """

    name: str
    ahead: int
    tokens: float
    seconds: float
    throughput: float
    speedup: float
    reason: str


def choose_draft(
    candidates: Mapping[str, DraftCandidate],
    verify: Mapping[int, float],
    *,
    batch: int = 1,
    most: int = 16,
) -> tuple[RankedDraft, ...]:
    """Ranks draft models, and decoding without one, by predicted throughput.

    An iteration with lookahead γ takes γ · step + verify(γ + 1) + other seconds and
    emits `tokens(γ)` tokens for each sequence. Every candidate is taken with the γ in
    1 … `most` that gives it the largest throughput, batch · tokens / seconds.

    Args:
      candidates: by name.
      verify: seconds of one pass of the target model over the batch by its number of
        tokens a sequence, `{tokens: seconds}`, from 1 on; see `DecodingTimes`.
      batch: sequences that are decoded together, with which all times were measured.
      most: largest γ; limited further by `verify` and by counted acceptances.

    Returns:
      Rows, the fastest first; equal ones in the order of `candidates`, and behind plain
      decoding, which needs no second model.

    Raises:
      ConfigError: no candidates, one with a name that is taken, times that are not
        finite, an acceptance that is none, `verify` without more than 1 token, batch or
        `most` below 1.

    Examples:
      >>> small = DraftCandidate(step=0.2, acceptance=0.6)
      >>> large = DraftCandidate(step=2.5, acceptance=0.8)
      >>> rows = choose_draft({"small": small, "large": large}, {1: 3.0, 9: 3.2})
      >>> [(row.name, row.ahead, round(row.speedup, 2)) for row in rows]
      [('small', 3, 1.78), ('plain decoding', 0, 1.0), ('large', 1, 0.98)]
      >>> rows[2].reason
      'slower than plain decoding: would have to emit 1.84 tokens in 5.53 s, emits 1.80'
    """
    checks.require_count(1, batch=batch, most=most)
    checks.require(bool(candidates), "there must be a candidate", candidates=candidates)
    checks.require(PLAIN not in candidates, f"no candidate is {PLAIN!r}", name=PLAIN)
    times = DecodingTimes(draft=0.0, verify=verify)
    plain = _row(PLAIN, 0, 1.0, times, batch)
    rows = [plain]
    for name, candidate in candidates.items():
        times = DecodingTimes(
            draft=candidate.step, verify=verify, other=candidate.other
        )
        last = min(most, max(verify) - 1, candidate.longest)
        if last < 1:
            raise ConfigError(
                f"{name}: verify must be of 2 tokens and more, and the acceptance of "
                f"at least one: got verify={dict(verify)}, "
                f"acceptance={candidate.acceptance}"
            )
        tried = [
            _row(name, ahead, candidate.tokens(ahead), times, batch)
            for ahead in range(1, last + 1)
        ]
        rows.append(max(tried, key=lambda row: row.throughput))
    ranked = sorted(rows, key=lambda row: -row.throughput)
    return tuple(
        row._replace(reason=_explain(row, ranked[0], plain, candidates))
        for row in ranked
    )


def _row(
    name: str, ahead: int, tokens: float, times: DecodingTimes, batch: int
) -> RankedDraft:
    """Returns a row without its reason."""
    seconds = times.iteration(ahead)
    return RankedDraft(
        name=name,
        ahead=ahead,
        tokens=tokens,
        seconds=seconds,
        throughput=batch * tokens / seconds,
        speedup=times.speedup(tokens, ahead),
        reason="",
    )


def _explain(
    row: RankedDraft,
    first: RankedDraft,
    plain: RankedDraft,
    candidates: Mapping[str, DraftCandidate],
) -> str:
    """Returns why a row has its place."""
    if row is plain:
        return "no candidate is faster" if row is first else "one token in each pass"
    if row is first:
        drafting = row.ahead * candidates[row.name].step / row.seconds
        return (
            f"fastest: emits {row.tokens:.2f} tokens in {row.seconds:.3g} s, "
            f"{drafting:.0%} of which are for drafting"
        )
    # The nearer rival is the more telling one.
    rival = plain if row.speedup <= 1 else first
    needed = rival.tokens * row.seconds / rival.seconds
    return (
        f"slower than {rival.name}: would have to emit {needed:.2f} tokens in "
        f"{row.seconds:.3g} s, emits {row.tokens:.2f}"
    )
