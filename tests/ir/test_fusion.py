"""Fusion: the paper's kernels are found, and what would be wrong is refused."""

import pytest

from hpcjax import ir
from hpcjax.core.errors import ConfigError
from hpcjax.ir import Dataflow, Operator, Tensor

LAYER = ir.encoder_layer(ir.encoder_sizes(batch=1, length=2, heads=1, width=2))


def program(*rows, outputs=(), other=()):
    """A program of elementwise operators on vectors: (name, inputs, outputs)."""
    operators = tuple(
        Operator(name, "elementwise", tuple(read), tuple(written), 1, (8,))
        for name, read, written in rows
    )
    names = {t for o in operators for t in (*o.inputs, *o.outputs)}
    tensors = {name: Tensor((8,)) for name in names}
    return Dataflow(operators=operators, tensors=tensors, outputs=frozenset(outputs))


@pytest.mark.parametrize("apart", [False, True])
def test_pairs_grow_to_the_papers_kernels(apart):
    sizes = ir.encoder_sizes()
    layer = ir.encoder_layer(sizes, softmax_apart=apart)
    kernels = ir.fused_kernels(layer).values()
    assert set(ir.fusion_groups(layer)) == {own for own in kernels if len(own) > 1}


def test_what_only_the_kernel_reads_is_dropped():
    flow = program(("f", "a", "b"), ("g", "b", "c"), outputs="c")
    fused = ir.fuse(flow, {"fg": ("f", "g")})
    assert [(o.name, o.inputs, o.outputs) for o in fused.operators] == [
        ("fg", ("a",), ("c",))
    ]
    assert (ir.movement(flow), ir.movement(fused)) == (32, 16)


@pytest.mark.parametrize("outputs", ["bcd", "cd"])
def test_what_others_read_or_the_program_returns_is_written(outputs):
    rows = [("f", "a", "b"), ("g", "b", "c")]
    if outputs == "cd":
        rows.append(("h", "bc", "d"))
    flow = program(*rows, outputs=outputs)
    fused = ir.fuse(flow, {"fg": ("f", "g")})
    assert set(fused.operator("fg").outputs) == {"b", "c"}


def test_siblings_read_their_input_once():
    flow = program(("f", "a", "b"), ("g", "a", "c"), outputs="bc")
    (found,) = ir.fusion_candidates(flow)
    assert found == ("f", "g", "sibling", 8)


def test_a_second_path_is_refused():
    # f -> h -> g and f -> g.
    flow = program(("f", "a", "b"), ("h", "b", "c"), ("g", "bc", "d"), outputs="d")
    with pytest.raises(ConfigError, match="'h' lies between its operators"):
        ir.fuse(flow, {"fg": ("f", "g")})
    assert ("f", "g") not in [c[:2] for c in ir.fusion_candidates(flow)]
    assert ir.fusion_groups(flow) == [("f", "h", "g")]


def test_two_kernels_that_need_each_other_are_refused():
    # Each pair alone is fine; together each needs what the other writes.
    flow = program(
        ("f", "a", "bx"), ("g", "a", "cy"), ("h", "cx", "d"), ("k", "by", "e"),
        outputs="de",
    )  # fmt: skip
    ir.fuse(flow, {"fh": ("f", "h")})
    ir.fuse(flow, {"gk": ("g", "k")})
    with pytest.raises(ConfigError, match="cannot be one kernel"):
        ir.fuse(flow, {"fh": ("f", "h"), "gk": ("g", "k")})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("QKV", "QKV bias"), "'QKV' is a contraction"),
        (("norm 2 dW", "norm 2 dX"), "reduce along different axes"),
        (("norm 2", "norm 2 dX"), "'layers above' lies between"),
        (("out bias", "norm 2"), "share no tensors"),
        (("QKV dbias", "BEI"), "no operator 'BEI'"),
        (("ReLU", "Relu dX"), "did you mean 'ReLU dX'"),
        (("ReLU", "norm 2"), "another space"),
        (("norm 1 dX", "residual 1 dX"), "'out d.*' lies between"),
    ],
)
def test_what_cannot_be_one_kernel_is_told(group, message):
    with pytest.raises(ConfigError, match=message):
        ir.fuse(LAYER, {"kernel": group})


def test_operators_without_a_common_tensor_are_refused():
    flow = program(("f", "a", "b"), ("g", "c", "d"), outputs="bd")
    with pytest.raises(ConfigError, match="they share no tensors"):
        ir.fuse(flow, {"fg": ("f", "g")})


def test_another_space_is_refused():
    flow = program(("f", "a", "b"), ("g", "b", "c"), outputs="c")
    g = flow.operators[1]._replace(space=(4, 2))
    flow = Dataflow(
        operators=(flow.operators[0], g), tensors=flow.tensors, outputs=flow.outputs
    )
    with pytest.raises(ConfigError, match="another space"):
        ir.fuse(flow, {"fg": ("f", "g")})


def test_an_operator_is_in_one_group():
    with pytest.raises(ConfigError, match="'ReLU' is in 'a' and 'b'"):
        ir.fuse(LAYER, {"a": ("lin1 bias", "ReLU"), "b": ("ReLU", "lin1 dropout")})


def test_operations_are_kept():
    fused = ir.fuse(LAYER, ir.fused_kernels(LAYER))
    assert fused.total().flops == LAYER.total().flops
