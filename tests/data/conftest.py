"""One tiny copy of every data set for the whole room."""

import pathlib

import pytest

from tests.data import writers


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data root with every catalogued data set; read only, shared by all tests."""
    root = tmp_path_factory.mktemp("data")
    writers.write_all(root)
    return root
