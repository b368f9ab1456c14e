"""Stacks of equal blocks, with parameters stacked along axis 0, run by one scan."""

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from hpcjax.core import shards, tallies
from hpcjax.core.deferred import realize
from hpcjax.core.errors import ConfigError
from hpcjax.models._from_nnx import flatten, observable_layers
from hpcjax.models.decoding import KeysValues
from hpcjax.models.modules import (
    STACKED,
    Initializer,
    Observation,
    Record,
    choice,
    stacked_initializer,
)

Remat = Literal["none", "full", "dots", "offload", "collectives"]
ModuleT = TypeVar("ModuleT", bound=nnx.Module)

# The name under which "offload" finds the inputs of blocks.
_INPUT = "block_input"
POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "collectives": jax.checkpoint_policies.save_only_these_names(shards.COLLECTIVE),
}


def stack(block: ModuleT, depth: int) -> ModuleT:
    """Returns `block` with every declared array stacked `depth` times along axis 0.

    Slice i of a parameter is drawn with a key of its path and i. The result is to be
    passed to `scan_blocks` and not to be called. `block` itself is changed.
    """
    for variable in flatten(nnx.state(block)).values():
        like = variable.get_value()
        initializer: Initializer = variable.get_metadata()["initializer"]
        stacked = stacked_initializer(initializer, depth)
        variable.set_metadata(**{"initializer": stacked, STACKED: True})
        variable.set_value(jax.ShapeDtypeStruct((depth, *like.shape), like.dtype))
    for _, layer in observable_layers(block):
        layer.depth = depth
    return block


def recompute(
    block: Callable[[Any, Any], Any], remat: Remat
) -> Callable[[Any, Any], Any]:
    """Returns a block's `(params, x) -> x` that stores what `remat` says.

    It is for the body of a scan, see `scan_blocks`.
    """
    policy = choice("remat", remat, POLICIES)
    if policy is None:
        return block

    def named(params: Any, x: Any) -> Any:
        x = jax.tree.map(lambda leaf: checkpoint_name(leaf, _INPUT), x)
        return block(params, x)

    return jax.checkpoint(named, policy=policy, prevent_cse=False)


def scan_blocks(
    blocks: nnx.Module,
    x: Any,
    call: Callable[[Any, Any], Any],
    *,
    remat: Remat = "none",
) -> Any:
    """Applies the blocks of a `stack` one after another, with one scan.

    Compile time does not grow with depth. Taps work as elsewhere; slots, backward
    statistics and forward records have a leading axis `depth`.

    Args:
      blocks: the result of `stack`, after merging.
      x: the input of the first block, an array or a tree of arrays.
      call: `(block, x) -> x`, one block's forward pass.
      remat: what is stored for the backward pass, which recomputes the rest: "none"
        stores everything, "full" only the inputs of blocks, "dots" also matrix products
        without batch axes; "offload" is "full" with the inputs in the host's memory;
        "collectives" also what is `shards.received`.

    Returns:
      The carry after the last block.

    Raises:
      ConfigError: an unknown `remat`.
    """
    x, _ = scan_with_memory(
        blocks, x, lambda block, x, _: (call(block, x), None), (None,), remat=remat
    )
    return x


