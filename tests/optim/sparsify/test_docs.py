"""The examples of docs/sparsity.md run."""

import numpy as np

from tests import guides


def test_the_guide_runs():
    names = guides.run("sparsity.md")
    mask, weights = np.asarray(names["masks"]["w"]), np.asarray(names["params"]["w"])
    assert mask.sum() == 205  # a tenth of 2,048
    assert not weights[~mask].any()
    kept = np.repeat(np.asarray(names["kept"]), 8, axis=0)
    product = (weights.T * kept) @ np.ones((64, 16))
    np.testing.assert_allclose(names["y"], product, rtol=1e-4, atol=1e-5)
