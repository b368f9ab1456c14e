"""Provenance: complete, free of names, and honest about uncommitted changes."""

import ast
import getpass
import importlib.metadata
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import types

import jax
import pytest

from hpcjax.core import provenance

REPOSITORY = pathlib.Path(__file__).parents[2]
EXPERIMENTS = REPOSITORY / "experiments"


def git(root, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", root, *identity, *arguments], check=True)


@pytest.fixture
def root(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_holds_every_field_as_json():
    found = provenance.collect(seed=3, command=["hpcjax", "run", "a b"], parent="p")
    assert json.loads(json.dumps(found)) == found
    assert found["seed"] == 3
    assert found["parent"] == "p"
    assert found["command"] == "hpcjax run 'a b'"
    assert found["versions"]["jax"] == jax.__version__
    assert set(found["versions"]) >= set(provenance.PACKAGES)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["started"])
    assert found["settings"]["jax_enable_x64"] is False


def test_versions_are_of_what_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    assert "scikit-learn" not in provenance.versions()
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    found = provenance.versions()["scikit-learn"]
    assert found == importlib.metadata.version("scikit-learn")


# Packages that read, write, start or show, and change no number.
SILENT = {
    *("docstring_parser", "etils", "filelock", "jinja2", "lazy_loader", "matplotlib"),
    *("mlflow", "packaging", "platformdirs", "psutil", "pynvml", "ray", "rich"),
    *("submitit", "tensorboardX", "threadpoolctl", "tyro", "wandb", "xxhash", "yaml"),
}


def test_every_package_that_code_imports_is_versioned_or_changes_no_number():
    imported = set()
    for file in [*REPOSITORY.glob("hpcjax/**/*.py"), *EXPERIMENTS.glob("**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    always = {name.partition("-")[0] for name in provenance.PACKAGES} | {"experiments"}
    others = imported - always - set(sys.stdlib_module_names)
    assert others - set(provenance.OTHERS.values()) == SILENT


def test_files_of_a_root_are_known_by_a_digest_outside_of_the_repository(tmp_path):
    def digest(root):
        return provenance.collect(root=root)["root_files"]

    assert digest(provenance.repository()) is None
    assert digest(tmp_path) is None
    seen = set()
    for name, text in (("experiments/a/x.py", "1"), ("configs/a/x.py", "1")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        seen.add(digest(tmp_path))
    (tmp_path / "experiments/a/x.py").write_text("2")
    seen.add(digest(tmp_path))
    (tmp_path / "experiments/a/x.py").rename(tmp_path / "experiments/a/y.py")
    seen.add(digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "experiments/a/result.json").write_text("{}")
    assert digest(tmp_path) in seen
    assert not provenance.is_versioned(tmp_path)
    git(tmp_path, "init", "-q")
    assert provenance.is_versioned(tmp_path)


def test_lists_devices_by_kind():
    found = provenance.collect(devices=True)
    assert sum(found["devices"].values()) == jax.device_count()
    assert list(found["devices"]) == [jax.devices()[0].device_kind]
    assert found["processes"] == 1


def test_starts_no_device_and_imports_no_jax():
    code = """
import sys
from hpcjax.core import provenance
found = provenance.collect(command=[])
assert "jax" not in sys.modules
assert found["devices"] is None and found["settings"] is None
import jax
from hpcjax.core import compat
assert not compat.backends_initialized()
assert provenance.collect()["devices"] is None
assert not compat.backends_initialized()
jax.devices()
assert provenance.collect()["devices"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_names_and_no_paths_from_outside(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_x=1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/home/someone/cache")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "machine.example:1234")
    monkeypatch.setattr(
        sys, "argv", ["/opt/someone/bin/hpcjax", "run", "root=/home/some one/x", "~/y"]
    )
    found = provenance.collect()
    text = json.dumps(found)
    assert "someone" not in text
    assert "some one" not in text
    assert "machine.example" not in text
    assert str(tmp_path) not in text
    # As a word: a machine called "vm" is not what llvmlite is named after.
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text
    assert found["environment"]["XLA_FLAGS"].endswith("--xla_x=1")
    assert found["command"] == "hpcjax run 'root=<outside>/x' '<outside>/y'"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/repo/runs/a,/repo/b", "runs/a,b"),
        ("a/b ../c gs://bucket/d 1/2", "a/b ../c gs://bucket/d 1/2"),
        ("file:///home/u/x", "<outside>/x"),
        ("~u/x", "<outside>/x"),
        ("'/repository/x'", "'<outside>/x'"),
    ],
)
def test_anonymous(text, wanted):
    assert provenance.anonymous(text, pathlib.Path("/repo")) == wanted


def test_the_command_keeps_paths_of_the_repository():
    root = pathlib.Path("/repo")
    words = ["/repo/tools/x.py", "/repo/configs/a", "key=/repo/b c", "n=1/2"]
    wanted = "tools/x.py configs/a 'key=b c' n=1/2"
    assert provenance._command(words, root) == wanted
    assert provenance._command([], root) == ""


def test_dirty_hash_sees_every_change(root):
    assert provenance.dirty_hash(root) is None
    (root / "ignored").write_text("anything")
    assert provenance.dirty_hash(root) is None
    seen = set()
    (root / "code.py").write_text("x = 2\n")
    seen.add(provenance.dirty_hash(root))
    git(root, "add", ".")
    assert provenance.dirty_hash(root) in seen  # staged or not is the same code
    (root / "new.bin").write_bytes(bytes(range(256)))
    seen.add(provenance.dirty_hash(root))
    (root / "new.bin").write_bytes(bytes(255))
    seen.add(provenance.dirty_hash(root))
    (root / "code.py").unlink()
    seen.add(provenance.dirty_hash(root))
    assert len(seen) == 4
    assert None not in seen


def test_the_repository_is_that_of_the_package_else_of_the_directory(
    root, monkeypatch, tmp_path_factory
):
    package = pathlib.Path(provenance.__file__).parents[2]
    monkeypatch.chdir(root)
    if (package / ".git").exists():
        assert provenance.repository() == package
    installed = tmp_path_factory.mktemp("site-packages") / "core" / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.repository() == root.resolve()
    monkeypatch.chdir(installed.parents[1])
    found = provenance.collect()
    assert (found["git_commit"], found["git_dirty"]) == (None, None)


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    found = provenance.collect()
    assert found["git_commit"] is None
    assert found["cpu"]
