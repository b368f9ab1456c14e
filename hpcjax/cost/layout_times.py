"""Times of a program's operators in all layouts of their tensors, by a roofline.

A stand-in for a table of measured times where there is no device to measure on. An
operator that computes f operations and moves s bytes takes max(f / peak, s / bandwidth)
and the time of a launch. What a layout changes is assumed:

- a product of matrices reaches a share of the peak for each operand that it transposes;
- any other kernel has the layout of what it writes, or of its first input if it writes
  nothing, and moves tensors with another innermost axis at a share of the bandwidth.

References:
  Williams, Waterman, Patterson, Roofline, CACM 2009; Ivanov et al., Data Movement Is
  All You Need, MLSys 2021, §6, which measures.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpcjax import ir
from hpcjax.core import checks
from hpcjax.core.config import Config, Fraction, NotNegative, Positive, Size
from hpcjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline(Config):
    """A device; the defaults are a V100's published peaks, the rest is assumed.

    Attributes:
      matrix_flops: operations a second in products of matrices.
      vector_flops: in other kernels.
      bytes_per_s: of its memory.
      launch_s: seconds to launch a kernel.
      itemsize: bytes of a word.
      transposed: share of `matrix_flops` that is left for each transposed operand.
      strided: share of `bytes_per_s` for tensors with another innermost axis.

    Examples:
      >>> Roofline(launch_s=0.0).seconds(1e9, 9e8, matrix=True)
      0.001
    """

    matrix_flops: Positive = 125e12
    vector_flops: Positive = 31.4e12
    bytes_per_s: Positive = 900e9
    launch_s: NotNegative = 3e-6
    itemsize: Size = 2
    transposed: Fraction = 0.95
    strided: Fraction = 0.5

    def seconds(self, flops: float, moved: float, *, matrix: bool) -> float:
        """Returns the time of a kernel.

        Args:
          flops: its operations.
          moved: bytes.
          matrix: whether it is a product of matrices.
        """
        peak = self.matrix_flops if matrix else self.vector_flops
        return max(flops / peak, moved / self.bytes_per_s) + self.launch_s


def layout_times(
    flow: ir.Dataflow, device: Roofline, *, stack: str = "q"
) -> dict[str, list[ir.Configuration]]:
    """Returns the configurations of all operators that count, for `select_layouts`.

    The layouts of a tensor are those in which some contraction of the program can read
    or write one with the same axes. Inputs of a kernel that is no contraction have any
    of them, its outputs one order together.

    Args:
      flow: a program whose tensors have letters, such as `ir.encoder_layer`; the first
        input of a contraction is its first operand, all others are the second.
      device: the roofline.
      stack: the letter of a stack of tensors, the outermost axis of those that have it;
        other operators have the tensors of the stack one by one.

    Raises:
      ConfigError: a tensor whose layouts no contraction tells.

    Examples:
      >>> layer = ir.encoder_layer(ir.encoder_sizes(), backward=False)
      >>> times = layout_times(layer, Roofline())
      >>> sorted({row.layouts["w_up"] for row in times["lin1"]})
      ['iu', 'ui']
    """
    checks.require(len(stack) <= 1, "stack is one letter or none", stack=stack)
    sizes = {
        axis: size
        for tensor in flow.tensors.values()
        for axis, size in zip(tensor.axes, tensor.shape, strict=True)
    }
    counted = [each for each in flow.operators if flow.moved(each.name).words]
    times = {
        each.name: list(_of_contraction(flow, each, sizes, device, stack))
        for each in counted
        if each.kind == "contraction"
    }
    known: dict[frozenset[str], dict[str, None]] = {}
    for rows in times.values():
        for row in rows:
            for layout in row.layouts.values():
                known.setdefault(frozenset(layout), {})[layout] = None
    return {
        each.name: times.get(each.name) or list(_of_kernel(flow, each, known, device))
        for each in counted
    }


def _of_contraction(
    flow: ir.Dataflow,
    operator: ir.Operator,
    sizes: Mapping[str, int],
    device: Roofline,
    stack: str,
) -> Iterator[ir.Configuration]:
    """Yields a configuration for each order of axes that is one product of matrices."""
    moved = flow.moved(operator.name)
    first, *second = operator.inputs
    for call in ir.gemm_layouts(operator.einsum, sizes, outermost=stack):
        operands, _, result = call.einsum.partition("->")
        terms = (*operands.split(","), result)
        tensors = zip(terms, ([first], second, operator.outputs), strict=True)
        share = device.transposed ** (call.trans_a + call.trans_b)
        yield ir.Configuration(
            layouts={
                name: _rename(term, flow.tensors[name].axes, stack)
                for term, names in tensors
                for name in names
            },
            seconds=device.seconds(
                moved.flops / share, device.itemsize * moved.words, matrix=True
            ),
            name="NT"[call.trans_a] + "NT"[call.trans_b],
        )


def _of_kernel(
    flow: ir.Dataflow,
    operator: ir.Operator,
    known: Mapping[frozenset[str], Iterable[str]],
    device: Roofline,
) -> Iterator[ir.Configuration]:
    """Yields a configuration for each layout of each input and order of the outputs."""
    names = operator.inputs
    choices = [_layouts(name, flow.tensors[name].axes, known) for name in names]
    written: list[Mapping[str, str]] = [{}]
    if operator.outputs:
        leader = operator.outputs[0]
        written = [
            {
                name: _rename(order, flow.tensors[name].axes, "")
                for name in operator.outputs
            }
            for order in _layouts(leader, flow.tensors[leader].axes, known)
        ]
    flops = flow.moved(operator.name).flops
    reads = [dict(zip(names, own, strict=True)) for own in itertools.product(*choices)]
    for read, outputs in itertools.product(reads, written):
        layouts = {**read, **outputs}
        vector = next(iter(outputs.values()), layouts[names[0]])[-1]
        # Outputs have one order, if with other letters.
        moved = sum(
            flow.tensors[name].words
            / (1.0 if name in outputs or layout[-1] == vector else device.strided)
            for name, layout in layouts.items()
        )
        seconds = device.seconds(flops, device.itemsize * moved, matrix=False)
        yield ir.Configuration(layouts, seconds, vector)


def _layouts(
    name: str, axes: str, known: Mapping[frozenset[str], Iterable[str]]
) -> Sequence[str]:
    found = known.get(frozenset(axes))
    if not found:
        raise ConfigError(
            f"no contraction has a tensor with the axes of {name!r}, {axes!r}"
        )
    return sorted(found)


def _rename(term: str, axes: str, stack: str) -> str:
    """Returns an order of axes with the letters of another tensor of the same sizes.

    A stack's letter is dropped where the tensor is one of the stack. Keys and queries
    have letters of their own for the same axis.
    """
    own = term if stack in axes else term.replace(stack, "")
    others = dict(
        zip(
            [letter for letter in own if letter not in axes],
            [letter for letter in axes if letter not in own],
            strict=True,
        )
    )
    return "".join(others.get(letter, letter) for letter in own)
