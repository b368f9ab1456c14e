"""What the GPU kernels of a program do, by their machine code; needs no GPU."""

import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from hpcjax.core.errors import ConfigError, UnsupportedOp
from hpcjax.kernels._triton import launch as launches
from hpcjax.kernels._triton.accesses import Accesses
from hpcjax.kernels._triton.launch import Call

_HOPPER = 90
# Triton's names of dtypes.
_TYPES = {
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "uint8": "u8",
    "uint32": "u32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
}


class MachineCode(NamedTuple):
    """A kernel compiled for Hopper (sm_90a).

    Attributes:
      kernel: the name of the `triton.jit` function.
      constants: its constants, such as the sizes of a tile.
      threads: of a program.
      registers: of a thread.
      spilled: bytes that a thread stores and loads for want of registers.
      shared: bytes of shared memory of a program.
      ptx: the assembly that Triton writes.
      text: the machine code (SASS), disassembled.
    """

    kernel: str
    constants: dict[str, Any]
    threads: int
    registers: int
    spilled: int
    shared: int
    ptx: str
    text: str

    @property
    def tensor_core_products(self) -> tuple[str, ...]:
        """The different `wgmma` and `mma.sync` instructions of the PTX."""
        found = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.[\w.]+", self.ptx)
        return tuple(sorted(set(found)))

    @property
    def instructions(self) -> tuple[str, ...]:
        """The names of all instructions with their modifiers, in order."""
        return tuple(_name(text) for label, text in self._lines() if not label)

    @property
    def inner_loops(self) -> tuple[tuple[str, ...], ...]:
        """The instructions of each loop that holds no other."""
        labels: dict[str, int] = {}
        spans = []
        count = 0
        for label, text in self._lines():
            if label:
                labels[label] = count
                continue
            count += 1
            target = re.search(r"BRA.*?(\.L\w+)", text)
            begin = labels.get(target[1], count) if target else count
            # A jump to itself ends the program.
            if begin < count - 1:
                spans.append(range(begin, count))
        inner = [one for one in spans if not any(_holds(one, two) for two in spans)]
        return tuple(self.instructions[span.start : span.stop] for span in inner)

    def _lines(self) -> list[tuple[str, str]]:
        """Labels and instructions; one of each pair is empty."""
        form = r"^(\.L\w+):|/\*[0-9a-f]{4,}\*/\s+(.*?);"
        return re.findall(form, self.text, re.MULTILINE)


def _name(text: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def _holds(outer: range, inner: range) -> bool:
    return outer != inner and outer.start <= inner.start and inner.stop <= outer.stop


def machine_code(
    function: Callable[..., Any], *arguments: Any
) -> tuple[MachineCode, ...]:
    """Compiles the Triton kernels that a function calls, for Hopper and on any machine.

    Args:
      function: calls kernels, such as by `implementation="triton"`. It is traced, not
        run.
      *arguments: trees of arrays, or of shapes and dtypes.

    Returns:
      The code of each call that is traced, in order. A call in a `jax.vmap`, or in a
      loop, may be traced more than once.

    Raises:
      UnsupportedOp: Triton does not load, or the dtype of an operand is none of a
        kernel's.
      ConfigError: the function calls no kernel.
    """
    with launches.compiling_for(_HOPPER) as calls:
        problem = launches.find_problem()
        if problem:
            raise UnsupportedOp(f"machine code of kernels: {problem}")
        # Not the function itself, whose shapes JAX may remember.
        jax.eval_shape(functools.partial(function), *arguments)
    if not calls:
        raise ConfigError("the function calls no Triton kernel")
    return tuple(map(_compile, calls))


def count_accesses(
    function: Callable[..., Any], *arguments: Any
) -> tuple[Accesses, ...]:
    """Counts what interpreted kernels read and write of their operands.

    Args:
      function: calls kernels by `implementation="interpreted"`. It is run.
      *arguments: its arguments.

    Returns:
      The accesses of each kernel that has run. An element that is read twice counts
      twice, one under a mask that is false not at all.

    Raises:
      UnsupportedOp: Triton does not load.
      ConfigError: the function calls no kernel that is interpreted.
    """
    problem = launches.find_problem(interpreted=True)
    if problem:
        raise UnsupportedOp(f"accesses of kernels: {problem}")
    from hpcjax.kernels._triton import interpreter

    with interpreter.counting() as found:
        jax.block_until_ready(function(*arguments))
    if not found:
        raise ConfigError("the function calls no interpreted kernel")
    return tuple(found)


def _compile(call: Call) -> MachineCode:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    launch, kernel = call.launch, call.launch.load()
    arrays = (*call.inputs, *launch.outputs)
    pointers = dict(zip(kernel.arg_names, arrays, strict=False))
    signature = {
        name: _pointer_to(pointers[name].dtype) if name in pointers else "constexpr"
        for name in kernel.arg_names
    }
    # Buffers of JAX are aligned; jax-triton says so to the compiler, too.
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        # jax-triton 0.3 empties TRITON_CACHE_DIR, with which triton.compile fails.
        knobs.cache.dir = folder
        made = triton.compile(
            ASTSource(kernel, signature, dict(launch.constants), aligned),
            target=GPUTarget("cuda", _HOPPER, 32),
            options={
                "num_warps": launch.warps,
                "num_stages": launch.stages,
                "enable_fp_fusion": True,
            },
        )
        ptx, cubin = pathlib.Path(folder, "k.ptx"), pathlib.Path(folder, "k.cubin")
        ptx.write_text(made.asm["ptx"])
        assembler = (get_ptxas(_HOPPER).path, "-v", "--gpu-name", f"sm_{_HOPPER}a")
        report = _run(*assembler, ptx, "-o", cubin)
        text = _run(knobs.nvidia.nvdisasm.path, "-c", cubin)
    return MachineCode(
        kernel=kernel.__name__,
        constants=dict(launch.constants),
        threads=32 * launch.warps,
        registers=int(re.findall(r"Used (\d+) registers", report)[0]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        shared=made.metadata.shared,
        ptx=made.asm["ptx"],
        text=text,
    )


def _pointer_to(dtype: Any) -> str:
    """Returns Triton's name of the type of an operand's address."""
    if dtype.name not in _TYPES:
        raise UnsupportedOp(
            f"machine code of kernels: operands are {', '.join(_TYPES)}: got {dtype}"
        )
    return "*" + _TYPES[dtype.name]


def _run(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
