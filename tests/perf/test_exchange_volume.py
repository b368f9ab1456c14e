"""Words of sparse all-reduces."""

import math

import pytest

from hpcjax import perf
from hpcjax.core import ConfigError

N, K = 1_000_000, 10_000


@pytest.mark.parametrize("p", [2, 4, 8, 16, 32, 64])
def test_the_table(p):
    share, log = (p - 1) / p, math.log2(p)
    table = {
        "dense": (2 * N * share, 2 * N * share, 2 * log),
        "topk_a": (2 * K * (p - 1), 2 * K * (p - 1), log),
        "topk_dsa": (4 * K * share, (2 * K + N) * share, p + 2 * log),
        "gtopk": (4 * K * log, 4 * K * log, 2 * log),
        "gaussian_k": (2 * K * (p - 1), 2 * K * (p - 1), log),
        "ok_topk": (2 * K * share, 6 * K * share, 2 * p + 2 * log),
    }
    for algorithm, row in table.items():
        assert perf.comm_volume(algorithm, N, K, p) == pytest.approx(row)


def test_gathering_grows_with_p_and_ok_topk_does_not():
    def ratio(p):
        return (
            perf.comm_volume("topk_a", N, K, p).most
            / perf.comm_volume("ok_topk", N, K, p).most
        )

    assert [ratio(p) for p in (3, 6, 12)] == pytest.approx([1.0, 2.0, 4.0])


def test_alone_nothing_is_sent():
    for algorithm in ("dense", "topk_a", "topk_dsa", "gtopk", "ok_topk"):
        assert perf.comm_volume(algorithm, N, K, 1) == (0, 0, 0)


def test_places_between():
    volume = perf.comm_volume("ok_topk", N, K, 4)
    assert volume.between(0.5) == pytest.approx(4 * K * 3 / 4)
    # Where most entries are sent, adding them up is what costs more.
    full = perf.comm_volume("topk_dsa", N, N, 4)
    assert (full.least, full.most) == pytest.approx((3 * N * 3 / 4, 4 * N * 3 / 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("ok_topq", N, K, 4), "did you mean 'ok_topk'"),
        (("ok_topk", N, 0, 4), "k must be"),
        (("ok_topk", N, N + 1, 4), "k must be at most n"),
        (("ok_topk", N, K, 0), "processes must be"),
        (("gtopk", N, K, 6), "power of two"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        perf.comm_volume(*wrong)
