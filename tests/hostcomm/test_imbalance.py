"""Tables of delays: who is late, how often, and the same for everybody."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import initiators, inject_delays


@pytest.mark.parametrize(
    ("pattern", "counts"), [("random_one", {1}), ("random_two", {1, 2})]
)
def test_so_many_are_late_in_each_step(pattern, counts):
    table = inject_delays(pattern, 4000, 8, delay=0.2, seed=1)
    late = table == 0.2
    assert set(late.sum(1)) == counts
    assert set(np.unique(table)) == {0.0, 0.2}
    share = late.mean(0) / late.mean()
    assert abs(share - 1).max() < 0.15  # everybody is late as often
    np.testing.assert_array_equal(
        inject_delays(pattern, 100, 8, delay=0.2, seed=1), table[:100]
    )
    assert (inject_delays(pattern, 4000, 8, delay=0.2, seed=2) != table).any()


def test_who_is_late_is_not_who_starts_the_round():
    """Of one seed: drawn alike, a majority would wait for the late one every time."""
    late = inject_delays("random_one", 4000, 8, delay=1.0, seed=5).argmax(1)
    assert abs(np.mean(late == initiators(5, 8, 4000)) - 1 / 8) < 0.02


def test_the_skew_goes_around():
    table = inject_delays("linear_skew", 9, 8, delay=0.05)
    for row in table:
        np.testing.assert_allclose(np.sort(row), 0.05 * np.arange(1, 9))
    np.testing.assert_array_equal(table[1], np.roll(table[0], -1))
    np.testing.assert_array_equal(table[8], table[0])


def test_a_recorded_table_begins_again():
    recorded = np.arange(6.0).reshape(3, 2)
    table = inject_delays("trace", 5, 2, recorded=recorded)
    np.testing.assert_array_equal(table, recorded[[0, 1, 2, 0, 1]])
    assert not inject_delays("none", 3, 2, delay=1.0).any()


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"recorded must be \[any, 2\]"):
        inject_delays("trace", 5, 2, recorded=np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"recorded must be \[any, 2\]"):
        inject_delays("trace", 5, 2)
    with pytest.raises((ConfigError, TypeCheckError), match="'random_on'"):
        inject_delays("random_on", 5, 2)
    with pytest.raises(ConfigError, match="delay must be"):
        inject_delays("random_one", 5, 2, delay=-1.0)
