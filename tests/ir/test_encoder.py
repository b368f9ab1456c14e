"""Work and words of an encoder layer against the numbers of the paper's sizes."""

import pytest

from experiments.data_movement import layer
from hpcjax import ir
from hpcjax.core.errors import ConfigError

MI, GI = 2**20, 2**30
SIZES = ir.encoder_sizes()
# Gi of operations of contractions, and Mi of words read and written.
FORWARD = {
    "QKV": (24, 7, 12),
    "QKV bias": (0, 12, 12),
    "QKT": (4, 8, 32),
    "softmax": (0, 32, 96),
    "gamma": (4, 36, 4),
    "out": (8, 5, 4),
    "out bias": (0, 4, 4),
    "out dropout": (0, 4, 8),
    "residual 1": (0, 8, 4),
    "norm 1": (0, 4, 4),
    "lin1": (32, 8, 16),
    "lin1 bias": (0, 16, 16),
    "ReLU": (0, 16, 16),
    "lin1 dropout": (0, 16, 32),
    "lin2": (32, 20, 4),
    "lin2 bias": (0, 4, 4),
    "lin2 dropout": (0, 4, 8),
    "residual 2": (0, 8, 4),
    "norm 2": (0, 4, 4),
}
BACKWARD = {
    "norm 2 dW": (0, 8, 0),
    "norm 2 dX": (0, 8, 4),
    "lin2 dropout dX": (0, 8, 4),
    "lin2 dX": (32, 8, 16),
    "lin2 dW": (32, 20, 4),
    "lin2 dbias": (0, 4, 0),
    "lin1 dropout dX": (0, 32, 16),
    "ReLU dX": (0, 32, 16),
    "lin1 dbias": (0, 16, 0),
    "lin1 dX": (32, 20, 4),
    "lin1 dW": (32, 20, 4),
    "residual 2 dX": (0, 8, 4),
    "norm 1 dW": (0, 8, 0),
    "norm 1 dX": (0, 8, 4),
    "out dropout dX": (0, 8, 4),
    "out dbias": (0, 4, 0),
    "out dX": (8, 5, 4),
    "out dW": (8, 8, 1),
    "gamma dX1": (4, 8, 32),
    "gamma dX2": (4, 36, 4),
    "softmax dX": (0, 96, 32),
    "QKT dX1": (4, 36, 4),
    "QKT dX2": (4, 36, 4),
    "QKV dX": (24, 15, 4),
    "QKV dW": (24, 16, 3),
    "QKV dbias": (0, 12, 0),
    "residual 1 dX": (0, 8, 4),
}
FUSED = {
    "SM": (32, 96),
    "BDRLN 1": (8, 12),
    "BAD": (16, 32),
    "BDRLN 2": (8, 12),
    "BLNRD 2": (12, 8),
    "BDRLB": (48, 16),
    "EBSB": (12, 4),
    "BLNRD 1": (12, 8),
    "BS": (96, 32),
    "QKV bias": (12, 12),
    "norm 2 dW": (8, 0),
    "lin2 dbias": (4, 0),
    "out dbias": (4, 0),
    "QKV dbias": (12, 0),
    "residual 1 dX": (8, 4),
}


def fused(**options):
    flow = ir.encoder_layer(SIZES, **options)
    return ir.fuse(flow, ir.fused_kernels(flow))


@pytest.mark.acceptance("data-movement", 2)
def test_every_row_has_the_papers_operations_and_words():
    flow = ir.encoder_layer(SIZES)
    rows = {}
    for each in flow.operators:
        moved = flow.moved(each.name)
        flops = moved.flops if each.kind == "contraction" else 0
        rows[each.name] = (flops / GI, moved.read / MI, moved.written / MI)
    assert rows.pop("layers above") == (0, 0, 0)
    assert rows == FORWARD | BACKWARD


@pytest.mark.acceptance("data-movement", 2)
def test_every_fused_kernel_has_the_papers_words():
    flow = fused()
    kernels = {
        o.name for o in flow.operators if o.kind in ("statistical", "elementwise")
    }
    assert kernels == set(FUSED)
    for name, (read, written) in FUSED.items():
        moved = flow.moved(name)
        assert (moved.read / MI, moved.written / MI) == (read, written), name


@pytest.mark.acceptance("data-movement", 2, 9)
def test_sums_of_both_passes():
    forward = {"backward": False}
    assert ir.movement(ir.encoder_layer(SIZES, **forward)) == 500 * MI
    assert ir.movement(fused(**forward)) == 396 * MI
    whole = ir.encoder_layer(SIZES)
    assert ir.movement(whole) == 1160 * MI  # 500 + 660
    assert ir.movement(fused()) == 996 * MI  # 396 + 600
    assert ir.movement(fused(), masks="recomputed") == 884 * MI
    contractions = whole.by_kind()["contraction"]
    assert contractions.flops == (104 + 208) * GI
    assert ir.encoder_layer(SIZES, **forward).by_kind()["contraction"].flops == 104 * GI


@pytest.mark.acceptance("data-movement", 9)
def test_softmax_and_dropout_apart_move_more_and_fuse_to_the_same():
    apart = ir.encoder_layer(SIZES, softmax_apart=True)
    assert ir.movement(apart) == (532 + 724) * MI
    assert ir.movement(fused(softmax_apart=True)) == 996 * MI


def test_words_follow_from_sizes():
    small = ir.encoder_sizes(batch=2, length=3, heads=2, width=4)
    flow = ir.encoder_layer(small)
    # [h, b, j, k] four times, from [h, b, j, k].
    assert flow.moved("softmax") == ir.Moved(7 * 36, 36, 3 * 36)
    assert flow.moved("lin1") == ir.Moved(2 * 6 * 4 * 16, 24 + 64, 96)


@pytest.mark.acceptance("data-movement", 9)
def test_the_plain_layers_jaxpr_has_the_same_contractions():
    params = layer.shapes(layer.PARAMETERS, SIZES, "float32")
    masks = layer.shapes(layer.MASKS, SIZES, "float32")
    x = layer.shapes({"x": layer.INPUT}, SIZES, "float32")["x"]
    flow = ir.dataflow(layer.with_gradients, params, x, masks, x)
    listed = ir.encoder_layer(SIZES)
    kinds = flow.by_kind()
    assert kinds["contraction"] == listed.by_kind()["contraction"]
    own = sorted(flow.moved(o.name) for o in flow.operators if o.kind == "contraction")
    want = sorted(
        listed.moved(o.name) for o in listed.operators if o.kind == "contraction"
    )
    assert own == want
    # One primitive is an operator there: more words than in the list, less once fused.
    groups = {"+".join(group): group for group in ir.fusion_groups(flow)}
    rest = flow.total().words - kinds["contraction"].words
    assert ir.movement(ir.fuse(flow, groups)) < ir.movement(flow)
    assert rest > listed.total().words - listed.by_kind()["contraction"].words


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3}, "heads must divide width: got heads=3, width=1024"),
        ({"batch": 0}, "batch must be an integer >= 1"),
    ],
)
def test_sizes_are_checked(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ir.encoder_sizes(**sizes)


def test_mue_is_the_share_of_needed_words_at_the_share_of_bandwidth():
    assert ir.mue(50, 100, 3.0, 4.0) == pytest.approx(100 * 0.5 * 0.75)
    with pytest.raises(ConfigError, match="moved_words"):
        ir.mue(1, 0, 1.0, 1.0)
