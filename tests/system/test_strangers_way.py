"""The first hour of somebody new, in a copy of the repository, as commands."""

import subprocess
import sys
import time

import pytest

from tests import guides
from tests.conftest import REPOSITORY
from tests.system.test_own_work import FILES

QUICK = ["train.steps=4", "train.eval_every=2", "train.batch_size=16", "model.width=2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_commands_lead_to_a_table_of_ones_own(tmp_path):
    """But for the quickstart, which takes minutes and has a test of its own."""
    copy = tmp_path / "hpcjax"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(copy)], check=True)
    for name, block in zip(FILES, guides.blocks("own-work.md"), strict=True):
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    told, seconds = [], {}
    for words in (
        ["list"],
        ["list", "jorge"],
        ["show", "jorge/quickstart"],
        ["show", "jorge/digits:sgd"],
        ["run", "jorge/digits:sgd", *QUICK],
        ["sweep", "jorge/digits:sgd", "optimizer.lr=0.1,0.3", "seed=0,1", *QUICK],
        ["table", "mine/halving"],
        ["report"],
    ):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "hpcjax", *words],
            cwd=copy,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds[" ".join(words[:2])] = time.monotonic() - began
        assert done.returncode == 0, (words, done.stderr)
        assert max(map(len, done.stdout.splitlines())) <= 100, words
        told.append(done.stdout)
    print({step: f"{took:.1f} s" for step, took in seconds.items()})
    assert "jorge/quickstart" in told[1]
    assert "must not hold for" in told[2]
    assert "run        " in told[4]
    assert "holds" in told[6]
    assert list(copy.glob("runs/**/*.png")) or list(copy.glob("sweeps/**/*.png"))
    page = (copy / "runs/report.html").read_text()
    assert all(name in page for name in ("mine/halving", "jorge/digits:sgd"))
