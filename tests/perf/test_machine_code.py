"""Machine code and accesses of kernels of the tests' own."""

import jax
import jax.numpy as jnp
import pytest

from hpcjax import kernels, perf
from hpcjax.core import ConfigError, UnsupportedOp
from hpcjax.kernels._triton import launch
from tests import guides

needs_triton = pytest.mark.skipif(
    launch.find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)


def double(x, *, interpreted=False, block=4):
    plan = kernels.Launch(
        kernel="tests.kernels.kernel:double",
        grid=(-(-len(x) // block), 1, 1),
        outputs=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        constants={"SIZE": len(x), "BLOCK": block},
    )
    return kernels.run(plan, x, interpreted=interpreted)[0]


@needs_triton
def test_every_call_is_compiled_and_nothing_of_a_kernel_is_invented():
    x = jax.ShapeDtypeStruct((4000,), "float32")
    small, large = perf.machine_code(
        lambda x: double(double(x, block=128), block=1024), x
    )
    assert small.kernel == large.kernel == "double"
    assert small.constants == {"SIZE": 4000, "BLOCK": 128}
    assert small.threads == 128
    assert small.spilled == small.shared == 0
    assert (small.tensor_core_products, small.inner_loops) == ((), ())
    # One number a thread, or eight by two loads of four.
    assert small.instructions.count("LDG.E") == 1
    assert large.instructions.count("LDG.E.128") == 2
    assert "FADD" in small.instructions
    assert small.instructions[-1] == "NOP"


@needs_triton
def test_elements_under_a_mask_are_not_counted():
    x = jnp.ones(7)
    (found,) = perf.count_accesses(lambda x: double(x, interpreted=True), x)
    assert found.kernel == "double"
    assert found.sizes == {"x": 7, "y": 7}
    assert found.loaded == {"x": 7, "y": 0}
    assert found.stored == {"x": 0, "y": 7}
    twice = perf.count_accesses(
        lambda x: double(double(x, interpreted=True), interpreted=True), x
    )
    assert len(twice) == 2
    # What nobody counts is counted nowhere.
    double(x, interpreted=True)
    assert len(twice) == 2


@needs_triton
def test_a_loop_is_that_which_holds_no_other():
    text = "\n".join(
        [
            ".L_x_0:",
            "/*0000*/ MOV R1, c[0x0][0x28] ;",
            ".L_x_1:",
            "/*0010*/ FADD R2, R2, R3 ;",
            "/*0020*/ @!P0 BRA `(.L_x_1) ;",
            "/*0030*/ @P1 BRA `(.L_x_0) ;",
            ".L_x_2:",
            "/*0040*/ BRA `(.L_x_2);",
        ]
    )
    code = perf.MachineCode("k", {}, 32, 1, 0, 0, "", text)
    assert code.instructions == ("MOV", "FADD", "BRA", "BRA", "BRA")
    assert code.inner_loops == (("FADD", "BRA"),)


@needs_triton
def test_what_was_looked_at_can_still_be_called():
    matrix = kernels.quantized_matrix(
        jnp.ones((32, 32), jnp.uint8), jnp.ones((1, 32)), jnp.ones((1, 32)), bits=4
    )
    product = jax.jit(kernels.quantized_matmul)
    for _ in range(2):
        (found,) = perf.machine_code(product, jnp.ones((1, 32)), matrix)
        assert found.kernel == "one_row"
        assert product(jnp.ones((1, 32)), matrix).tolist() == [[0.0] * 32]


@needs_triton
def test_the_guides_code_runs():
    words = jax.random.bits(jax.random.key(0), (32, 256), "uint32")
    matrix = kernels.QuantizedMatrix(
        words=words,
        scale=jnp.ones((2, 256), "float16"),
        zero=jnp.ones((2, 256), "float16"),
        bits=4,
        inputs=256,
        group_size=128,
    )
    (block,) = guides.blocks("docs/gpu.md")
    names = {"x": jnp.ones((1, 256), "bfloat16"), "matrix": matrix}
    guides.run_block(block, "docs/gpu.md", names)
    assert names["code"].instructions.count("HFMA2") > 0
    assert names["accesses"].loaded["words"] == words.size


@needs_triton
def test_a_function_without_a_kernel_is_refused():
    with pytest.raises(ConfigError, match="calls no Triton kernel"):
        perf.machine_code(jnp.sin, jnp.ones(3))
    with pytest.raises(ConfigError, match="calls no interpreted kernel"):
        perf.count_accesses(jnp.sin, jnp.ones(3))
    with pytest.raises(UnsupportedOp, match=r"operands are int8.*got bool"):
        perf.machine_code(double, jnp.ones(3, bool))


def test_a_missing_package_is_named(monkeypatch):
    def is_missing(package):
        return f"{package} does not load"

    monkeypatch.setattr(launch, "_find_missing", is_missing)
    with pytest.raises(UnsupportedOp, match="machine code of kernels: triton does"):
        perf.machine_code(double, jnp.ones(3))
    with pytest.raises(UnsupportedOp, match="accesses of kernels: triton does not"):
        perf.count_accesses(double, jnp.ones(3))
