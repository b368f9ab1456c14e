"""The examples of docs/exchanges.md run."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "exchanges.md"


def test_the_guide_runs():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S):
        exec(block, names)
    assert 0 < names["link"].metrics["sent_words"] < 6 * 50 * 1.34
    entries = {kept for kept, _ in names["kept"]}
    assert entries == {50}  # the first step is exact
    assert all(words < 6 * 50 for _, words in names["kept"])
