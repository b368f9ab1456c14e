"""The notebooks run from top to bottom as scripts, and leave nothing behind."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REPOSITORY = pathlib.Path(__file__).parents[2]
NOTEBOOKS = REPOSITORY / "notebooks"
SAID = {
    "compose": (
        r"1438 images to learn from, 359 held out",
        r"Jorge, grafted  validation error by epoch:( 0\.\d{3}){7} 0\.0",
        r"jorge_diverged_updates +0\n",
    ),
    "sweep": (
        r"varied: optimizer\.lr=0\.01,0\.1,1\.0 seed=0,1 - trials: 6",
        r"6 of 6 trials have a value",
        r"best learning rate: 0\.1\n",
    ),
    "table": (
        r"SGD reaches 6 % within its 60 steps: \d+ \(≤ 60\): holds",
        r"no validation image is ever misread .*: FAILS",
        r"the table as a whole FAILS",
    ),
    "new_optimizer": (
        r"first attempt: int32 parameters are not refused",
        r"13 checks hold on 4 devices: .*same_when_sharded",
        r"lion +validation error:( 0\.\d{3}){3} 0\.0",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_notebook_runs_and_says_what_it_should(name, tmp_path):
    places = {part: tmp_path / part for part in ("home", "tmp", "work")}
    for place in places.values():
        place.mkdir()
    before = {path.name for path in NOTEBOOKS.iterdir()}
    done = subprocess.run(
        [sys.executable, str(NOTEBOOKS / f"{name}.py")],
        cwd=places["work"],
        env={
            **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
            "HOME": str(places["home"]),
            "TMPDIR": str(places["tmp"]),
            "PYTHONPATH": str(REPOSITORY),
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "agg",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in SAID[name]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    # Their settings and caches in the home folder are their own affair, as is ours.
    own = places["home"] / ".cache" / "hpcjax"
    others = {path.parent.name for path in left if own not in path.parents}
    assert others <= {"marimo", "logs", "matplotlib"}
    assert not list(places["work"].iterdir())
    assert not list(places["tmp"].iterdir())
    assert {path.name for path in NOTEBOOKS.iterdir()} - {"__pycache__"} <= before


def test_every_notebook_is_run_and_listed():
    names = {path.stem for path in NOTEBOOKS.glob("*.py")}
    assert names == set(SAID)
    page = (REPOSITORY / "docs" / "notebooks.md").read_text()
    for name in names:
        assert f"notebooks/{name}.py" in page
