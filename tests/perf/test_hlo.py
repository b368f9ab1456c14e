"""Counters: exact formulas for programs whose communication is known."""

import logging
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from hpcjax.core.errors import UnsupportedOp
from hpcjax.perf import hlo

N = 8
SPLIT, WHOLE = PartitionSpec("d"), PartitionSpec()


def compiled(function, *arguments):
    """Compiles `function` of one device's part of each argument, on eight devices."""
    mesh = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False
    )
    return jax.jit(mapped).lower(*arguments).compile()


def rows(dtype="float32", shape=(64, 16)):
    return jax.ShapeDtypeStruct(shape, dtype)


def one(program):
    (collective,) = hlo.collectives(program)
    return collective


FORMULAS = {  # of the bytes s of one device's part
    "all-reduce": (lambda x: lax.psum(x, "d"), lambda s: s),
    "all-gather": (lambda x: lax.all_gather(x, "d"), lambda s: s),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "d", tiled=True), lambda s: s),
    "all-to-all": (lambda x: lax.all_to_all(x, "d", 0, 0), lambda s: s),
    "collective-permute": (
        lambda x: lax.ppermute(x, "d", [(i, (i + 1) % N) for i in range(N)]),
        lambda s: s,
    ),
}


@pytest.mark.faults(27)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "uint16", "complex64"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_bytes_equal_the_formula(kind, dtype):
    function, formula = FORMULAS[kind]
    size = 8 * 16 * jnp.dtype(dtype).itemsize
    program = compiled(function, rows(dtype))
    assert hlo.bytes_by_kind(program) == {kind: formula(size)}
    assert hlo.collective_bytes(program) == formula(size)
    assert hlo.collective_bytes(program, kind) == formula(size)
    assert hlo.count_ops(program, kind) == 1
    assert one(program).bounded


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_bfloat16_is_counted_as_it_runs_on_the_cpu(kind):
    program = compiled(FORMULAS[kind][0], rows("bfloat16"))
    assert hlo.collective_bytes(program) == 8 * 16 * 4


def test_a_permute_reports_its_pairs():
    pairs = [(0, 1), (2, 5), (6, 7)]
    program = compiled(lambda x: lax.ppermute(x, "d", pairs), rows())
    assert one(program).pairs == 3
    assert one(program).pair_bytes == 3 * 8 * 16 * 4


def test_merged_and_nested_groups_add_up():
    def function(x):
        summed = lax.psum((x, x.sum(), x[0]), "d")
        return x + summed[0] + summed[1] + summed[2]

    program = compiled(function, rows())
    assert hlo.bytes_by_kind(program) == {"all-reduce": 4 * (8 * 16 + 1 + 16)}


def test_loops_multiply():
    def inner(x, _):
        return lax.psum(x, "d") * 0.1, lax.all_gather(x[0], "d").sum()

    def outer(x, _):
        return lax.ppermute(lax.scan(inner, x, None, length=5)[0], "d", [(0, 1)]), None

    program = compiled(lambda x: lax.scan(outer, x, None, length=3)[0], rows())
    assert hlo.bytes_by_kind(program)["all-reduce"] == 15 * 8 * 16 * 4
    assert hlo.bytes_by_kind(program)["collective-permute"] == 3 * 8 * 16 * 4
    assert all(collective.bounded for collective in hlo.collectives(program))


def test_loops_of_unknown_length_are_flagged(caplog):
    def function(x):
        return lax.while_loop(
            lambda c: c.sum() < 1e3, lambda c: c + lax.psum(c, "d"), x
        )

    program = compiled(function, rows())
    assert not one(program).bounded
    with caplog.at_level(logging.WARNING):
        assert hlo.collective_bytes(program) == 8 * 16 * 4
    assert "unknown length" in caplog.text


def test_of_a_conditional_the_largest_branch_counts():
    def function(x):
        large = lambda x: lax.psum(x, "d")  # noqa: E731
        small = lambda x: x + lax.psum(x.sum(), "d")  # noqa: E731
        return lax.cond(x[0, 0] > 0, large, small, x)

    assert hlo.collective_bytes(compiled(function, rows())) == 8 * 16 * 4


def test_an_all_reduce_of_a_gradient_is_the_parameters_size():
    def gradient(x):
        weights = {"w": jnp.ones((16, 3)), "b": jnp.zeros(3)}
        loss = lambda p: jnp.tanh(x @ p["w"] + p["b"]).sum()  # noqa: E731
        summed = lax.psum(jax.grad(loss)(weights), "d")
        return summed["w"].sum() + summed["b"].sum() + x

    assert hlo.collective_bytes(compiled(gradient, rows())) == 4 * (16 * 3 + 3)


