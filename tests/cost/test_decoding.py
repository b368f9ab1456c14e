"""The model of speculative decoding: its published figures, its fit, its refusals."""

import numpy as np
import pytest

from hpcjax import cost
from hpcjax.core import ConfigError


def times(**changes):
    verify = {tokens: 3.07 if tokens == 1 else 3.2 for tokens in range(1, 18)}
    return cost.DecodingTimes(
        **{"draft": 0.25, "verify": verify, "other": 0.1} | changes
    )


@pytest.mark.parametrize(
    ("rate", "ahead", "speedup"),
    [(0.6, (3, 4), 1.65), (0.7, (4, 5), 1.98), (0.8, (6, 7), 2.53)],
)
def test_the_worked_example(rate, ahead, speedup):
    best = cost.best_lookahead(times(), rate)
    assert best.ahead in ahead
    assert round(best.speedup, 2) == speedup


def test_a_slow_draft_does_not_pay():
    assert cost.best_lookahead(times(draft=9.0), 0.9) == (0, 1.0)


def test_tokens_at_the_ends():
    assert cost.tokens_per_iteration(1.0, 5) == 6
    assert cost.tokens_per_iteration(1 - 1e-9, 5) == 6
    assert cost.tokens_per_iteration(0.0, 5) == 1
    assert cost.tokens_per_iteration(0.7, 4) == pytest.approx(2.7731, abs=5e-5)


def test_the_ratio_at_which_drafts_are_equal():
    fast, slow = times(), times(draft=0.5)
    needed = cost.tokens_to_match(slow, 4, fast, 4)
    assert needed == pytest.approx((2 + 3.3) / (1 + 3.3))
    assert slow.speedup(2.0 * needed, 4) == pytest.approx(fast.speedup(2.0, 4))


def test_a_latency_is_found_again():
    depth, width = np.meshgrid([2, 4, 8, 16, 24], [512, 1024, 2048])
    depth, width = depth.ravel(), width.ravel().astype(float)
    layer, head = 24 * width**2, 1e5 * width
    made = 2e-5 * depth + 3e-13 * (depth * layer + head) + 1e-4
    found = cost.fit_draft_latency(depth, layer, head, made)
    np.testing.assert_allclose(found[:3], (2e-5, 3e-13, 1e-4), rtol=1e-6)
    assert found.r_squared == pytest.approx(1)
    assert found.seconds(
        int(depth[7]), float(layer[7]), float(head[7])
    ) == pytest.approx(made[7])
    # The largest model's run, ten times the median, is 20 % off: the others are not.
    off = made * np.where(made == made.max(), 1.2, 1.0)
    found = cost.fit_draft_latency(depth, layer, head, off)
    told = [
        found.seconds(int(d), float(w), float(h))
        for d, w, h in zip(depth, layer, head, strict=True)
    ]
    assert np.median(np.abs(told / made - 1)) < 0.02
    assert 0.9 < found.r_squared < 1
    with pytest.raises(ConfigError, match="5 and 1"):
        cost.fit_draft_latency(depth[:5], layer[:5], head[:5], made[:5])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cost.tokens_per_iteration(1.1, 2),
        lambda: cost.tokens_of_counts([0, 0]),
        lambda: cost.tokens_of_counts([1, -1]),
        lambda: times(verify={2: 1.0}),
        lambda: times(verify={1: 1.0, 0: 1.0}),
        lambda: times(verify={1: 0.0, 2: 0.0}),
        lambda: cost.best_lookahead(times(), 0.7, most=-1),
        lambda: times(draft=float("nan")),
        lambda: times().iteration(17),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
