"""The supported range is the packaging's range, and its message says what is wrong."""

import pathlib
import re
import tomllib

import jax
import pytest

from hpcjax.core import compat

PROJECT = pathlib.Path(compat.__file__).parents[2] / "pyproject.toml"


def test_this_environment_is_supported():
    for package in compat.SUPPORTED:
        assert compat.problem(package, compat.version(package)) is None
    jax.devices()
    assert compat.backends_initialized()


def test_the_range_is_that_of_the_packaging():
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert project["requires-python"] == f">={compat.SUPPORTED['python'][0]}"
    required = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
    for name, (lowest, above) in compat.SUPPORTED.items():
        if name in required:
            upper = f",<{above}" if above else ""
            assert required[name] == f"{name}>={lowest}{upper}"


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.10.2.dev20", True),
        ("0.10.10", True),
        ("0.11.2", True),
        ("0.12.0", False),
        ("0.12.0.1", False),
        ("0.12.0.dev1", False),
        ("1.0", False),
        (None, False),
        ("unknown", False),
    ],
)
def test_ranges(version, good):
    assert (compat.problem("jax", version) is None) == good


def test_a_problem_says_what_is_wrong():
    rule = "jax must be at least 0.10.2 and below 0.12"
    assert compat.problem("jax", "0.12.0") == f"{rule}: got 0.12.0"
    assert compat.problem("jax", None) == f"{rule}: it is not installed"


def test_absent_packages_have_no_version():
    assert compat.version("surely-not-installed") is None
