"""The examples of docs/language-models.md run."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "language-models.md"


def test_the_guide_runs_from_top_to_bottom():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["made"].tokens.shape == (2, 8)
    assert names["told"].counts.sum() == names["told"].iterations.sum()
    assert names["losses"].shape == (16, 31)
    assert names["result"].generated.lengths.tolist() == [8, 8]
