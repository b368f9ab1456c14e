"""Through a stack of blocks, changing the matrices of each before the next is fed.

What a block is, is the caller's: a `core.Model` from `[batch, time, width]` to the same
and its parameters, stacked along axis 0. Nothing here knows of language models.
"""

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.compress import grids
from hpcjax.compress.config import GptqOptions, GridSpec, PruneOptions
from hpcjax.compress.gptq import Hessian, hessian_init, hessian_update, solve
from hpcjax.compress.sparsegpt import prune
from hpcjax.core import trees
from hpcjax.core.model import SEEN, Model, Tap, check_taps
from hpcjax.kernels import QuantizedMatrix, quantized_matrix

log = logging.getLogger(__name__)

Groups = Sequence[Sequence[str]]


class LayerReport(NamedTuple):
    """What became of one matrix.

    Attributes:
      layer: number of the block.
      path: of the matrix in the block.
      loss: tr((W − Ŵ)ᵀ H (W − Ŵ)) with the calibration's H, undamped.
      rounded: the same for rounding to the nearest on the same grid; NaN for pruning.
      damping: share of the mean diagonal of H that was needed.
    """

    layer: int
    path: str
    loss: float
    rounded: float
    damping: float


class Compressed(NamedTuple):
    """Blocks after compression.

    Attributes:
      params: the stacked parameters, with `QuantizedMatrix` or pruned kernels.
      reports: one for each matrix, in the order of the work.
      outputs: what the last compressed block gives for the calibration.
    """

    params: Any
    reports: tuple[LayerReport, ...]
    outputs: Float[Array, "sequences time width"]


def quantize_blocks(
    block: Model,
    params: Any,
    inputs: Float[Array, "sequences time width"],
    groups: Groups,
    spec: GridSpec,
    options: GptqOptions | None = None,
    *,
    true_sequential: bool = True,
    batch: int = 8,
    report: Callable[[LayerReport], None] = lambda _: None,
) -> Compressed:
    """Quantizes the matrices of every block by GPTQ.

    Block after block: the Hessians of its matrices come from the calibration's
    sequences, as the quantized blocks before pass them on; the matrices are solved for;
    the block, now quantized, is run again to feed the next.

    Args:
      block: one block, `[batch, time, width]` to the same, with the state `{}`.
      params: its parameters, stacked along axis 0; kernels may be lower than float32.
      inputs: what the first block is given, `[sequences, time, width]`.
      groups: paths of the matrices, those with one and the same input together, in the
        order in which they run; they share a Hessian.
      spec: the grid; not a ternary one.
      options: GPTQ's; None for the defaults.
      true_sequential: whether a group sees what the quantized groups before it give.
      batch: sequences at once.
      report: called after each matrix.

    Returns:
      The parameters with a `QuantizedMatrix` for every kernel named, whose scales are
      float32.

    Raises:
      ConfigError: a ternary grid, or groups that do not divide the inputs.
      ValueError: a path that is no layer of the block, or that is named twice; no
        sequences.
      numpy.linalg.LinAlgError: see `solve`; the message names block and path.
    """
    options = options or GptqOptions()
    # Only then are groups not of neighbouring inputs.
    scattered = options.act_order and not options.static_groups

    def one(kernel: jax.Array, hessian: jax.Array, name: str) -> tuple:
        solved = solve(kernel, hessian, spec, options, name=name)
        made = solved.kernel(spec)
        integers, grid = grids.round_to_nearest(kernel, spec)
        rounded = _values(integers, grid, spec)
        matrix = quantized_matrix(
            solved.integers,
            solved.grid.scale,
            solved.grid.zero,
            bits=spec.bits,
            group=solved.group if scattered and spec.group_size else None,
        )
        lost = _lost(kernel, made, hessian), _lost(kernel, rounded, hessian)
        return made, matrix, *lost, solved.damping

    return _walk(block, params, inputs, groups, one, true_sequential, batch, report)


def round_blocks(params: Any, paths: Sequence[str], spec: GridSpec) -> Any:
    """Rounds the stacked kernels at `paths` to the nearest; needs no calibration.

    Returns:
      The parameters with a `QuantizedMatrix` for every kernel named.
    """

    def one(kernel: jax.Array) -> QuantizedMatrix:
        integers, grid = grids.round_to_nearest(kernel.astype(jnp.float32), spec)
        return quantized_matrix(integers, grid.scale, grid.zero, bits=spec.bits)

    flat = trees.flatten(params)
    made = {f"{path}/kernel": jax.vmap(one)(flat[f"{path}/kernel"]) for path in paths}
    return replaced(params, made)


