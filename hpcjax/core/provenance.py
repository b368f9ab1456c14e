"""Where a result comes from: code, versions, flags, devices, command, time.

Nothing in it tells whose machine it was: no host name, no user name, and no absolute
path outside the repository.
"""

import datetime
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from hpcjax.core import compat

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "xarray",
    "hpcjax",
)
# What others bring to the numbers of a run, with the name of their module.
OTHERS = {
    "array-record": "array_record",
    "cfgrib": "cfgrib",
    "dinosaur": "dinosaur",
    "eccodes": "eccodes",
    "gguf": "gguf",
    "grain": "grain",
    "jax-cuda13-plugin": "jax_cuda13_plugin",
    "jax-triton": "jax_triton",
    "jaxtyping": "jaxtyping",
    "kfac-jax": "kfac_jax",
    "ladybug": "ladybug",
    "llvmlite": "llvmlite",
    "ml-dtypes": "ml_dtypes",
    "mpi4py": "mpi4py",
    "networkx": "networkx",
    "nvidia-cublas": "jax_cuda13_plugin",  # libraries, which no module stands for
    "nvidia-cudnn-cu13": "jax_cuda13_plugin",
    "optuna": "optuna",
    "pandas": "pandas",
    "pillow": "PIL",
    "pint": "pint",
    "properscoring": "properscoring",
    "pyarrow": "pyarrow",
    "pysz": "pysz",
    "safetensors": "safetensors",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "scores": "scores",
    "scoringrules": "scoringrules",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "torch-geometric": "torch_geometric",
    "transformers": "transformers",
    "triton": "triton",
    "zarr": "zarr",
}
# Settings of `jax.config` that can change a number.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_disable_jit",
    "jax_platforms",
)
OUTSIDE = "<outside>"
_PATH = re.compile(r"(?<![\w.:/~-])(?:file://)?(?:~\w*)?/[^\s,;:'\"]+")
_NETWORK = re.compile(r"ADDRESS|HOST|COORDINATOR|_IPS?\b|TOKEN|SECRET|PASSWORD")
_SECONDS = 20


