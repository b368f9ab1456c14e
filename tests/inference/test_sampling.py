"""Samplers against sorted lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjax import inference
from hpcjax.core import ConfigError
from hpcjax.inference import Sampler


def by_hand(logits, temperature, top_k, top_p):
    """One row, token by token from the most likely one on."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[: top_k or len(order)]
    whole, left, seen = sum(weights[i] for i in kept), [], 0.0
    for i in kept:
        if seen >= top_p:
            break
        left.append(i)
        seen += weights[i] / whole
    made = np.zeros(len(logits))
    made[left] = weights[left] / weights[left].sum()
    return made


@pytest.mark.slow
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([None, 1, 3, 20]),
    top_p=st.sampled_from([0.05, 0.37, 0.83, 1.0]),
)
def test_probabilities_are_those_of_a_sorted_list(logits, temperature, top_k, top_p):
    row = np.array(logits, np.float32)
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p)
    found = inference.probabilities(jnp.asarray(row), sampler)
    expected = by_hand(row.astype(float), temperature, top_k, top_p)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_tokens_are_drawn_from_what_is_left():
    logits = jnp.zeros((1000, 5)).at[:, 3].set(1.0)
    sampler = Sampler(top_k=2)
    drawn = inference.next_token(logits, sampler, jax.random.key(0))
    assert set(drawn.tolist()) == {0, 3}
    greedy = inference.next_token(logits, Sampler(temperature=0.0), jax.random.key(0))
    assert set(greedy.tolist()) == {3}
    with pytest.raises(ConfigError, match="draws nothing"):
        inference.probabilities(logits, Sampler(temperature=0.0))


def test_a_small_temperature_takes_the_most_likely():
    logits = jnp.array([3.0, 50.0, 49.9, -7.0])
    for temperature in (1e-3, 1e-10, 1e-37):
        sampler = Sampler(temperature=temperature)
        found = jax.jit(lambda x, own=sampler: inference.probabilities(x, own))(logits)
        assert found.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": 1e-39}, {"temperature": float("nan")},
     {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}],
)  # fmt: skip
def test_impossible_samplers_are_refused(wrong):
    with pytest.raises(ConfigError):
        Sampler(**wrong)
