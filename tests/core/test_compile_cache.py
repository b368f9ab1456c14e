"""The folder of compiled programs: one for a user, versions and a processor."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from hpcjax.core import compile_cache, user_cache


def test_the_folder_is_of_the_versions_and_the_processor(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("HPCJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compile_cache.compile_cache()
    assert found.parent == tmp_path / "hpcjax"
    for name in ("jax", "jaxlib"):
        assert importlib.metadata.version(name) in found.name
    monkeypatch.setattr(compile_cache, "cpu_model", lambda: "another processor")
    assert compile_cache.compile_cache().parent == found.parent
    assert compile_cache.compile_cache() != found
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert compile_cache.compile_cache() == pathlib.Path("/somewhere")


def test_a_variable_chooses_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HPCJAX_CACHE", "mine")
    monkeypatch.chdir(tmp_path)
    assert user_cache.find() == tmp_path / "mine"
    monkeypatch.setenv("HPCJAX_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert user_cache.find() == tmp_path / "cache" / "hpcjax"


def test_without_a_home_there_is_no_folder(monkeypatch):
    monkeypatch.delenv("HPCJAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it then does
    assert user_cache.find() is None


def test_programs_that_were_not_read_for_longest_go_first(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_cache, "LIMIT", 400)
    programs = []
    for age, version in enumerate(("jax-2", "jax-1") * 3):
        programs.append(tmp_path / version / f"{age}-cache")
        programs[-1].parent.mkdir(exist_ok=True)
        programs[-1].write_bytes(b"x" * 100)
        os.utime(programs[-1], (1000 - age, 1000 - age))
    mine = tmp_path / "outlines"
    mine.write_bytes(b"x" * 1000)
    compile_cache._forget_oldest(tmp_path)
    assert [path.exists() for path in programs] == [True] * 3 + [False] * 3
    assert mine.exists()
    programs[-1].write_bytes(b"x" * 1000)
    compile_cache._forget_oldest(tmp_path)  # it has looked within this hour
    assert programs[-1].exists()


CODE = """
import sys
import jax
from hpcjax.core.compile_cache import keep_compiled

if len(sys.argv) > 1:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1))
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
keep_compiled()
print(jax.numpy.arange(5.0) * 3)
print(sum(event.endswith("/cache_hits") for event in hits))
"""


def compute(cache, *limit):
    """Returns how many programs a new process reads, and what it says."""
    kept = (
        *("JAX_COMPILATION_CACHE_DIR", "HPCJAX_CACHE"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    )
    environment = {k: v for k, v in os.environ.items() if k not in kept}
    environment["XDG_CACHE_HOME"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *limit],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    numbers, found = done.stdout.splitlines()
    assert numbers == "[ 0.  3.  6.  9. 12.]"
    return int(found), done.stderr


@pytest.mark.slow
def test_a_second_process_compiles_not_even_small_programs_again(tmp_path):
    assert compute(tmp_path)[0] == 0
    assert compute(tmp_path)[0] > 0


@pytest.mark.slow
def test_a_program_that_was_cut_off_is_written_anew(tmp_path):
    compute(tmp_path)
    programs = [*tmp_path.rglob("*-cache")]
    for program in programs:
        program.write_bytes(program.read_bytes()[:100])
    assert "Error reading" in compute(tmp_path)[1]
    hits, told = compute(tmp_path)
    assert hits == len(programs)
    assert "Error reading" not in told


def test_a_disk_without_room_is_told_once_and_leaves_no_part_of_a_program(tmp_path):
    _, told = compute(tmp_path, "100")
    assert told.count("compiled programs are not kept") == 1
    assert "Error" not in told
    assert not [path for path in tmp_path.glob("hpcjax/*/*") if path.is_file()]
