"""The guide of quantum transport runs."""

import numpy as np

from tests import guides


def test_the_guides_code_runs():
    names = guides.run("quantum-transport.md")
    assert names["result"].imbalance() < 1e-8
    # Of the current's derivative, a difference.
    up, down = names["left"](0.1 + 1e-4), names["left"](0.1 - 1e-4)
    assert names["conductance"] > 0.1
    np.testing.assert_allclose((up - down) / 2e-4, names["conductance"], rtol=1e-6)
    assert names["through"].shape == (1, 110)
    assert np.isfinite(names["sigma"]).all()
