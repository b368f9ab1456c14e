"""The bootstrap interval of a median: its ends are known exactly."""

import math

import numpy as np
import pytest

from hpcjax.perf import intervals


def share_below(rank, count):
    """P(median of a resample ≤ the order statistic `rank`, from 1): a binomial."""
    draws, hit = range((count + 1) // 2, count + 1), rank / count
    return sum(math.comb(count, n) * hit**n * (1 - hit) ** (count - n) for n in draws)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("count", [41, 101])
def test_the_ends_are_the_binomials_quantiles(count, confidence):
    sample = np.random.default_rng(count).permutation(count) + 1.0
    low, high = intervals.bootstrap_median(sample, confidence=confidence)
    # 2,000 draws: three deviations of a share of them.
    for end, share in ((low, (1 - confidence) / 2), (high, (1 + confidence) / 2)):
        slack = 3 * math.sqrt(share * (1 - share) / intervals.DRAWS)
        assert share_below(end, count) >= share - slack
        assert share_below(end - 1, count) <= share + slack
    assert low == pytest.approx(count + 1 - high, abs=1)


def test_an_end_may_be_a_run_that_never_came_there():
    sample = np.array([1.0, 2.0, np.inf, np.inf, 3.0])
    low, high = intervals.bootstrap_median(sample)
    assert low in (1.0, 2.0)
    assert high == np.inf
