"""The examples of docs/exchanges.md run."""

import pytest

from tests import guides


@pytest.mark.slow
def test_the_guide_runs():
    names = guides.run("exchanges.md")
    assert 0 < names["link"].metrics["sent_words"] < 6 * 50 * 1.34
    entries = {kept for kept, _ in names["kept"]}
    assert entries == {50}  # the first step is exact
    assert all(words < 6 * 50 for _, words in names["kept"])