def collect(
    *,
    seed: int | None = None,
    command: Sequence[str] | None = None,
    parent: str | None = None,
    devices: bool = False,
    root: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Returns what is needed to make a result again, as JSON values.

    Args:
      seed: of the run.
      command: its command line; by default that of this process.
      parent: identifier of the run that this one continues.
      devices: list devices even if that starts them; otherwise they are listed only
        when JAX has been used before.
      root: the user's folder of `experiments/` and `configs/`.

    Returns:
      `git_commit` and `git_dirty` (a hash of all uncommitted changes; both None
      outside a repository, the latter None when there are none), `root_files` (a hash
      of the root's code where that is outside of this repository, else None),
      `versions`, `python`, `platform`, `cpu`, `cpu_count`, `cores` (on which this
      process may run: sums over more threads are added in another order), `environment`
      (`XLA_FLAGS` and `JAX_*`), `settings` (of `jax.config`, None before JAX is
      imported), `devices` (kind to count, None if not started), `processes`, `command`,
      `seed`, `parent`, `started` (UTC, ISO 8601).

    Examples:
      >>> collect(seed=3, command=["hpcjax", "list"])["command"]
      'hpcjax list'
    """
    source = repository()
    known = devices or compat.backends_initialized()
    counted, processes = _devices() if known else (None, None)
    return {
        "git_commit": _git(source, "rev-parse", "HEAD") if source else None,
        "git_dirty": dirty_hash(source) if source else None,
        "root_files": _hash_root(root, source) if root else None,
        "versions": versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "cores": len(usable_cores()) or os.cpu_count(),
        "environment": _environment(source),
        "settings": _settings(),
        "devices": counted,
        "processes": processes,
        "command": _command(sys.argv if command is None else command, source),
        "seed": seed,
        "parent": parent,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str | None]:
    """Returns versions: of `PACKAGES`, and of those of `OTHERS` that are imported."""
    used = [name for name, module in OTHERS.items() if module in sys.modules]
    return {name: compat.version(name) for name in (*PACKAGES, *used)}


def is_versioned(folder: pathlib.Path) -> bool:
    """Returns whether a folder is in a git repository."""
    return _git(folder, "rev-parse", "--show-toplevel") is not None


def _hash_root(root: pathlib.Path, source: pathlib.Path | None) -> str | None:
    """Returns a hash of a root's code; None if there is none, or `source` has it."""
    if source is not None and root.resolve().is_relative_to(source):
        return None
    places = (root / "experiments", root / "configs")
    code = sorted(path for place in places for path in place.rglob("*.py"))
    return _hash_files(root, code) if code else None


def usable_cores() -> list[int]:
    """Returns the cores on which this process may run; none if nobody can tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def repository() -> pathlib.Path | None:
    """Returns the repository that tracks this package, else that of the directory."""
    package = pathlib.Path(__file__).resolve().parents[1]
    # An environment inside someone's repository is not tracked by it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        top = _git(package, "rev-parse", "--show-toplevel")
    else:
        top = _git(pathlib.Path.cwd(), "rev-parse", "--show-toplevel")
    return pathlib.Path(top) if top else None


def dirty_hash(root: pathlib.Path) -> str | None:
    """Returns a hash of all changes and new files since the commit; None if clean."""
    diff = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color") or ""
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    new = sorted(name for name in listed.split("\0") if name)
    if not diff and not new:
        return None
    return _hash_files(root, [root / name for name in new], diff)


def _hash_files(
    root: pathlib.Path, paths: Iterable[pathlib.Path], before: str = ""
) -> str:
    """Returns a hash of a text, and of the names below `root` and contents of files."""
    digest = xxhash.xxh3_128(before.encode(errors="surrogateescape"))
    for path in paths:
        digest.update(b"\0" + os.fsencode(path.relative_to(root)) + b"\0")
        if path.is_file():
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    return digest.hexdigest()


def cpu_model() -> str:
    """Returns the processor's name as the system gives it, else its architecture."""
    information = pathlib.Path("/proc/cpuinfo")
    if information.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.M)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def anonymous(text: str, root: pathlib.Path | None = None) -> str:
    """Makes paths inside `root` relative to it and hides where others are.

    Examples:
      >>> anonymous("--xla_dump_to=/home/me/dump", pathlib.Path("/work"))
      '--xla_dump_to=<outside>/dump'
      >>> anonymous("/work/runs/a", pathlib.Path("/work"))
      'runs/a'
    """
    return _PATH.sub(lambda match: _hide(match[0], root), text)


def _hide(path: str, root: pathlib.Path | None) -> str:
    plain = pathlib.PurePosixPath(path.removeprefix("file://"))
    if root is not None and plain.is_relative_to(root):
        return str(plain.relative_to(root))
    return f"{OUTSIDE}/{plain.name}"


def _command(words: Sequence[str], root: pathlib.Path | None) -> str:
    """Returns one line; the program is named without its directory."""

    def clean(word: str) -> str:
        key, equals, value = word.rpartition("=")
        # A path may hold blanks, so an argument that is one is taken whole.
        if value.startswith(("/", "~/")):
            return key + equals + _hide(value, root)
        return anonymous(word, root)

    if not words:
        return ""
    first = clean(words[0])
    program = pathlib.PurePath(first).name if OUTSIDE in first else first
    return shlex.join([program, *(clean(word) for word in words[1:])])


def _environment(root: pathlib.Path | None) -> dict[str, str]:
    """Returns `XLA_FLAGS` and `JAX_*`, without network names."""
    return {
        name: anonymous(value, root)
        for name, value in sorted(os.environ.items())
        if (name == "XLA_FLAGS" or name.startswith("JAX_"))
        and not _NETWORK.search(name)
    }


def _settings() -> dict[str, Any] | None:
    if "jax" not in sys.modules:
        return None
    import jax

    return {name: getattr(jax.config, name, None) for name in SETTINGS}


def _devices() -> tuple[dict[str, int], int]:
    import jax

    kinds = Counter(device.device_kind for device in compat.start_devices())
    return dict(sorted(kinds.items())), jax.process_count()


def _git(directory: pathlib.Path, *arguments: str) -> str | None:
    """Returns what git prints, without the last newline; None if it cannot answer."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            check=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape").rstrip("\n")
