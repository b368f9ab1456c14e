"""The examples of docs/kfac.md run and train."""

import pathlib
import re

import jax
import numpy as np

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "kfac.md"


def test_the_examples_of_the_documentation_run():
    first, second = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, str(DOCS), "exec"), names)
    assert float(names["value"]) < 1.0
    exec(compile(second, str(DOCS), "exec"), names)
    state = names["opt_state"][1]
    assert state.count == 5
    assert len(state.decompositions.value["made"]) == 8
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(names["params"]))