def scan_with_memory(
    blocks: nnx.Module,
    x: Any,
    call: Callable[[Any, Any, Any], tuple[Any, Any]],
    memory: tuple[Any, ...],
    *,
    remat: Remat = "none",
) -> tuple[Any, tuple[Any, ...]]:
    """Applies the blocks of a `stack`, each with a memory of its own.

    Consecutive blocks whose memory has the same shapes form a *run*, which is one scan.
    A stack in one run compiles fastest; with runs of one block it is unrolled.

    Args:
      blocks: the result of `stack`, after merging.
      x: the input of the first block.
      call: `(block, x, memory) -> (x, memory)`, one block's forward pass. Of arrays in
        the memory it gets its slice, and may return others. `KeysValues` it gets whole,
        with the block's number, to write them where they are, or to drop them.
      memory: for each run a tree of arrays with the run's blocks along axis 0; a single
        run may have an empty tree.
      remat: see `scan_blocks`.

    Returns:
      The carry after the last block, and the new memory.

    Raises:
      ConfigError: an unknown `remat`, or a memory where a codec starts within a stack.
      ValueError: the runs do not add up to the depth of the stack.
    """
    policy = choice("remat", remat, POLICIES)
    graph, *states = nnx.split(blocks, nnx.Param, nnx.BatchStat, Observation)

    def advance(x: Any, states: Any, remembered: Any) -> tuple[Any, Any, Any]:
        x = jax.tree.map(lambda leaf: checkpoint_name(leaf, _INPUT), x)
        block = nnx.merge(graph, *realize(states))
        with tallies.tallying() as counted:
            x, remembered = call(block, x, remembered)
        # The merged block is lost after the body: what it changed is returned as
        # outputs of the scan, which stacks them.
        changed = nnx.state(block, nnx.BatchStat), nnx.state(block, Record)
        values = tuple(
            {path: variable.get_value() for path, variable in flatten(state).items()}
            for state in changed
        )
        return x, (*values, counted), remembered

    policy = shards.gathering_policy(policy, states)
    if policy is not None:
        # Inside a scan XLA cannot merge the recomputation with the forward pass, so the
        # barriers against that, which cost time, are not needed.
        advance = jax.checkpoint(advance, policy=policy, prevent_cse=False)
    depth = _depth(states)
    ends = list(itertools.accumulate(_depth(run) or depth for run in memory))
    if not ends or ends[-1] != depth:
        raise ValueError(f"the memory must be of {depth} blocks: got {ends[-1:]}")
    # Layers without a codec are a run of their own: no branch hides a collective.
    if (plain := shards.codec_start(states)) and jax.tree.leaves(memory):
        raise ConfigError(
            "decoding is not cut in two where codecs start: got a codec from layer "
            f"{plain} on; decode without one"
        )
    memory, ends = (memory * 2, [plain, depth]) if plain else (memory, ends)
    outputs, start = [], 0
    for run, end in zip(memory, ends, strict=True):
        part = jax.tree.map(operator.itemgetter(slice(start, end)), tuple(states))
        part = shards.without_codecs(part) if end <= plain else part
        x, values, remembered = _scan_run(advance, x, part, run, end - start)
        outputs.append((*values, remembered))
        start = end
    statistics, records, counted, remembered = zip(*outputs, strict=True)
    for run in counted:
        tallies.tally({name: counts.sum(0) for name, counts in run.items()})
    _restore(blocks, _concatenate(statistics), _concatenate(records))
    return x, remembered


def _scan_run(
    advance: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
    x: Any,
    states: Any,
    memory: Any,
    depth: int,
) -> tuple[Any, Any, Any]:
    """Scans the blocks of a run; returns the carry, stacked values and the memory."""
    kept, slices, form = _part(memory)
    new_form = form

    def body(carry: Any, given: Any) -> tuple[Any, Any]:
        nonlocal new_form
        x, kept = carry
        number, states, slices = given
        numbered = [dataclasses.replace(one, layer=number) for one in kept]
        x, values, remembered = advance(x, states, form(numbered, slices))
        written, slices, new_form = _part(remembered)
        if written:
            kept = [dataclasses.replace(one, layer=None) for one in written]
        return (x, kept), (values, slices)

    given = jnp.arange(depth), states, slices
    (x, kept), (values, slices) = lax.scan(body, (x, kept), given)
    return x, values, new_form(kept, slices)


def _part(memory: Any) -> tuple[list[KeysValues], list[Any], Callable[..., Any]]:
    """Parts a memory into what is carried and what is sliced, and how to join them."""

    def carried(node: Any) -> bool:
        return isinstance(node, KeysValues)

    nodes, form = jax.tree.flatten(memory, is_leaf=carried)
    places = [carried(node) for node in nodes]

    def join(kept: Any, slices: Any) -> Any:
        ours, others = iter(kept), iter(slices)
        return form.unflatten([next(ours if is_kept else others) for is_kept in places])

    return (
        [node for node in nodes if carried(node)],
        [node for node in nodes if not carried(node)],
        join,
    )


def _depth(tree: Any) -> int:
    """Returns the length of axis 0 of a tree's leaves; 0 if it has none."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(tree)), 0)


def _concatenate(runs: tuple[Any, ...]) -> Any:
    """Joins the trees of runs along axis 0."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *runs)


def _restore(blocks: nnx.Module, statistics: Any, records: Any) -> None:
    """Puts the statistics and records of all blocks back into the stack."""
    for path, variable in flatten(nnx.state(blocks, nnx.BatchStat)).items():
        variable.set_value(statistics[path])
    for path, layer in observable_layers(blocks):
        if f"{path}/record" in records:
            layer.record = nnx.data(Record(records[f"{path}/record"]))
