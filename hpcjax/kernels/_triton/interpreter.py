"""Runs a `triton.jit` kernel on the CPU, on numpy arrays, for tests.

Triton's own switch, TRITON_INTERPRET=1, takes only tensors of PyTorch, and makes every
kernel of the process an interpreted one, which cannot be compiled any more. Here a
kernel is interpreted for one call. That takes private names of Triton's interpreter,
which are the same in triton 3.6 to 3.9.

Where it differs from a GPU: a cast to bfloat16 truncates; arithmetic of bfloat16 other
than a dot is wrong, so that kernels widen to float32 first; integer products wrap,
where `mma.sync ... satfinite` saturates. Programs run one after the other.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import triton.language as tl
from triton.language import core  # noqa: F401  (see `interpret`)
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from hpcjax.kernels._triton.accesses import Accesses
from hpcjax.kernels._triton.pairs import STAND_INS

if TYPE_CHECKING:
    from hpcjax.kernels._triton.launch import Launch

# The interpreter changes triton.language for all threads.
_LOCK = threading.RLock()
_Builder = interpreter.InterpreterBuilder
_DOT, _LOAD, _STORE = (
    _Builder.create_dot,
    _Builder.create_masked_load,
    _Builder.create_masked_store,
)


# Kernels are interpreted in threads of the host, which see no context of the caller.
_listings: list[list[Accesses]] = []


@contextlib.contextmanager
def counting() -> Iterator[list[Accesses]]:
    """Lists what the kernels that are interpreted meanwhile have read and written."""
    found: list[Accesses] = []
    _listings.append(found)
    try:
        yield found
    finally:
        _listings.pop()


class _Pointer:
    """What the interpreter asks of an array: its address, and its dtype's name."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _Programs(interpreter.GridExecutor):
    """Runs every program of a grid, without copies to and from a device."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(
        self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any
    ) -> None:
        pass


def interpret(
    launch: "Launch", inputs: Sequence[np.ndarray | jax.Array]
) -> tuple[np.ndarray, ...]:
    """Returns the kernel's outputs; what it does not write is zero."""
    given = [np.ascontiguousarray(each) for each in inputs]
    made = [np.zeros(out.shape, out.dtype) for out in launch.outputs]
    function = interpreter.InterpretedFunction(launch.load().fn)
    with _LOCK, contextlib.ExitStack() as changes:
        # Triton interprets the language's modules that it sees beside a function: here
        # both, for all functions that the kernel calls.
        changes.callback(interpreter._patch_lang(_call_inner).restore)
        _replace(changes, JITFunction, "__call__", _call_inner)
        _replace(changes, _Builder, "create_dot", _dot)
        if _listings:
            _count(changes, _listings[-1], function, given + made)
        programs = _Programs(function.rewrite(), function.arg_names, launch.grid)
        with np.errstate(all="ignore"):  # as on a GPU
            programs(*map(_Pointer, given + made), **launch.constants)
    return tuple(made)


def _replace(changes: contextlib.ExitStack, owner: Any, name: str, by: Any) -> None:
    """Sets an attribute until the changes end."""
    changes.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, by)


def _count(
    changes: contextlib.ExitStack,
    listed: list[Accesses],
    function: Any,
    arrays: Sequence[np.ndarray],
) -> None:
    """Counts the accesses to arrays until the changes end."""
    named = dict(zip(function.arg_names, arrays, strict=False))
    sizes = {name: array.size for name, array in named.items()}
    found = Accesses(function.fn.__name__, sizes, Counter(), Counter())
    listed.append(found)

    def add(to: Counter[str], pointers: Any, mask: Any) -> None:
        live = np.extract(mask.data, pointers.data)
        for name, array in named.items():
            begin = array.ctypes.data
            to[name] += int(np.sum((live >= begin) & (live < begin + array.nbytes)))

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        add(found.loaded, pointers, mask)
        return _LOAD(self, pointers, mask, *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        add(found.stored, pointers, mask)
        return _STORE(self, pointers, value, mask, *others)

    _replace(changes, _Builder, "create_masked_load", load)
    _replace(changes, _Builder, "create_masked_store", store)


def _call_inner(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Calls a jitted function from a kernel, `tl.zeros` and `tl.cdiv` among them."""
    plain = STAND_INS.get(function.fn, function.fn)
    return interpreter.InterpretedFunction(plain).rewrite()(*args, **kwargs)


def _dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """Multiplies numbers where the interpreter would multiply bits of bfloat16."""

    def widen(x: Any) -> Any:
        brain = x.dtype.scalar == tl.bfloat16
        return self.create_fp_ext(x, tl.float32) if brain else x

    return _DOT(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)
