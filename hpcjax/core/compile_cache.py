"""Where compiled programs are kept, for all clones of a user on a machine."""

import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import time

from hpcjax.core import files, user_cache
from hpcjax.core.provenance import cpu_model

log = logging.getLogger(__name__)

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
LIMIT = 2 * 2**30  # bytes of programs, of all versions together
_CHECKED_EVERY = 3600.0  # seconds: to look at 10,000 programs takes a tenth of one


def compile_cache() -> pathlib.Path | None:
    """Returns the folder of compiled programs; None if the user has no home.

    `JAX_COMPILATION_CACHE_DIR`, else a folder below the user's cache, whose name has
    what a program depends on besides what JAX makes its key of: the versions of JAX and
    the processor, for a program for another one may end in an illegal instruction.
    """
    if chosen := os.environ.get(_VARIABLE):
        return pathlib.Path(chosen)
    folder = user_cache.find()
    if folder is None:
        return None
    versions = (importlib.metadata.version(name) for name in ("jax", "jaxlib"))
    processor = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    return folder / "-".join(["jax", *versions, processor])


def keep_compiled() -> None:
    """Has JAX keep every program that it compiles, unless a folder is chosen already.

    Small ones too: a process begins with hundreds of them, and to compile one takes
    longer than to read it. Whoever has chosen the folder, programs are written whole or
    not at all; of our own folders those go that were not read for longest, once there
    are more than `LIMIT` bytes.
    """
    import jax

    _write_whole()
    folder = compile_cache()
    if folder is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.environ.get(_VARIABLE):
            _forget_oldest(folder.parent)
    except OSError:  # a home that cannot be written to: it is only a cache
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _forget_oldest(cache: pathlib.Path) -> None:
    """Deletes what was not read for longest, down to three quarters of the limit.

    JAX has a limit of its own, `jax_compilation_cache_max_size`, for which it reads the
    times of all programs whenever it stores one: with 10,000 of them that takes longer
    than most take to compile.
    """
    checked = cache / "checked"
    if checked.exists() and time.time() - checked.stat().st_mtime < _CHECKED_EVERY:
        return
    checked.touch()
    programs = [(path.stat(), path) for path in cache.glob("jax-*/*-cache")]
    programs.sort(key=lambda each: max(each[0].st_atime, each[0].st_mtime))
    total = sum(stat.st_size for stat, _ in programs)
    if total <= LIMIT:
        return
    for stat, path in programs:
        if total <= 0.75 * LIMIT:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size


def _write_whole() -> None:
    """Has JAX write a program whole or not at all, in place of one it cannot read.

    JAX writes it in place and never again, so that one that was cut off, by a kill or a
    full disk, would be read in vain and compiled by every process from then on. There
    is no public way to choose what stores programs.
    """
    from jax._src import compilation_cache, lru_cache

    class WholePrograms(lru_cache.LRUCache):
        """JAX's folder of programs; a remote or limited one stays entirely JAX's."""

        told = False

        def put(self, key: str, value: bytes) -> None:
            """Stores a program, of which there is none yet or none that can be read."""
            if self.eviction_enabled or "://" in str(self.path):
                super().put(key, value)
                return
            path = pathlib.Path(str(self.path), f"{key}-cache")
            try:
                with files.replacing(path, durable=False) as temporary:
                    temporary.write_bytes(value)
            except OSError as error:  # it is only a cache
                if not self.told:
                    log.warning("compiled programs are not kept: %s", error)
                self.told = True

    if compilation_cache.LRUCache is lru_cache.LRUCache:
        compilation_cache.LRUCache = WholePrograms


def _processor() -> str:
    """Returns the processor's name and what it can do, where the system tells."""
    information = pathlib.Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return f"{platform.machine()} {cpu_model()} {flags[:1]}"
