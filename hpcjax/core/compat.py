"""The supported versions, and the one place that knows how they differ.

A difference goes here, behind one name, when one is met.
"""

import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

from hpcjax.core.errors import ConfigError

# Lowest supported version, and the lowest one above that is not.
SUPPORTED: Mapping[str, tuple[str, str | None]] = {
    "python": ("3.11", None),
    "jax": ("0.10.2", "0.12"),
    "jaxlib": ("0.10.2", "0.12"),
    "flax": ("0.12.8", None),
    "optax": ("0.2.8", None),
    "orbax-checkpoint": ("0.12.8", None),
}


@functools.cache  # a run asks for twenty, each of which is a file that is parsed
def version(package: str) -> str | None:
    """Returns the installed version of a package, or of `"python"`; None if absent."""
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem(package: str, found: str | None) -> str | None:
    """Says what is wrong with version `found` of `package`, None if it is supported.

    Examples:
      >>> problem("jax", "0.12.0.1")
      'jax must be at least 0.10.2 and below 0.12: got 0.12.0.1'
      >>> problem("jax", "0.11.2") is None
      True
    """
    lowest, above = SUPPORTED[package]
    rule = f"{package} must be at least {lowest}"
    if above:
        rule += f" and below {above}"
    if found is None:
        return f"{rule}: it is not installed"
    number = _parse(found)
    if number < _parse(lowest) or (above and number >= _parse(above)):
        return f"{rule}: got {found}"
    return None


def backends_initialized() -> bool:
    """Says whether this process has started JAX's devices; starts none itself."""
    if "jax" not in sys.modules:
        return False
    # There is no public question for this on any supported version.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def start_devices() -> list[Any]:
    """Starts JAX, if it has not been; returns its devices.

    Raises:
      ConfigError: `JAX_PLATFORMS` names what this JAX cannot start.
    """
    import jax

    try:
        return jax.devices()
    # JAX raises whatever the platform's library does, also an empty AssertionError.
    except Exception as error:
        chosen = os.environ.get("JAX_PLATFORMS")
        if not chosen:
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"JAX cannot start JAX_PLATFORMS={chosen!r}: {reason}"
        ) from error


def quick_compilation(platform: str) -> dict[str, Any]:
    """Returns `compiler_options` for a program that is read and not run.

    XLA then optimizes, schedules and places in memory as always, and writes machine
    code in its plainest way, which on a CPU is most of the work. An option that the
    user has chosen stays: the program can then be that of an earlier run.
    """
    if platform != "cpu":
        return {}
    # Up to here an emitter of its own makes each kernel; later ones do not know it.
    old = _parse(version("jaxlib") or "0") < (0, 11)
    emitters = {"xla_cpu_use_fusion_emitters": False} if old else {}
    options = {"xla_backend_optimization_level": 0, **emitters}
    chosen = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in chosen}


def single_use_compilation(platform: str) -> dict[str, Any]:
    """Returns `compiler_options` for a program that is run once.

    Of the seconds in which a CPU's program of many random draws is compiled, LLVM's
    higher levels take five sixths; its first one writes the same numbers. A level that
    the user has chosen stays.
    """
    level = "xla_backend_optimization_level"
    if platform != "cpu" or level in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {level: 1}


def gather_equal(part: Any, axis: str, dim: int) -> Any:
    """Returns the whole array of parts along an axis, typed as equal on its devices.

    Its gradient is this device's part, that of `jax.lax.all_gather` a reduce-scatter.

    Args:
      part: this device's, inside `shard_map` with `check_vma=True`.
      axis: a mesh axis.
      dim: along which the parts lie one after the other.
    """
    # Not yet public in any supported version.
    from jax._src.lax import parallel

    return parallel.all_gather_invariant(part, axis, axis=dim, tiled=True)


def triton_options(outputs: Any) -> dict[str, Any]:
    """Returns the arguments of `jax_triton.triton_call` that depend on its version.

    Args:
      outputs: shapes and dtypes of the kernel's outputs.
    """
    if _parse(version("jax-triton") or "0") < (0, 4):
        return {"out_shape": outputs}
    # Triton may write a newer PTX than the assembler of CUDA 13.0 reads.
    options = {"ptx_version": 87, "enable_fp_fusion": True}
    return {"out_type": outputs, "backend_options": options}


def _parse(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version; `"0.12.0.dev1"` counts as `(0, 12)`."""
    leading = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
