"""Compiles a kernel's launch to Hopper machine code on a machine without a GPU."""

import pathlib
import re
import subprocess
import tempfile
import typing

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TYPES = {
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "uint8": "*u8",
    "uint32": "*u32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
}


class Hopper(typing.NamedTuple):
    """What a test asserts of a compiled kernel."""

    products: tuple[str, ...]  # wgmma... or mma.sync..., of the ptx
    code: str  # the machine code, disassembled
    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes
    ptx: str

    def count(self, pattern):
        """How many instructions have a name that begins so."""
        return sum(bool(re.match(pattern, name)) for name in self.names())

    def names(self):
        """The names of all instructions, in order."""
        return [_name(text) for _, text in self._lines() if text]

    def loops(self):
        """The names of the instructions of each innermost loop, in order."""
        labels, names, found = {}, [], []
        for label, text in self._lines():
            if label:
                labels[label] = len(names)
                continue
            names.append(_name(text))
            target = re.search(r"BRA.*?(\.L\w+)", text)
            # A jump to itself ends the program.
            if target and labels.get(target[1], len(names)) < len(names) - 1:
                found.append((labels[target[1]], len(names)))
        inner = [
            (begin, end)
            for begin, end in found
            if not any(
                begin <= b and e <= end and (b, e) != (begin, end) for b, e in found
            )
        ]
        return [names[begin:end] for begin, end in inner]

    def _lines(self):
        """Labels and instructions; one of each pair is empty."""
        return re.findall(r"^(\.L\w+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", self.code, re.M)


def _name(text):
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def compile_launch(launch, *inputs):
    """What PTX and machine code for sm_90a hold; `inputs` have dtypes."""
    kernel = launch.load()
    arrays = (*inputs, *launch.outputs)
    pointers = {
        name: TYPES[str(array.dtype)]
        for name, array in zip(kernel.arg_names, arrays, strict=False)
    }
    signature = {name: pointers.get(name, "constexpr") for name in kernel.arg_names}
    # Buffers of JAX are aligned; jax-triton says so to the compiler, too.
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        # jax-triton 0.3 empties TRITON_CACHE_DIR, with which triton.compile fails.
        knobs.cache.dir = folder
        made = triton.compile(
            ASTSource(kernel, signature, dict(launch.constants), aligned),
            target=GPUTarget("cuda", 90, 32),
            options={
                "num_warps": launch.warps,
                "num_stages": launch.stages,
                "enable_fp_fusion": True,
            },
        )
        ptx = made.asm["ptx"]
        text, cubin = pathlib.Path(folder, "k.ptx"), pathlib.Path(folder, "k.cubin")
        text.write_text(ptx)
        assembler = (get_ptxas(90).path, "-v", "--gpu-name", "sm_90a")
        report = _run(*assembler, text, "-o", cubin)
        code = _run(knobs.nvidia.nvdisasm.path, "-c", cubin)
    products = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.[\w.]+", ptx)
    return Hopper(
        products=tuple(sorted(set(products))),
        code=code,
        registers=int(re.findall(r"Used (\d+) registers", report)[0]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        shared=made.metadata.shared,
        ptx=ptx,
    )


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
