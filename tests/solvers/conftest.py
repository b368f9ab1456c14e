"""Solvers count in float64, which the suite has only here."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _double():
    with jax.enable_x64(True):
        yield
