"""The operators of a post-norm transformer encoder layer with dropout, from its sizes.

Letters of axes: b batch, j queries, k keys, h heads, p features of a head, i width, u
inner width, q the stack of query, key and value. Words of biases and of the norms'
parameters are not counted. The kernels save what normalisation needs in a form of their
own, of as many words as the sum that is read here.

References:
  Ivanov, Dryden, Ben-Nun, Li, Hoefler, Data Movement Is All You Need: A Case Study on
  Optimizing Transformers, MLSys 2021, arXiv 2007.00072.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hpcjax.core import checks
from hpcjax.ir.graph import Dataflow, Kind, Operator, Tensor
from hpcjax.ir.letters import product

# Axes of tensors. A gradient, "d_" and a name, has those of what it is a gradient of.
_NAMES = {
    "phi": "w_out",
    "qphi": "w_qkv",
    "ui": "w_up",
    "iu": "w_down",
    "qphbj": "stacked",
    "phbj": "query mixed",
    "phbk": "key value",
    "hbjk": "scores weights attention_mask dropped",
    "bij": "x out out_biased out_mask out_dropped sum_1 normed down down_biased "
    "down_mask down_dropped sum_2 y d_x_qkv d_normed_up",
    "bju": "up up_biased active up_mask hidden",
}
_AXES = {name: axes for axes, names in _NAMES.items() for name in names.split()}
_MASKS = ("attention_mask", "out_mask", "up_mask", "down_mask")


class _Row(NamedTuple):
    """An operator by the names of its tensors.

    Attributes:
      name: of the operator.
      inputs: names, separated by spaces; "d_" stands before those of gradients.
      outputs: likewise.
      einsum: of a contraction.
      reduced: axes.
      each: operations for each element of the first input; not of contractions.
      kind: likewise.
    """

    name: str
    inputs: str
    outputs: str
    einsum: str = ""
    reduced: str = ""
    each: int = 1
    kind: Kind = "elementwise"


def _norm(name: str, inputs: str, outputs: str, reduced: str, each: int) -> _Row:
    return _Row(name, inputs, outputs, "", reduced, each, "statistical")


# Softmax: scale, largest, subtract, exponential, sum, divide. Its gradient: product,
# sum, subtract, product, scale. LayerNorm: two sums, subtract, square, two products,
# add; gradients of its parameters: normalise (2), product, two sums; of its input:
# normalise (2), product with the scale, two sums with a product, two products and two
# subtractions, a product.
_SOFTMAX = (_norm("softmax", "scores", "weights attention_mask dropped", "k", 7),)
_SOFTMAX_APART = (
    _norm("softmax", "scores", "weights", "k", 6),
    _Row("attention dropout", "weights", "attention_mask dropped"),
)
_D_SOFTMAX = (
    _norm("softmax dX", "d_dropped attention_mask weights", "d_scores", "k", 6),
)
_D_SOFTMAX_APART = (
    _Row("attention dropout dX", "d_dropped attention_mask", "d_weights"),
    _norm("softmax dX", "d_weights weights", "d_scores", "k", 5),
)


def _forward(softmax: tuple[_Row, ...]) -> tuple[_Row, ...]:
    return (
        _Row("QKV", "w_qkv x", "stacked", "qphi,ibj->qphbj"),
        _Row("QKV bias", "stacked", "query key value"),
        _Row("QKT", "key query", "scores", "phbk,phbj->hbjk"),
        *softmax,
        _Row("gamma", "value dropped", "mixed", "phbk,hbjk->phbj"),
        _Row("out", "w_out mixed", "out", "phi,phbj->bij"),
        _Row("out bias", "out", "out_biased"),
        _Row("out dropout", "out_biased", "out_mask out_dropped"),
        _Row("residual 1", "out_dropped x", "sum_1"),
        _norm("norm 1", "sum_1", "normed", "i", 7),
        _Row("lin1", "normed w_up", "up", "bji,ui->bju"),
        _Row("lin1 bias", "up", "up_biased"),
        _Row("ReLU", "up_biased", "active"),
        _Row("lin1 dropout", "active", "up_mask hidden"),
        _Row("lin2", "hidden w_down", "down", "bju,iu->bji"),
        _Row("lin2 bias", "down", "down_biased"),
        _Row("lin2 dropout", "down_biased", "down_mask down_dropped"),
        _Row("residual 2", "down_dropped normed", "sum_2"),
        _norm("norm 2", "sum_2", "y", "i", 7),
    )


def _backward(softmax: tuple[_Row, ...]) -> tuple[_Row, ...]:
    # "d_sum_1" and "d_sum_2" are the parts of the gradient that pass through the norm;
    # "d_x_qkv" and "d_normed_up" those that pass through the branch beside it. ReLU's
    # gradient is read from what was dropped: where that is zero and the value was
    # not, the gradient that arrives is zero too.
    return (
        _norm("norm 2 dW", "d_y sum_2", "", "bj", 5),
        _norm("norm 2 dX", "d_y sum_2", "d_sum_2", "i", 10),
        _Row("lin2 dropout dX", "d_sum_2 down_mask", "d_down"),
        _Row("lin2 dX", "d_down w_down", "d_hidden", "bji,iu->bju"),
        _Row("lin2 dW", "d_down hidden", "d_w_down", "bji,bju->iu"),
        _Row("lin2 dbias", "d_down", "", reduced="bj"),
        _Row("lin1 dropout dX", "d_hidden up_mask", "d_active"),
        _Row("ReLU dX", "d_active hidden", "d_up"),
        _Row("lin1 dbias", "d_up", "", reduced="bj"),
        _Row("lin1 dX", "d_up w_up", "d_normed_up", "bju,ui->bji"),
        _Row("lin1 dW", "d_up normed", "d_w_up", "bju,bji->ui"),
        _Row("residual 2 dX", "d_normed_up d_sum_2", "d_normed"),
        _norm("norm 1 dW", "d_normed sum_1", "", "bj", 5),
        _norm("norm 1 dX", "d_normed sum_1", "d_sum_1", "i", 10),
        _Row("out dropout dX", "d_sum_1 out_mask", "d_out"),
        _Row("out dbias", "d_out", "", reduced="bj"),
        _Row("out dX", "w_out d_out", "d_mixed", "phi,bij->phbj"),
        _Row("out dW", "mixed d_out", "d_w_out", "phbj,bij->phi"),
        _Row("gamma dX1", "value d_mixed", "d_dropped", "phbk,phbj->hbjk"),
        _Row("gamma dX2", "d_mixed dropped", "d_value", "phbj,hbjk->phbk"),
        *softmax,
        _Row("QKT dX1", "key d_scores", "d_query", "phbk,hbjk->phbj"),
        _Row("QKT dX2", "query d_scores", "d_key", "phbj,hbjk->phbk"),
        _Row("QKV dX", "w_qkv d_query d_key d_value", "d_x_qkv", "qphi,qphbj->ibj"),
        _Row("QKV dW", "x d_query d_key d_value", "d_w_qkv", "ibj,qphbj->qphi"),
        _Row("QKV dbias", "d_query d_key d_value", "", reduced="bj", each=3),
        _Row("residual 1 dX", "d_x_qkv d_sum_1", "d_x"),
    )


# The paper's fused kernels and what they consist of; kernels of one operator are that
# operator: AIB "QKV bias", BSB "norm 2 dW", BAOB "out dbias", BAIB "QKV dbias", BEI
# "residual 1 dX". What is not there, such as the attention dropout of the list in which
# it is part of the softmax, is left out.
_FUSED = {
    "SM": ("softmax", "attention dropout"),
    "BDRLN 1": ("out bias", "out dropout", "residual 1", "norm 1"),
    "BAD": ("lin1 bias", "ReLU", "lin1 dropout"),
    "BDRLN 2": ("lin2 bias", "lin2 dropout", "residual 2", "norm 2"),
    "BLNRD 2": ("norm 2 dX", "lin2 dropout dX"),
    "BDRLB": ("lin1 dropout dX", "ReLU dX", "lin1 dbias"),
    "EBSB": ("residual 2 dX", "norm 1 dW"),
    "BLNRD 1": ("norm 1 dX", "out dropout dX"),
    "BS": ("attention dropout dX", "softmax dX"),
}

# Tensors that must have the same layout in a chain of equal layers: the input and the
# output of a layer, both with their gradients, and parameters with theirs.
SAME = (
    ("x", "y"),
    ("x", "d_x"),
    ("y", "d_y"),
    ("w_qkv", "d_w_qkv"),
    ("w_out", "d_w_out"),
    ("w_up", "d_w_up"),
    ("w_down", "d_w_down"),
)


def encoder_sizes(
    *, batch: int = 8, length: int = 512, heads: int = 16, width: int = 1024
) -> dict[str, int]:
    """Returns the sizes of all axes; the defaults are BERT-large's.

    Args:
      batch: sequences.
      length: tokens of each.
      heads: of the attention; divides the width.
      width: features of a token; the feed-forward part has four times as many.

    Raises:
      ConfigError: a size below 1, or heads that do not divide the width.

    Examples:
      >>> encoder_sizes(batch=2)["b"], encoder_sizes()["p"]
      (2, 64)
    """
    checks.require_count(1, batch=batch, length=length, heads=heads, width=width)
    checks.require(
        width % heads == 0, "heads must divide width", heads=heads, width=width
    )
    tokens = {"b": batch, "j": length, "k": length}
    features = {"h": heads, "p": width // heads, "i": width, "u": 4 * width, "q": 3}
    return tokens | features


def encoder_layer(
    sizes: Mapping[str, int], *, backward: bool = True, softmax_apart: bool = False
) -> Dataflow:
    """Returns the unfused operators of an encoder layer.

    Args:
      sizes: of the axes, see `encoder_sizes`.
      backward: whether the gradients of all inputs and parameters are there too; if
        not, what they read is an output.
      softmax_apart: whether the softmax and the dropout behind it are two operators.

    Examples:
      >>> layer = encoder_layer(encoder_sizes(), backward=False)
      >>> layer.moved("lin1").words // 2**20, layer.total().words // 2**20
      (24, 500)
    """
    rows = _forward(_SOFTMAX_APART if softmax_apart else _SOFTMAX)
    later = _backward(_D_SOFTMAX_APART if softmax_apart else _D_SOFTMAX)
    made = {name for row in rows for name in row.outputs.split()}
    read = {name for row in later for name in row.inputs.split()}
    outputs = {"y"} | (made & read)
    if backward:
        # Layers above and the loss make a gradient of the output.
        rows += (_Row("layers above", "y", "d_y", kind="outside"), *later)
        outputs = {"y", "d_x", "d_w_qkv", "d_w_out", "d_w_up", "d_w_down"}
    names = {name for row in rows for name in (row.inputs + " " + row.outputs).split()}
    tensors = {name: _tensor(name, sizes) for name in sorted(names)}
    return Dataflow(
        operators=tuple(_operator(row, tensors, sizes) for row in rows),
        tensors=tensors,
        outputs=frozenset(outputs),
    )


def fused_kernels(layer: Dataflow) -> dict[str, tuple[str, ...]]:
    """Returns which operators of an encoder layer each of the paper's kernels has.

    Examples:
      >>> layer = encoder_layer(encoder_sizes(), backward=False)
      >>> fused_kernels(layer)["BAD"]
      ('lin1 bias', 'ReLU', 'lin1 dropout')
    """
    there = {each.name for each in layer.operators}
    groups = {
        name: tuple(member for member in members if member in there)
        for name, members in _FUSED.items()
    }
    return {name: members for name, members in groups.items() if members}


def _tensor(name: str, sizes: Mapping[str, int]) -> Tensor:
    axes = _AXES.get(name) or _AXES[name.removeprefix("d_")]
    return Tensor(tuple(sizes[axis] for axis in axes), axes, mask=name in _MASKS)


def _operator(
    row: _Row, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> Operator:
    inputs, outputs = tuple(row.inputs.split()), tuple(row.outputs.split())
    if row.einsum:
        space = tuple(sorted(set(row.einsum) - set(",->")))
        flops = 2 * product(space, sizes)
        return Operator(
            row.name, "contraction", inputs, outputs, flops, space, (), row.einsum
        )
    space = tuple(sorted(tensors[inputs[0]].axes))
    flops = 0 if row.kind == "outside" else row.each * product(space, sizes)
    return Operator(
        row.name, row.kind, inputs, outputs, flops, space, tuple(sorted(row.reduced))
    )
