"""A name that is misspelled in a table of one's own is told, with the nearest."""

import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.runs import build, cli
from tests.runs import roots

DECLARED = """
Config.figures = {"answer": "step: of all"}
Config.labels = lambda self: {"step": self.steps}
"""
TYPOS = {
    "t.answer": ("t.anwser", "claim 'enough' of mine/holds: there is no 'anwser'"),
    '{"answer": "the': ('{"anwser": "the', "mine/holds has no column 'anwser'"),
    "isel(seed=0)": ("isel(seed=0).anwser", "mine/holds, reduced: there is no"),
}


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("right", TYPOS)
def test_a_misspelled_name_is_told(tmp_path, right, says):
    """Before the first run, if the experiment says what a run holds; else after it."""
    root = roots.make_running(tmp_path)
    wrong, told = TYPOS[right]
    tables = root / "experiments/mine/tables.py"
    tables.write_text(tables.read_text().replace(right, wrong))
    if says:
        path = root / "experiments/mine/experiment.py"
        path.write_text(path.read_text() + DECLARED)
    with pytest.raises(ConfigError) as error:
        build.build_table("mine/holds", root=root, tier="cpu", progress=False)
    assert str(error.value).startswith(told)
    assert str(error.value).endswith("did you mean 'answer'?")
    assert (root / "runs").exists() == (not says)


@pytest.mark.parametrize("says", [True, False])
def test_a_run_tells_what_its_figures_mean(tmp_path, capsys, says):
    root = roots.make_running(tmp_path)
    path = root / "experiments/mine/experiment.py"
    path.write_text(path.read_text() + DECLARED * says)
    assert cli.main(["run", "mine/first", "--root", str(root)]) == 0
    assert ("of all" in capsys.readouterr().out) == says
