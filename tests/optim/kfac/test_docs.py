"""The example of docs/kfac.md runs and trains."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "kfac.md"


def test_the_example_of_the_documentation_runs():
    first, *_ = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, str(DOCS), "exec"), names)
    assert float(names["value"]) < 1.0
