"""The guide of quantum transport runs."""

import numpy as np

from tests import guides


def test_the_guides_code_runs():
    names = guides.run("quantum-transport.md")
    assert names["result"].imbalance() < 1e-8
    assert names["conductance"] > 0
    assert names["through"].shape == (1, 110)
    assert np.isfinite(names["sigma"]).all()
