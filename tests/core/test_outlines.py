"""Outlines of modules: read from the cache they are what the text says."""

import pytest

from hpcjax.core import _outlines

TEXT = b"""
from . import near
import far.away as far
ONE, TWO = near.both
def run(x):
    return far.go(x, "some.place:name") + ONE
print(run)
"""
STUB = b"from ._inner import thing as thing"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_outlines, "_folder", lambda: tmp_path / "outlines")
    return tmp_path / "outlines"


def outline(text=TEXT, package="house.room", stub=STUB):
    return _outlines.find_outline("house.room", package, text, stub)


def test_what_a_text_says():
    found = outline()
    assert found.imports == {"near": ["house.room:near"], "far": ["far.away"]}
    assert found.exported == {"thing": "house.room._inner:thing"}
    assert set(found.definitions) == {"", "ONE", "TWO", "run"}
    run = found.definition("run")
    assert run.mentions == [["ONE"], ["far", "go"], ["some.place:name"]]
    assert run.strings == []  # it does not look for files
    assert found.definition("").mentions == [["print"], ["run"]]
    assert found.definition("none") == _outlines.Definition()


def test_an_outline_is_read_once(folder, monkeypatch):
    found = outline()
    assert len(list(folder.iterdir())) == 1
    monkeypatch.delattr(_outlines, "_read")
    assert outline() == found


@pytest.mark.parametrize(
    "changed", [{"text": TEXT + b"\nx = 1"}, {"package": "house"}, {"stub": b""}]
)
def test_of_another_text_package_or_stub_there_is_another(folder, changed):
    assert outline() != outline(**changed)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damaged", [b"", b"{", b"null", b"[]", b'{"definitions": {}}'])
def test_a_damaged_outline_is_made_again(folder, damaged):
    found = outline()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damaged)
    assert outline() == found
    assert file.read_bytes() == whole


def test_where_nothing_can_be_kept_nothing_is(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(_outlines, "_folder", lambda: tmp_path / "file" / "below")
    assert outline().name == "house.room"
    monkeypatch.setattr(_outlines, "_folder", lambda: None)
    assert outline().name == "house.room"
