"""Work of a network's forward pass by layer, read from its program; nothing runs."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hpcjax import core, cost, ir
from hpcjax.core import checks


def work_of(
    model: core.Model,
    inputs: jax.ShapeDtypeStruct,
    *,
    word_bytes: int = 2,
    cpu_cycles: float = 0.0,
) -> cost.Work:
    """Returns floating-point operations and bytes of each layer of a forward pass.

    A layer is a product or convolution with what follows it up to the next one, as a
    kernel with a fused epilogue does it: it reads and writes what others share with it.
    XLA tells operations and bytes of a whole compiled program only (`perf.flops`).

    Args:
      model: any model; it is traced with two and with three queries, of which the
        difference is what a query takes.
      inputs: shape and dtype of one query's input.
      word_bytes: of an element, whatever its dtype here.
      cpu_cycles: of preprocessing a query.

    Raises:
      ConfigError: a pass that computes nothing.
      UnsupportedOp: a loop or branch that depends on values.
    """
    # A batch of one is left out: axes of length one change the program.
    two, three = (_trace(model, inputs, queries) for queries in (2, 3))
    moved = three[1] - two[1]
    return cost.Work(
        flops=three[0] - two[0],
        query_bytes=word_bytes * moved,
        batch_bytes=word_bytes * (two[1] - 2 * moved),
        kernels=two[2],
        cpu_cycles=cpu_cycles,
    )


def _trace(
    model: core.Model, inputs: jax.ShapeDtypeStruct, queries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns operations, words and executions of each layer."""
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((queries, *inputs.shape), inputs.dtype)

    def forward(params: Any, state: Any, batch: jax.Array) -> Any:
        return model.apply(params, state, batch, train=False)[0]

    flow = ir.dataflow(forward, params, state, batch)
    rows = [
        (
            sum(each.times * each.flops for each in layer),
            layer[0].times * _words(flow, layer),
            layer[0].times,
        )
        for layer in _layers(flow)
    ]
    flops, words, times = np.array(rows, float).T
    return flops, words, times


def _layers(flow: ir.Dataflow) -> Iterator[Sequence[ir.Operator]]:
    """Yields the operators from one contraction, or change of loop, to the next."""
    moving = [each for each in flow.operators if each.kind != "view"]
    rule = "a forward pass must have operators that compute or move something"
    checks.require(bool(moving), rule, operators=len(flow.operators))
    place, last = 0, moving[0].times
    groups = []
    for each in moving:
        starts = each.kind == "contraction" or each.times != last
        place, last = place + starts, each.times
        groups.append(place)
    pairs = zip(groups, moving, strict=True)
    for _, layer in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield [each for _, each in layer]


def _words(flow: ir.Dataflow, layer: Sequence[ir.Operator]) -> int:
    """Returns the words of a layer's tensors that others write or read."""
    own = {each.name for each in layer}
    written = {name for each in layer for name in each.outputs}
    shared = {
        name for name in written if name in flow.outputs or flow.consumers(name) - own
    }
    words = {name: flow.tensors[name].words for name in shared}
    for each in layer:
        # Gathering reads as much as it writes, such as some rows of a table.
        most = sum(flow.tensors[name].words for name in each.outputs)
        for name in set(each.inputs) - written:
            whole = flow.tensors[name].words
            read = min(whole, most) if each.kind == "movement" else whole
            words[name] = max(read, words.get(name, 0))
    return sum(words.values())
