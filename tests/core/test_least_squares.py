"""Costs found again, and against a search of all directions."""

import numpy as np
import pytest

from hpcjax.core.least_squares import fit_costs

COUNTS = np.array([[1.0, 4.0, 0.0], [1.0, 4e6, 3.0], [6.0, 4096.0, 1.0], [2.0, 1, 9.0]])


def off(costs, measured):
    return np.sum((COUNTS @ costs / measured - 1) ** 2)


def test_costs_of_any_size_are_found_again():
    costs = np.array([3e-4, 2e-9, 0.1])
    np.testing.assert_allclose(fit_costs(COUNTS, COUNTS @ costs), costs, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_near_by_is_better(seed):
    draws = np.random.default_rng(seed)
    measured = draws.uniform(0.1, 10.0, 4)
    found = fit_costs(COUNTS, measured)
    assert (found >= 0).all()
    for step in draws.normal(size=(200, 3)) * [1e-2, 1e-9, 1e-3]:
        tried = np.maximum(found + step, 0)
        assert off(tried, measured) >= off(found, measured) - 1e-12


def test_what_was_never_paid_costs_nothing():
    counts = np.array([[1.0, 0.0], [2.0, 0.0]])
    found = fit_costs(counts, np.array([3.0, 6.0]))
    assert found.tolist() == pytest.approx([3.0, 0.0])