ASYNCHRONOUS = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%wrapped (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add
}

%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], /*index=1*/f32[64]{0:T(128)}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[64]{0} get-tuple-element(%s), index=1
  %ag = (f32[64]{0}, f32[512]{0}) all-gather-start(%x), dimensions={0}
  %gathered = f32[512]{0} all-gather-done(%ag)
  ROOT %out = (s32[], f32[64]{0}) tuple(%i, %x)
}

%condition (s.1: (s32[], f32[64])) -> pred[] {
  %s.1 = (s32[], f32[64]{0}) parameter(0)
  ROOT %less = pred[] constant(false)
}

ENTRY %main (x: f32[64], y: bf16[4,4]) -> f32[64] {
  %x.1 = f32[64]{0} parameter(0), metadata={op_name="jit(f)/all-reduce(x)"}
  %y = bf16[4,4]{1,0} parameter(1)
  %start = (f32[64]{0}, bf16[4,4]{1,0}) all-reduce-start(f32[64]{0} %x.1, %y), \
replica_groups=[1,8]<=[8], to_apply=%add
  %done = (f32[64]{0}, bf16[4,4]{1,0}) all-reduce-done(%start)
  %rs-start = ((f32[64]{0}), f32[8]{0}) async-start(%x.1), calls=%wrapped
  %rs-done = f32[8]{0} async-done(%rs-start)
  %permute-start = (f32[64]{0}, f32[64]{0}) collective-permute-start(%x.1), \
channel_id=4, source_target_pairs={{0,1},{1,0}}
  %permute-done = f32[64]{0} collective-permute-done(%permute-start)
  %zero = s32[] constant(0)
  %t = (s32[], f32[64]{0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"7"},"other":"{}"}
  ROOT %result = f32[64]{0} get-tuple-element(%loop), index=1
}
"""


def test_asynchronous_pairs_count_once():
    found = hlo.collectives_of_text(ASYNCHRONOUS)
    assert [(c.kind, c.bytes, c.times, c.pairs) for c in found] == [
        ("all-reduce", 64 * 4 + 16 * 2, 1, 0),
        ("reduce-scatter", 64 * 4, 1, 0),
        ("collective-permute", 64 * 4, 1, 2),
        ("all-gather", 64 * 4, 7, 0),
    ]


def test_text_without_a_program_is_refused():
    with pytest.raises(UnsupportedOp, match="entry"):
        hlo.parse("HloModule empty")
    with pytest.raises(UnsupportedOp, match="'mystery'"):
        hlo.type_bytes("mystery[3]")


BITS = {
    "f32": 32,
    "pred": 8,
    "s4": 4,
    "u64": 64,
    "c128": 128,
    "f8e4m3fn": 8,
    "f4e2m1fn": 4,
    "bf16": 16,
    "token": 0,
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(BITS.items())),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        min_size=1,
    )
)
def test_type_bytes(parts):
    texts = [f"{name}[{','.join(map(str, shape))}]" for (name, _), shape in parts]
    wanted = sum(math.ceil(math.prod(shape) * bits / 8) for (_, bits), shape in parts)
    assert hlo.type_bytes("(" + ", ".join(texts) + ")") == wanted
    assert hlo.type_bytes(texts[0] + "{0:T(8,128)(2,1)}") == hlo.type_bytes(texts[0])


def test_unknown_kinds_are_refused():
    program = jax.jit(lambda x: x).lower(1.0).compile()
    with pytest.raises(ValueError, match="did you mean 'all-reduce'"):
        hlo.collective_bytes(program, "allreduce")


def test_flops_of_products_and_that_loops_count_once():
    matrix = rows(shape=(32, 32))
    single = jax.jit(jnp.dot).lower(matrix, matrix).compile()
    assert hlo.flops(single) == 2 * 32**3

    def repeated(a):
        return lax.scan(lambda c, _: (c @ a, None), a, None, length=10)[0]

    loop = jax.jit(repeated).lower(matrix).compile()
    assert 2 * 32**3 <= hlo.flops(loop) < 3 * 32**3


def test_peak_memory_counts_donated_arguments_once():
    x = rows(shape=(1024, 256))
    size = 1024 * 256 * 4
    kept = jax.jit(lambda x: x + 1).lower(x).compile()
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    assert hlo.peak_memory(kept) == 2 * size
    assert hlo.peak_memory(donated) == size


def test_count_ops():
    x = rows(shape=(32, 32))
    program = jax.jit(lambda a: jnp.sin(a @ a) @ a).lower(x).compile()
    assert hlo.count_ops(program, "parameter") >= 1
    assert hlo.count_ops(program, "sine") == 1
    assert hlo.count_ops(program, "all-reduce") == 0
