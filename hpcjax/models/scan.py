"""A stack of equal blocks: one block's code, parameters stacked along axis 0."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from flax import nnx
from jax import lax

from hpcjax.models._from_nnx import flatten, observable_layers
from hpcjax.models.modules import (
    Initializer,
    Observation,
    Record,
    choice,
    stacked_initializer,
)

Remat = Literal["none", "full", "dots"]
ModuleT = TypeVar("ModuleT", bound=nnx.Module)

POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def stack(block: ModuleT, depth: int) -> ModuleT:
    """Returns `block` with every declared array stacked `depth` times along axis 0.

    Slice i of a parameter is drawn with a key of its path and i. The result is not
    called but given to `scan_blocks`.
    """
    for variable in flatten(nnx.state(block)).values():
        like = variable.get_value()
        initializer: Initializer = variable.get_metadata()["initializer"]
        variable.set_metadata(initializer=stacked_initializer(initializer, depth))
        variable.set_value(jax.ShapeDtypeStruct((depth, *like.shape), like.dtype))
    for _, layer in observable_layers(block):
        layer.depth = depth
    return block


def scan_blocks(
    blocks: nnx.Module,
    x: Any,
    call: Callable[[Any, Any], Any],
    *,
    remat: Remat = "none",
) -> Any:
    """Applies the blocks of a `stack` one after another, with one scan.

    Compile time does not grow with depth. Taps work as elsewhere: slots, backward
    statistics and forward records have a leading dimension `depth`.

    Args:
      blocks: what `stack` returned, after merging.
      x: the carry given to the first block, an array or a tree of arrays.
      call: `(block, x) -> x`, one block's forward pass.
      remat: what the backward pass finds in memory: "none" recomputes nothing, "full"
        keeps the carries only, "dots" keeps also the products without batch axes.

    Returns:
      The carry after the last block.

    Raises:
      ConfigError: an unknown `remat`.
    """
    policy = choice("remat", remat, POLICIES)
    graph, *states = nnx.split(blocks, nnx.Param, nnx.BatchStat, Observation)

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        block = nnx.merge(graph, *slices)
        carry = call(block, carry)
        changed = nnx.state(block, nnx.BatchStat), nnx.state(block, Record)
        return carry, tuple(
            {path: variable.get_value() for path, variable in flatten(state).items()}
            for state in changed
        )

    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    x, (statistics, records) = lax.scan(body, x, tuple(states))
    for path, variable in flatten(nnx.state(blocks, nnx.BatchStat)).items():
        variable.set_value(statistics[path])
    for path, layer in observable_layers(blocks):
        if f"{path}/record" in records:
            layer.record = nnx.data(Record(records[f"{path}/record"]))
    return x
