"""The guide of graphs runs."""

from typing import Any

import jax
import numpy as np

from tests import guides


def test_the_guides_code_runs():
    rng = np.random.default_rng(0)
    block, sampled, kept, linked, of_database = guides.blocks("docs/graphs.md")
    given = {
        "senders": rng.integers(0, 34, 80),
        "receivers": rng.integers(0, 34, 80),
        "x": rng.normal(size=(34, 5)).astype(np.float32),
        "w": rng.normal(size=(5, 8)).astype(np.float32),
        "b": np.zeros(8, np.float32),
        "params": {
            "kernel": rng.normal(size=(8, 2, 3)).astype(np.float32),
            "receiver": np.ones((2, 3), np.float32),
            "sender": np.ones((2, 3), np.float32),
            "bias": np.zeros(3, np.float32),
        },
        "key": jax.random.key(0),
        "weights": np.ones((), np.float32),
    }
    guides.run_block(block, "docs/graphs.md", given)
    assert given["attended"].shape == (34, 3)
    assert given["received"].shape == (34, 8)
    guides.run_block(sampled, "docs/graphs.md", given)
    np.testing.assert_array_equal(given["blocks"].vertices[-2:], [3, 5])
    guides.run_block(kept, "docs/graphs.md", given)
    store = given["store"]
    assert given["version"] == store.version == 1
    degrees = [store.snapshot(n).degrees(np.arange(34)) for n in (0, 1)]
    assert degrees[0].sum() == degrees[1].sum()
    guides.run_block(linked, "docs/graphs.md", given)
    assert given["counts"].sum() == 2 * len(given["edges"])
    names: dict[str, Any] = {}
    guides.run_block(of_database, "docs/graphs.md", names)
    assert names["encoded"].names[0] == "label:Country"
    assert len(names["encoded"].unseen) == 0
