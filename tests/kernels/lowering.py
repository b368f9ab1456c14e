"""Programs lowered for CUDA on a machine without a GPU: which kernels they call."""

import re
import zlib

import jax
from jax.extend.mlir import ir

from hpcjax.kernels._triton.launch import compiling_for

HOPPER = 90


def kernels(function, *arguments):
    """The names of the Triton kernels that `function` calls, compiled for Hopper."""
    with compiling_for(HOPPER):
        traced = jax.jit(function).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    packed = []

    def look(operation):
        given = operation.attributes
        name = str(given["call_target_name"]) if "call_target_name" in given else ""
        if "triton_kernel_call" in name:
            new = "mhlo.backend_config" in given  # jax-triton 0.4
            found = given["mhlo.backend_config"]["opaque"] if new else None
            packed.append(found or given["backend_config"])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(look)
    texts = [
        zlib.decompress(each.value_bytes).decode(errors="replace") for each in packed
    ]
    return [name for text in texts for name in re.findall(r"\.entry (\w+)", text)]
