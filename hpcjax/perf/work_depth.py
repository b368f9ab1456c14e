"""Work and depth of a program, counted from its operators; nothing is compiled."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hpcjax import ir
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

log = logging.getLogger(__name__)

# What only renames elements, or is part of what reads it: no work, no step.
_FREE = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "copy", "iota", "reshape"),
        *("slice", "squeeze", "transpose", "rev", "split", "stop_gradient"),
    }
)
# Operators whose work is not that of their outputs.
_UNKNOWN = frozenset(
    {
        *("cholesky", "eig", "eigh", "fft", "householder_product", "lu", "qr", "svd"),
        *("schur", "triangular_solve", "tridiagonal_solve", "custom_call", "ffi_call"),
        *("reduce_window", "reduce_window_sum", "reduce_window_max"),
    }
)


class Cost(NamedTuple):
    """Operations of a program, and of its longest chain.

    Attributes:
      work: operations of all.
      depth: steps with as many processors as can be used.
      by_operator: work by primitive.
    """

    work: int
    depth: int
    by_operator: Mapping[str, int]


def work_depth(
    function: Callable[..., Any], *shapes: Any, degree: int | None = None
) -> Cost:
    """Returns the work and depth of a function in the work-depth model.

    Work is floating-point operations, two for a multiplication with its addition, and
    elements moved by gathers, scatters, sorts and copies. Depth is the longest chain
    of operators: ⌈log₂ r⌉ steps for a sum, product or sort over r, ⌈log₂ degree⌉
    for sums over segments, and 1 for others. The body of a scan counts as often as it
    runs, of a branch the dearest counts. What only renames elements is free.

    Args:
      function: of arrays; of gradients too.
      *shapes: arrays, or their shapes and dtypes.
      degree: the most entries that a scatter adds at one place, such as the largest
        degree of a graph; no shape tells it.

    Raises:
      ConfigError: a function that scatters, without a `degree`.
      UnsupportedOp: a loop whose length depends on values.

    References:
      Besta and Hoefler, Parallel and Distributed Graph Neural Networks, 2022, on the
      work and depth of networks; Blelloch, Programming Parallel Algorithms, 1996.

    Examples:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
      >>> cost = work_depth(lambda x: jax.nn.relu(x @ x.T), x)
      >>> cost.work, cost.depth, dict(cost.by_operator)
      (2112, 5, {'dot_general': 2048, 'max': 64})
    """
    if degree is not None:
        checks.require_count(1, degree=degree)
    flow = ir.dataflow(function, *shapes)
    work: Counter[str] = Counter()
    finish: dict[str, int] = {}
    for each in flow.operators:
        name = each.name.rpartition(" ")[0]
        work[name] += each.times * _work(name, each, flow.tensors)
        begins = max((finish.get(tensor, 0) for tensor in each.inputs), default=0)
        ends = begins + each.times * _depth(name, each, flow.tensors, degree)
        finish |= dict.fromkeys(each.outputs, ends)
    if unknown := sorted(_UNKNOWN & work.keys()):
        log.warning("work of %s is counted as their outputs", ", ".join(unknown))
    deepest = max((finish.get(tensor, 0) for tensor in flow.outputs), default=0)
    return Cost(work.total(), deepest, {n: w for n, w in work.items() if w})


def _work(name: str, own: ir.Operator, tensors: Mapping[str, ir.Tensor]) -> int:
    """Returns operations of one execution."""
    if name in _FREE or own.kind == "view":
        return 0
    if name.startswith("scatter"):
        # Of what is added: its outputs are as large as where it is added to.
        return tensors[own.inputs[-1]].words
    if name == "select_n":
        return math.prod(own.space)  # of one element each, as of other maps
    if name == "sort":
        return sum(tensors[each].words for each in own.inputs)
    counted = own.kind in ("contraction", "elementwise")
    # Of a reduction or a copy what it goes through, a slice that is replaced included.
    return own.flops if counted else math.prod(own.space)


def _depth(
    name: str, own: ir.Operator, tensors: Mapping[str, ir.Tensor], degree: int | None
) -> int:
    """Returns steps of one execution."""
    if name in _FREE or own.kind == "view":
        return 0
    if name.startswith("scatter") or name == "bcoo_dot_general":
        if degree is None:
            raise ConfigError(
                f"the depth of {name!r} needs degree=, the most entries that it adds "
                "at one place, such as the largest degree of a graph: got None"
            )
        return _log2(degree) + (own.kind == "contraction")
    if own.kind == "contraction":
        return _log2(own.flops // max(2 * tensors[own.outputs[0]].words, 1))
    if name == "top_k":
        return _log2(own.space[-1])
    if own.reduced:
        return _log2(math.prod(own.space[axis] for axis in own.reduced))
    return 1


def _log2(count: int) -> int:
    """Returns ⌈log₂⌉, the height of a binary tree of so many leaves."""
    return max(count - 1, 0).bit_length()
