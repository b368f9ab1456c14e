"""Files are whole or absent; names stay inside their root."""

import errno
import os

import pytest
import xxhash

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, DiskFull

HOSTILE = [
    "",
    ".",
    "..",
    "../a",
    "a/b",
    "/etc",
    "a\0b",
    "a\n",
    "-rf",
    ".hidden",
    "a..b",
]
HOSTILE += ["~", "a b", "%2e%2e", "ü", "a\\b", "C:\\x", "x" * 201, "$(id)", "a;b", "a*"]


@pytest.mark.faults(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="run name"):
        files.check_name(name, "run name")
    with pytest.raises(ConfigError):
        files.inside(tmp_path, "a", name)


def test_links_out_of_the_root_are_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    (root / "in").symlink_to(root)
    assert files.inside(root, "in", "x") == root / "in" / "x"
    with pytest.raises(ConfigError, match="leads out"):
        files.inside(root, "out")


def test_json_comes_back_and_nothing_else_stays(tmp_path):
    path = tmp_path / "new" / "a.json"
    files.write_json(path, {"b": [1, 2.5, None], "a": "ü"})
    assert files.read_json(path) == {"b": [1, 2.5, None], "a": "ü"}
    files.write_atomic(path, b"x")
    assert path.read_bytes() == b"x"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_content(tmp_path, monkeypatch, code):
    path = tmp_path / "a"
    path.write_text("old")

    def full(handle):
        raise OSError(code, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"a: \d+ bytes free"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_no_limit_forbids_is_too_large_for_its_file_system(tmp_path):
    told = r"a cannot be written: its file system holds no file so large"
    with pytest.raises(DiskFull, match=told), files.disk_errors(tmp_path / "a"):
        raise OSError(errno.EFBIG, "too large")


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(PermissionError), files.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_what_is_no_json_is_a_bad_file(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(DataMissing, match=r"no such file: .*a\.json"):
        files.read_json(path)
    for content in (b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match=r"a\.json: expected JSON"):
            files.read_json(path)
    path.write_bytes(b"[]")
    assert files.read_json(path) == []
    with pytest.raises(DataFormatError, match=r"expected a JSON object, found .*list"):
        files.read_object(path)


def test_a_checksum_reads_in_chunks(tmp_path, monkeypatch):
    content = bytes(range(250)) * 10
    (tmp_path / "f").write_bytes(content)
    monkeypatch.setattr(files, "_CHUNK", 64)
    assert files.checksum(tmp_path / "f") == xxhash.xxh3_128_hexdigest(content)
