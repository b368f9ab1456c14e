"""Ranks against a sort that knows nothing of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hpcjax import metrics

rank_of = jax.jit(metrics.rank_of)


@pytest.mark.acceptance("gnn-models", 3)
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


def test_a_number_below_zero_leaves_nobody_out():
    assert float(rank_of(jnp.array([1.0, 2.0, 3.0]), 0, jnp.array([-1]))) == 3
