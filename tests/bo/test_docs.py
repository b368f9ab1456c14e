"""The guide's code."""

from tests import guides


def test_the_guide_runs():
    (block,) = guides.blocks("search.md", "In your own code")
    names: dict = {}
    guides.run_block(block, "search.md", names)
    best = names["search"].best_feasible()
    assert best["batch"] / best["clock"] + 0.01 <= 0.09
    assert len(names["search"].points) <= 15
