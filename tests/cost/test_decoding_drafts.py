"""Ranked drafts against every pair of draft and lookahead, tried in numpy."""

import numpy as np
import pytest

from hpcjax import cost
from hpcjax.core import ConfigError
from hpcjax.cost import DraftCandidate

VERIFY = {1: 3.0, 4: 3.3, 9: 5.0}


def drawn(seed):
    """Candidates of both kinds: with a rate and with counted iterations."""
    rng = np.random.default_rng(seed)
    found = {}
    for number in range(5):
        acceptance = rng.uniform(0.2, 0.95)
        if number % 2:
            acceptance = rng.integers(1, 50, rng.integers(2, 8))
        found[f"draft {number}"] = DraftCandidate(
            step=rng.uniform(0.05, 2.0), acceptance=acceptance, other=0.1
        )
    return found


def by_force(candidates, batch, most):
    """(tokens a second, name, lookahead) of everything that can be tried."""
    tried = [(batch / VERIFY[1], "plain decoding", 0)]
    for name, one in candidates.items():
        for ahead in range(1, min(most, 8) + 1):
            if np.ndim(one.acceptance) == 0:
                # Accept or refuse one token after the other: all 2^γ courses.
                rate, tokens = one.acceptance, 0.0
                for course in np.ndindex(*[2] * ahead):
                    likely = np.prod([rate if hit else 1 - rate for hit in course])
                    tokens += likely * (1 + np.cumprod(course).sum())
            elif ahead < len(one.acceptance):
                accepted = np.repeat(np.arange(len(one.acceptance)), one.acceptance)
                tokens = np.mean(1 + np.minimum(accepted, ahead))
            else:
                continue
            passes = np.interp(ahead + 1, list(VERIFY), list(VERIFY.values()))
            seconds = ahead * one.step + passes + one.other
            tried.append((batch * tokens / seconds, name, ahead))
    return tried


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("batch", "most"), [(1, 16), (4, 3)])
def test_the_ranking_is_that_of_trying_everything(seed, batch, most):
    candidates = drawn(seed)
    rows = cost.choose_draft(candidates, VERIFY, batch=batch, most=most)
    tried = sorted(by_force(candidates, batch, most), reverse=True)
    names = list(dict.fromkeys(name for _, name, _ in tried))
    assert [row.name for row in rows] == names
    for row in rows:
        best = next(each for each in tried if each[1] == row.name)
        assert row.ahead == best[2]
        assert row.throughput == pytest.approx(best[0])
        assert row.speedup == pytest.approx(best[0] * VERIFY[1] / batch)
        assert row.throughput == pytest.approx(batch * row.tokens / row.seconds)


def test_the_higher_acceptance_is_not_the_faster_draft():
    """As the paper found: the deeper draft is accepted more often, and slower."""
    shallow = DraftCandidate(step=0.2, acceptance=0.6)
    deep = DraftCandidate(step=1.2, acceptance=0.75)
    rows = cost.choose_draft({"deep": deep, "shallow": shallow}, VERIFY)
    assert [row.name for row in rows] == ["shallow", "deep", "plain decoding"]
    first, second, plain = rows
    drafting = 100 * first.ahead * 0.2 / first.seconds
    assert first.reason.startswith("fastest: emits ")
    assert f"{drafting:.0f}% of which are for drafting" in first.reason
    needed = cost.tokens_to_match(
        cost.DecodingTimes(draft=1.2, verify=VERIFY),
        second.ahead,
        cost.DecodingTimes(draft=0.2, verify=VERIFY),
        first.ahead,
    )
    assert f"slower than shallow: would have to emit {needed * first.tokens:.2f} " in (
        second.reason
    )
    assert plain.reason == "one token in each pass"


def test_no_draft_may_be_the_best():
    slow = DraftCandidate(step=9.0, acceptance=0.9)
    plain, row = cost.choose_draft({"slow": slow}, VERIFY)
    assert (plain.name, plain.ahead, plain.speedup) == ("plain decoding", 0, 1.0)
    assert plain.reason == "no candidate is faster"
    assert row.reason.startswith("slower than plain decoding: would have to emit")


def one(name="a", step=1.0, acceptance=0.5):
    return {"candidates": {name: DraftCandidate(step=step, acceptance=acceptance)}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"candidates": {}}, "there must be a candidate"),
        (one(name="plain decoding"), "no candidate is"),
        (one(acceptance=1.5), "rate=1.5"),
        (one(acceptance=[3]), "a: verify"),
        (one(step=-1.0), "draft=-1.0"),
        ({"verify": {1: 1.0}}, "a: verify must be of 2 tokens"),
        ({"verify": {2: 1.0}}, "of 1 token"),
        ({"batch": 0}, "batch"),
        ({"most": 0}, "most"),
    ],
)
def test_what_cannot_be_ranked_is_refused(change, words):
    given = one() | {"verify": VERIFY} | change
    with pytest.raises(ConfigError, match=words):
        cost.choose_draft(**given)
