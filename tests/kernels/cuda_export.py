"""Lowering for an H200 on a machine without one."""

import re

import jax
from jax.sharding import AbstractDevice, AbstractMesh

TRITON = "__gpu$xla.gpu.triton"


def lowered(function, *arguments):
    """The program of `function` for CUDA as text, its Triton kernels inside."""
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    allowed = jax.export.DisabledSafetyCheck.custom_call(TRITON)
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), abstract_device=device)
    ):
        exported = jax.export.export(
            jax.jit(function), platforms=["cuda"], disabled_checks=[allowed]
        )(*arguments)
    return exported.mlir_module()


def kernels(text):
    """The names of the Triton kernels that a program calls."""
    calls = [line for line in text.splitlines() if f"@{TRITON}" in line]
    return [name for line in calls for name in re.findall(r'name = "(\w+)"', line)]
