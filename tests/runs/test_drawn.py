"""A name that is misspelled in a table of one's own is told, with the nearest."""

import pytest
from rich.console import Console

from hpcjax import runs
from hpcjax.core.errors import ConfigError
from hpcjax.runs import build, cli, render
from tests.runs import roots

OUTLINE = """
def outline(cfg):
    return runs.outline({"answer": "step"}, step=cfg.steps)
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
        path.write_text(path.read_text() + OUTLINE)
    with pytest.raises(ConfigError) as error:
        build.build_table("mine/holds", root=root, tier="cpu", progress=False)
    assert str(error.value).startswith(told)
    assert str(error.value).endswith("did you mean 'answer'?")
    assert (root / "runs").exists() == (not says)


def test_what_a_run_returns_stands_where_its_figures_say_nothing(capsys):
    console = Console(width=60)
    bare = runs.measured({"answer": 42.0, "loss": ("step", [1.0])})
    console.print(render.render_figures(bare, "`answer`: the question's."))
    text = capsys.readouterr().out
    assert "what" not in text.split()
    assert "`answer`: the question's." in text
    bare["answer"].attrs["long_name"] = "of all"
    console.print(render.render_figures(bare, "unused"))
    text = capsys.readouterr().out
    assert "of all" in text
    assert "unused" not in text


def test_the_run_of_an_experiment_tells_what_it_returns(tmp_path, capsys):
    root = roots.make_running(tmp_path)
    path = root / "experiments/mine/experiment.py"
    doc = '    """Runs.\n\n    Returns:\n      The answer,\n      once.\n    """\n'
    head = "def run(cfg, ctx):\n"
    path.write_text(path.read_text().replace(head, head + doc))
    assert cli.main(["run", "mine/first", "--root", str(root)]) == 0
    assert "\nThe answer, once.\n" in capsys.readouterr().out
