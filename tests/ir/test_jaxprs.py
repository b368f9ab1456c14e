"""Graphs of JAX functions: what is counted, what is inlined."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse

from hpcjax import ir
from hpcjax.core.errors import UnsupportedOp

X = jax.ShapeDtypeStruct((4, 8), "float32")
W = jax.ShapeDtypeStruct((8, 8), "float32")


def kinds(flow):
    return [(o.name.split()[0], o.kind, o.times) for o in flow.operators]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def of(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


WRAPPERS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "custom_vjp": lambda f: lambda x, w: doubled(f(x, w)) / 2,
}


def test_a_graph_lists_the_operators_that_it_was_read_from():
    def fn(x, w):
        return jax.lax.scan(lambda c, v: (jax.jit(jnp.sin)(c @ w), v), x, w)

    assert ir.from_jax(fn, X, W).dataflow() == ir.dataflow(fn, X, W)


@pytest.mark.parametrize("name", WRAPPERS)
def test_calls_are_inlined(name):
    flow = ir.dataflow(WRAPPERS[name](lambda x, w: jax.nn.relu(x @ w)), X, W)
    assert flow.by_kind()["contraction"] == (2 * 4 * 8 * 8, 32 + 64, 32)
    assert [o.name.split()[0] for o in flow.operators][:2] == ["dot_general", "max"]


def test_a_scan_counts_its_body_by_its_length():
    def fn(x, w):
        return jax.lax.scan(lambda c, v: (c @ w, c * v), x, jnp.arange(3.0))

    flow = ir.dataflow(fn, X, W)
    assert flow.by_kind()["contraction"] == (3 * 2 * 4 * 64, 3 * (32 + 64), 3 * 32)
    # Only the stack is returned: it depends on what is carried.
    stacked = ir.dataflow(lambda x, w: fn(x, w)[1], X, W)
    assert stacked.by_kind()["contraction"] == flow.by_kind()["contraction"]


def test_nested_scans_multiply():
    def inner(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0]

    def fn(x, w):
        return jax.lax.scan(lambda c, _: (inner(c, w), None), x, None, length=5)[0]

    (product,) = [o for o in ir.dataflow(fn, X, W).operators if o.kind == "contraction"]
    assert product.times == 10


def test_gradients_have_two_products_for_each():
    def fn(x, w):
        y, pull = jax.vjp(lambda x, w: jnp.tanh(x @ w), x, w)
        return pull(y)

    flow = ir.dataflow(fn, X, W)
    assert flow.by_kind()["contraction"].flops == 3 * 2 * 4 * 8 * 8


def test_classes_of_primitives():
    def fn(x):
        return (x - x.sum(axis=1, keepdims=True)).T

    flow = ir.dataflow(fn, X)
    assert kinds(flow) == [
        ("reduce_sum", "statistical", 1),
        ("sub", "elementwise", 1),
        ("transpose", "movement", 1),
    ]
    assert flow.moved(flow.operators[0].name) == (32, 32, 4)
    assert flow.moved(flow.operators[1].name) == (32, 32 + 4, 32)


def test_a_reduction_and_what_is_mapped_by_it_are_one_kernel():
    flow = ir.dataflow(jax.nn.softmax, X)
    (group,) = ir.fusion_groups(flow)
    assert {o.kind for o in flow.operators} == {"statistical", "elementwise"}
    fused = ir.fuse(flow, {"softmax": group})
    assert fused.total().words < flow.total().words


def test_what_no_result_needs_is_left_out():
    def fn(x):
        return jnp.exp(x), jnp.sin(x)

    names = [o.name for o in ir.dataflow(lambda x: fn(x)[1], X).operators]
    assert [name.split()[0] for name in names] == ["sin"]


def test_an_einsum_is_told_of_products():
    flow = ir.dataflow(functools.partial(jnp.einsum, "bij,bkj->bik"), *[BATCHED] * 2)
    (product,) = [o for o in flow.operators if o.kind == "contraction"]
    assert ir.gemm_layouts(product.einsum, dict.fromkeys("abcd", 4))
    assert product.flops == 2 * 2 * 3 * 3 * 4


BATCHED = jax.ShapeDtypeStruct((2, 3, 4), "float32")


def test_a_tensor_that_is_read_twice_is_moved_once():
    flow = ir.dataflow(lambda x: x * x, jnp.ones((4, 5)))
    (one,) = flow.operators
    moved = flow.moved(one.name)
    assert (moved.flops, moved.read, moved.written) == (20, 20, 20)


def test_a_convolution_counts_two_operations_a_tap():
    image = jax.ShapeDtypeStruct((1, 8, 8, 6), "float32")
    kernel = jax.ShapeDtypeStruct((3, 3, 2, 9), "float32")

    def fn(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )  # fmt: skip

    (product,) = ir.dataflow(fn, image, kernel).operators
    assert product.flops == 2 * (8 * 8 * 9) * (3 * 3 * 2)


def test_of_branches_the_dearest_is_read():
    def fn(x, w):
        chosen = x.sum() > 0
        return jax.lax.cond(chosen, lambda x: x @ w + 1, lambda x: x, x)

    flow = ir.dataflow(fn, of(4, 4), of(4, 4))
    names = [each.name.split()[0] for each in flow.operators]
    assert "dot_general" in names
    # What is taken depends on the choice.
    assert {"reduce_sum", "gt"} <= {*names}
    nested = ir.dataflow(
        lambda x, w: jax.lax.scan(lambda x, _: (fn(x, w), None), x, None, 5)[0],
        of(4, 4),
        of(4, 4),
    )
    products = [each for each in nested.operators if each.einsum]
    assert [(each.times, each.flops) for each in products] == [(5, 128)]


def test_of_branches_that_gather_or_scatter_their_elements_count():
    def dearest(*branches):
        def fn(x, places):
            return jax.lax.cond(x[0, 0] > 0, *branches, x, places)

        places = jax.ShapeDtypeStruct((7,), "int32")
        flow = ir.dataflow(fn, of(50, 5), places)
        return {each.name.split()[0] for each in flow.operators} - {"slice", "gt"}

    def take(x, places):  # 35 elements, whose places are 14 operations
        return x[places]

    def chain(x, _):  # 20 operations
        return jnp.broadcast_to(jnp.sin(jnp.sin(jnp.sin(jnp.sin(x[0])))), (7, 5))

    def add(x, _):  # 2 elements of 50 rows
        return x.at[0, :2].add(x[0, 0])[:7]

    assert "gather" in dearest(chain, take)
    assert "sin" in dearest(add, chain)


def test_products_of_sparse_matrices_are_of_their_entries():
    def fn(entries, places, x):
        return sparse.BCOO((entries, places), shape=(9, 7)) @ x

    places = jax.ShapeDtypeStruct((20, 2), "int32")
    for width in ((5,), ()):
        flow = ir.dataflow(fn, of(20), places, of(7, *width))
        own = next(e for e in flow.operators if e.name.startswith("bcoo"))
        assert (own.kind, own.flops) == ("contraction", 2 * 20 * (5 if width else 1))


def test_loops_of_unknown_length_are_refused():
    def fn(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    with pytest.raises(UnsupportedOp, match="'while' is not known before it runs"):
        ir.dataflow(fn, X)
