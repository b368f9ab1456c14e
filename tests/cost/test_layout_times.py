"""Rooflines of an encoder layer in all layouts, and the selection with them."""

import dataclasses

import pytest

from hpcjax import cost, ir
from hpcjax.core.errors import ConfigError

DEVICE = cost.Roofline(
    matrix_flops=1e12, vector_flops=1e11, bytes_per_s=1e9, launch_s=0.0,
    transposed=0.5, strided=0.25,
)  # fmt: skip
SIZES = ir.encoder_sizes(batch=2, length=3, heads=2, width=4)


def fused(sizes):
    layer = ir.encoder_layer(sizes)
    return ir.fuse(layer, ir.fused_kernels(layer))


def test_a_roofline_is_the_larger_of_both_times():
    assert DEVICE.seconds(2e12, 1e9, matrix=True) == 2.0
    assert DEVICE.seconds(2e12, 1e9, matrix=False) == 20.0
    assert DEVICE.seconds(1e3, 3e9, matrix=True) == 3.0


def test_a_strided_tensor_is_moved_at_a_share_of_the_bandwidth():
    times = cost.layout_times(fused(SIZES), DEVICE)
    rows = {(r.layouts["up"], r.layouts["hidden"]): r.seconds for r in times["BAD"]}
    # [b, j, u] has 2 · 3 · 16 words of 2 bytes; one is read, hidden and mask written.
    assert rows["bju", "bju"] == pytest.approx(3 * 96 * 2 / 1e9)
    assert rows["bju", "ubj"] == pytest.approx((4 + 2) * 96 * 2 / 1e9)
    assert set(rows) == {
        (a, b)
        for a in ("bju", "jbu", "ubj", "ujb")
        for b in ("bju", "jbu", "ubj", "ujb")
    }


def test_the_stack_is_read_in_one_order():
    times = cost.layout_times(fused(SIZES), DEVICE)
    for row in times["QKV dX"]:
        # Queries and keys lie in the stack in one order, with letters of their own.
        key = row.layouts["d_key"]
        assert key.replace("k", "j") == row.layouts["d_query"]
        assert row.layouts["w_qkv"].startswith("q")


def test_transposed_operands_slow_products_down():
    device = dataclasses.replace(DEVICE, bytes_per_s=1e18)
    times = cost.layout_times(fused(SIZES), device)
    seconds = {row.name: row.seconds for row in times["lin1"]}
    assert seconds["TT"] == pytest.approx(4 * seconds["NN"])


def test_a_tensor_that_no_contraction_has_is_named():
    layer = ir.encoder_layer(SIZES, backward=False)
    alone = ir.Dataflow(
        operators=tuple(o for o in layer.operators if o.name == "ReLU"),
        tensors=layer.tensors,
        outputs=layer.outputs,
    )
    with pytest.raises(ConfigError, match="axes of 'up_biased', 'bju'"):
        cost.layout_times(alone, DEVICE)


@pytest.mark.slow
@pytest.mark.acceptance("data-movement", 5)
def test_the_whole_encoder_is_selected_with_a_proof():
    flow = fused(ir.encoder_sizes())
    times = cost.layout_times(flow, cost.Roofline())
    # The suite ends a test after the specification's five minutes.
    best = ir.select_layouts(times, ir.SAME)
    assert best.gap <= 1e-9
    assert best.fastest <= best.seconds <= 1.05 * best.fastest
    for one, other in ir.SAME:
        assert best.layouts[one] == best.layouts[other]
    for name, chosen in best.configurations.items():
        assert chosen in times[name]
        assert chosen.layouts.items() <= best.layouts.items()
