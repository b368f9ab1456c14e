"""Ranks against a sort that knows nothing of them."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hpcjax import metrics, models

rank_of = jax.jit(metrics.rank_of)


@given(
    st.lists(st.integers(-2, 2), min_size=8, max_size=8),
    st.integers(0, 7),
    st.lists(st.integers(0, 8), min_size=5, max_size=5),
)
def test_a_rank_is_the_mean_one_among_what_counts(scores, answer, known):
    left = [n for n in range(8) if n == answer or n not in known]
    ranks = stats.rankdata([-scores[n] for n in left], method="average")
    found = rank_of(jnp.float32(scores), answer, jnp.array(known))
    assert float(found) == ranks[left.index(answer)]


def test_equal_scores_have_the_middle_rank_and_nan_has_none():
    assert float(rank_of(jnp.ones(9), 3, jnp.array([9]))) == 5
    for scores in ([1.0, np.nan, 2.0], [1.0, 2.0, np.nan], [-np.inf, 1.0, 2.0]):
        found = rank_of(jnp.float32(scores), 0 if scores[0] < 0 else 1, jnp.array([3]))
        assert np.isnan(found)


def test_an_answer_that_is_no_candidate_has_no_rank():
    for answer in (3, -1):
        assert np.isnan(rank_of(jnp.arange(3.0), answer, jnp.array([3])))


def test_sums_are_of_the_ranks_of_both_directions_by_weight():
    rng = np.random.default_rng(4)
    table = rng.integers(-2, 3, (30, 3)).astype("f4")  # many ties
    queries = rng.integers(-2, 3, (2, 2, 4, 3)).astype("f4")
    triples = rng.integers([30, 2, 30], size=(2, 4, 3)).astype("i4")
    known = rng.integers(0, 31, (2, 4, 2, 5)).astype("i4")
    scored, weight = np.float32([[1, 1, 1, 1], [1, 1, 1, 0]]), np.float32([0.5, 1])
    ends = np.stack([triples[..., 2], triples[..., 0]], 1)
    outputs = models.LinkScores(
        queries=queries,
        answers=table[ends],
        negatives=None,
        table=table,
        distance=False,
    )
    batch = {"x": {"triples": triples}, "scored": scored, "known": known}
    for each in (weight, np.float32([0, 1])):
        totals = metrics.link_totals(outputs, {**batch, "weight": each})
        mrr = hits = 0.0
        for row, side, edge in np.ndindex(2, 2, 4):
            answer, scores = ends[row, side, edge], table @ queries[row, side, edge]
            others = {*range(30)} - {*known[row, edge, side].tolist(), answer}
            left = [answer, *others]
            rank = stats.rankdata(-scores[left])[0]
            mrr += scored[row, edge] * each[row] / rank / 2
            hits += scored[row, edge] * each[row] * (rank <= 10) / 2
        count = (scored * each[:, None]).sum()
        assert 0 < hits < count == float(totals.count)
        np.testing.assert_allclose(totals.sums["mrr"], mrr, rtol=1e-5)
        np.testing.assert_allclose(totals.sums["hits10"], hits, rtol=1e-6)


def test_a_number_below_zero_leaves_nobody_out():
    assert float(rank_of(jnp.array([1.0, 2.0, 3.0]), 0, jnp.array([-1]))) == 3
