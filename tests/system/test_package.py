"""The wheel: what is in it, and that it works where there is no checkout."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from tests.data import writers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REPOSITORY = pathlib.Path(__file__).parents[2]
WITHOUT_JAX = """
import sys
import hpcjax
rooms = dir(hpcjax)
assert rooms
print(hpcjax.__file__)
print(sorted({"jax", "jaxlib", "flax", "optax", "orbax"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", str(folder), str(REPOSITORY)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("hpcjax-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def site(wheel):
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(site, folder, *args, **environment):
    """Runs the unpacked wheel in `folder`; the checkout is nowhere on its path."""
    # An editable installation would be found by the `site` module as well, behind ours.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**kept, "PYTHONPATH": str(site), "XLA_FLAGS": "", **environment},
    )


def files_of(package, *patterns):
    found = {path for pattern in patterns for path in package.rglob(pattern)}
    return {path for path in found if "__pycache__" not in path.parts}


def test_the_package_is_in_the_wheel(names):
    package = REPOSITORY / "hpcjax"
    wanted = files_of(package, "*.py", "*.pyi", "py.typed", "*.jinja")
    assert {path.name for path in wanted} >= {"py.typed", "report.html.jinja"}
    missing = {str(path.relative_to(REPOSITORY)) for path in wanted} - names
    assert not missing
    rooms = [path for path in package.iterdir() if (path / "__init__.py").exists()]
    assert {f"hpcjax/{room.name}/__init__.pyi" for room in rooms} <= names


def test_papers_are_bundled(names):
    for part in ("configs", "experiments"):
        for path in files_of(REPOSITORY / part, "*.py", "*.json", "README.md"):
            assert f"hpcjax/_bundled/{path.relative_to(REPOSITORY)}" in names


def test_nothing_else_is_in_it(names):
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hpcjax"}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_importing_it_loads_no_jax(site, tmp_path):
    done = python(site, tmp_path, "-c", WITHOUT_JAX)
    assert done.returncode == 0, done.stderr
    file, loaded = done.stdout.splitlines()
    assert pathlib.Path(file).is_relative_to(site)
    assert loaded == "[]"


def test_the_list_shows_bundled_papers(site, tmp_path):
    done = python(site, tmp_path, "-m", "hpcjax", "list")
    assert done.returncode == 0, done.stderr
    assert "jorge/digits:sgd" in done.stdout
    assert "hpcjax table jorge/quickstart" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_bundled_config_runs_in_an_empty_folder(site, tmp_path):
    folder, data = tmp_path / "work", tmp_path / "data"
    folder.mkdir()
    writers.write_all(data)
    smoke = ["train.steps=2", "train.batch_size=16", "model.width=2"]
    args = ["-m", "hpcjax", "run", "jorge/digits:sgd", *smoke, "--data", str(data)]
    done = python(site, folder, *args)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").glob("*/")
    assert run.name in done.stdout
    assert (run / "status").read_text() == "done\n"
    assert (run / "result.nc").exists()

    report = python(site, folder, "-m", "hpcjax", "report", run.name)
    assert report.returncode == 0, report.stderr
    assert "<svg" in (folder / "runs" / "report.html").read_text()
