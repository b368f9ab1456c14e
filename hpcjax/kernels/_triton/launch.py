"""Runs a kernel that is written in Triton, through jax-triton or interpreted."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from hpcjax.core import compat
from hpcjax.core.config import find_function
from hpcjax.core.varying import vary_like

# A part of the key of `jax.jit`'s caches: what is traced for a GPU that is not here
# must not be taken for what is called here.
_target = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """All that a kernel's compilation and its call depend on besides its inputs.

    An operation's `plan` makes it from shapes and dtypes, and imports no Triton. What
    runs, interprets or only compiles the kernel takes the same one.

    Attributes:
      kernel: `"module:function"` of a `triton.jit` function, whose parameters are the
        inputs, the outputs and the constants.
      grid: numbers of programs along three axes.
      outputs: shape and dtype of each output.
      constants: the parameters that are `tl.constexpr`.
      zeroed: the outputs that are zero when the kernel begins.
      warps: threads of a program / 32.
      stages: how many loads of a loop are under way at once.
    """

    kernel: str
    grid: tuple[int, int, int]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    zeroed: tuple[int, ...] = ()
    warps: int = 4
    stages: int = 1

    def load(self) -> Any:
        """Returns the `triton.jit` function; imports Triton."""
        return find_function(self.kernel)


class Call(NamedTuple):
    """A call of a kernel in a program.

    Attributes:
      launch: the kernel and its sizes.
      inputs: shapes and dtypes.
    """

    launch: Launch
    inputs: tuple[jax.ShapeDtypeStruct, ...]


def run(
    launch: Launch, *inputs: jax.Array, interpreted: bool = False
) -> tuple[jax.Array, ...]:
    """Returns a kernel's outputs.

    It has no gradient; under `vmap` the kernel runs once for each element. Inside
    `shard_map` the outputs differ along every axis along which an input does.

    Args:
      launch: the kernel and its sizes.
      inputs: arrays, as the kernel's first parameters.
      interpreted: runs it by numpy on the CPU, slowly, for tests.
    """
    if _target.value is not None:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
        _target.value.calls.append(Call(launch, shapes))
    call = _interpret if interpreted else _call

    @jax.custom_batching.sequential_vmap
    def once(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return vary_like(call(launch, *inputs), inputs)

    return once(*inputs)


class _Target:
    """A GPU that need not be here, and the calls of kernels that were traced for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.calls: list[Call] = []


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[Call]]:
    """Compiles kernels for a GPU that need not be here, such as 90 for Hopper.

    For programs that are lowered or exported on another machine than they run on. The
    list has the calls of kernels that are traced meanwhile, in order.
    """
    target = _Target(capability)
    with _target(target):
        yield target.calls


def find_problem(*, interpreted: bool = False) -> str | None:
    """Says why no kernel can run here, or be interpreted here; None if they can."""
    if interpreted:
        return _find_missing("triton")
    platform = jax.default_backend()
    if _target.value is None and platform != "gpu":
        return f"the device is a {platform}"
    # Without CUDA's plugin for JAX, jax-triton is there and does not load.
    return _find_missing("triton") or _find_missing("jax_triton")


@functools.cache
def _find_missing(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"{package} does not load ({error}): pip install 'hpcjax[gpu]'"
    return None


def _call(launch: Launch, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    import jax_triton

    kernel = launch.load()
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        name=kernel.__name__,
        grid=launch.grid,
        zeroed_outputs=launch.zeroed,
        num_warps=launch.warps,
        num_stages=launch.stages,
        compute_capability=_target.value and _target.value.capability,
        **compat.triton_options(launch.outputs),
        **launch.constants,
    )


def _interpret(launch: Launch, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    def on_host(*arrays: Any) -> tuple[Any, ...]:
        from hpcjax.kernels._triton.interpreter import interpret

        return interpret(launch, arrays)

    return jax.pure_callback(on_host, launch.outputs, *inputs, vmap_method="sequential")
