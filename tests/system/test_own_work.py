"""The guide on a folder of one's own: its files make a part, configs and a table."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core
from hpcjax.runs import build, cli, discover
from tests import guides
from tests.runs import roots

FILES = (
    "experiments/mine/parts.py",
    "experiments/mine/optimizer.py",
    "experiments/mine/drawing.py",
    "configs/mine/digits.py",
    "experiments/mine/tables.py",
    "experiments/mine/times.py",
)


@pytest.fixture
def root(tmp_path):
    blocks = guides.blocks("own-work.md")
    assert len(blocks) == len(FILES)
    for path, block in zip(FILES, blocks, strict=True):
        roots.write(tmp_path, path, block)
    return tmp_path


def test_what_the_guide_draws_is_a_rows_own(root):
    drop = runpy.run_path(str(root / "experiments/mine/drawing.py"))["drop"]
    x, key = jnp.ones((4, 9)), jax.random.key(0)
    whole = drop(key, x, 0.5)
    part = drop(core.BatchKey(key=key, rows=jnp.array([2, 1])), x[:2], 0.5)
    np.testing.assert_array_equal(part, whole[jnp.array([2, 1])])
    assert {*np.unique(whole)} == {0, 2}


def test_the_experiment_of_the_guide_returns_what_it_declares(root):
    guide = runpy.run_path(str(root / "experiments/mine/times.py"))
    made = guide["run"](guide["TimesConfig"](), None)
    assert made["seconds"].sel(mode="slow").values.tolist() == [2, 2, 2]
    assert made.attrs["source"] == "measured"


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ('cell("error"', 'cell("eror"', "claim 'learns' of mine/halving: there is no "),
        ('"error", "constant"', '"error", "constnt"', "; did you mean 'constant'?"),
        ('"never learns"})', '"never lerns"})', "has a control of what there is not"),
        ('run["val_error"]', 'run["val_eror"]', "; did you mean 'val_error'?"),
        ('columns={"error"', 'columns={"eror"', "has no column 'eror'; did you mean"),
    ],
)
def test_a_misspelled_name_is_told_before_the_first_run(
    root, right, wrong, told, capsys
):
    file = root / "experiments/mine/tables.py"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert cli.main(["table", "mine/halving", "--root", str(root)]) == 2
    assert told in capsys.readouterr().err
    assert not (root / "runs").exists()


@pytest.mark.processes
def test_the_table_of_the_guide_is_made_and_its_claim_holds(root, capsys):
    made = build.build_table("mine/halving", root=root, progress=False)
    (verdict,) = made.verdicts
    assert verdict.holds, verdict
    assert cli.main(["list", "--parts", "--root", str(root)]) == 0
    assert "halving" in capsys.readouterr().out
    fast = discover.load("mine/digits:fast", {"optimizer.every": "7"}, root)
    assert fast.config.optimizer.every == 7
