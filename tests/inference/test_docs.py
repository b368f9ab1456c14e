"""The examples of docs/language-models.md run."""

import pytest

from tests import guides


@pytest.mark.slow
def test_the_guide_runs_from_top_to_bottom():
    names = guides.run("language-models.md")
    assert names["made"].tokens.shape == (2, 8)
    assert names["told"].counts.sum() == names["told"].iterations.sum()
    assert names["losses"].shape == (16, 31)
    assert names["result"].generated.lengths.tolist() == [8, 8]
