"""The folder of compiled programs: one for a user, versions and a processor."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

from hpcjax.core import compile_cache


def test_the_folder_is_of_the_versions_and_the_processor(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
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
    kept = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
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


def test_a_second_process_compiles_not_even_small_programs_again(tmp_path):
    assert compute(tmp_path)[0] == 0
    assert compute(tmp_path)[0] > 0


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
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