def prune_blocks(
    block: Model,
    params: Any,
    inputs: Float[Array, "sequences time width"],
    groups: Groups,
    options: PruneOptions | None = None,
    *,
    true_sequential: bool = True,
    batch: int = 8,
    report: Callable[[LayerReport], None] = lambda _: None,
) -> Compressed:
    """Prunes the matrices of every block by SparseGPT; see `quantize_blocks`."""

    def one(kernel: jax.Array, hessian: jax.Array, name: str) -> tuple:
        pruned = prune(kernel, hessian, options, name=name)
        lost = _lost(kernel, pruned.kernel, hessian)
        return pruned.kernel, pruned.kernel, lost, float("nan"), pruned.damping

    return _walk(block, params, inputs, groups, one, true_sequential, batch, report)


def dequantized(params: Any, dtype: str = "float32") -> Any:
    """Returns parameters with plain kernels in place of every `QuantizedMatrix`."""
    return jax.tree.map(
        lambda leaf: leaf.dequantize(dtype) if _is_matrix(leaf) else leaf,
        params,
        is_leaf=_is_matrix,
    )


def replaced(params: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns nested dicts with the leaves at some paths replaced.

    Examples:
      >>> replaced({"a": {"b": 1, "c": 2}}, {"a/c": 3})
      {'a': {'b': 1, 'c': 3}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaves.get(trees.path_of(path), leaf), params
    )


def _walk(
    block: Model,
    params: Any,
    inputs: jax.Array,
    groups: Groups,
    one: Callable[[jax.Array, jax.Array, str], tuple],
    true_sequential: bool,
    batch: int,
    report: Callable[[LayerReport], None],
) -> Compressed:
    _check_groups(block, groups)
    depth = len(jax.tree.leaves(params)[0])
    parts = _parts(inputs, batch)
    done, reports = [], []
    for layer in range(depth):
        own = jax.tree.map(operator.itemgetter(layer), params)
        stored, before = {}, own
        for group in groups:
            seen = own if true_sequential else before
            hessian = _gather(block, seen, parts, group[0])
            for path in group:
                name = f"{path}/kernel"
                kernel = trees.flatten(own)[name].astype(jnp.float32)
                made, stored[name], *lost, damping = one(
                    kernel, hessian.matrix, f"block {layer}, {path}"
                )
                own = replaced(own, {name: made})
                found = LayerReport(layer, path, *map(float, lost), damping)
                reports.append(found)
                report(found)
        parts = _advance(block, own, parts)
        done.append(replaced(own, stored))
        log.info("block %d of %d is compressed", layer + 1, depth)
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *done)
    return Compressed(params, tuple(reports), jnp.concatenate(parts))


def _check_groups(block: Model, groups: Groups) -> None:
    paths = [path for group in groups for path in group]
    check_taps(block, dict.fromkeys(paths))
    if len(set(paths)) != len(paths) or not all(groups):
        raise ValueError(f"every matrix must be in one group: got {groups}")


def _parts(inputs: jax.Array, batch: int) -> list[jax.Array]:
    """Returns the sequences in equal parts, and what is left."""
    if not len(inputs) or batch < 1:
        raise ValueError(
            "calibration needs sequences, and a batch of at least one: got "
            f"{len(inputs)} sequences, batch={batch}"
        )
    return [inputs[start : start + batch] for start in range(0, len(inputs), batch)]


def _gather(
    block: Model, params: Any, parts: Sequence[jax.Array], path: str
) -> Hessian:
    """Returns the Hessian of the layer at `path`, over all parts."""
    found = hessian_init(trees.flatten(params)[f"{path}/kernel"].shape[0])
    for part in parts:
        found = _update(params, part, found, block=block, path=path)
    return found


@functools.partial(jax.jit, static_argnames=("block", "path"))
def _update(
    params: Any, x: jax.Array, found: Hessian, *, block: Model, path: str
) -> Hessian:
    # What runs behind the layer is not asked for and not compiled.
    _, state = block.apply(params, {}, x, train=False, taps={path: Tap(forward=_given)})
    return hessian_update(found, state[SEEN][path].astype(jnp.float32))


def _given(x: jax.Array, y: jax.Array) -> jax.Array:
    del y
    return x


def _advance(block: Model, params: Any, parts: Sequence[jax.Array]) -> list[jax.Array]:
    return [_apply(params, part, block=block) for part in parts]


@functools.partial(jax.jit, static_argnames="block")
def _apply(params: Any, x: jax.Array, *, block: Model) -> jax.Array:
    return block.apply(params, {}, x, train=False)[0]


def _values(integers: jax.Array, grid: grids.Grid, spec: GridSpec) -> jax.Array:
    size = len(integers) // len(grid.scale)
    scale, zero = (jnp.repeat(v, size, axis=0) for v in (grid.scale, grid.zero))
    return grids.dequantize(integers, scale, zero, spec)


@jax.jit
def _lost(kernel: jax.Array, made: jax.Array, hessian: jax.Array) -> jax.Array:
    off = kernel - made
    return jnp.sum(off * jnp.matmul(hessian, off, precision="highest"))


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedMatrix)
