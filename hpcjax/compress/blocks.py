"""Through a stack of blocks, changing the matrices of each before the next is fed.

What a block is, is the caller's: a `core.Model` from `[batch, time, width]` to the same
and its parameters, stacked along axis 0. Nothing here knows of language models.
"""

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.compress import grids
from hpcjax.compress.config import GptqOptions, GridSpec, PruneOptions
from hpcjax.compress.elimination import factored
from hpcjax.compress.gptq import Hessian, hessian_init, hessian_update, solve
from hpcjax.compress.sparsegpt import pruned
from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import SEEN, Model, Tap, check_taps
from hpcjax.kernels import QuantizedMatrix, quantized_matrix, stack_matrices

log = logging.getLogger(__name__)

Groups = Sequence[Sequence[str]]


class _Made(NamedTuple):
    """One matrix, compressed: its values, how they are stored, and its report."""

    values: jax.Array
    stored: Any
    loss: jax.Array
    rounded: jax.Array | float
    damping: float


# (kernels with the same inputs, by path; their H; number of the block) -> by path
_Compress = Callable[[Mapping[str, jax.Array], jax.Array, int], Mapping[str, _Made]]


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
      ConfigError: before any work, a ternary grid, groups that do not divide the inputs
        of a matrix, a path without a kernel or with one that is not finite.
      ValueError: a path that is no layer of the block, or that is named twice; no
        sequences.
      numpy.linalg.LinAlgError: see `solve`; the message names block and path.
    """
    options = options or GptqOptions()
    # Only then are groups not of neighbouring inputs.
    scattered = options.act_order and not options.static_groups

    def compress(
        kernels: Mapping[str, jax.Array], hessian: jax.Array, layer: int
    ) -> dict[str, _Made]:
        # Outputs do not depend on each other: a group is one matrix.
        ends = list(
            itertools.accumulate(kernel.shape[1] for kernel in kernels.values())
        )
        solved = solve(
            jnp.concatenate(list(kernels.values()), axis=1),
            hessian,
            spec,
            options,
            name=f"block {layer}, {', '.join(kernels)}",
        )
        split = functools.partial(jnp.split, indices_or_sections=ends[:-1], axis=1)
        parts = zip(
            *map(split, (solved.integers, solved.grid.scale, solved.grid.zero)),
            strict=True,
        )
        group = solved.group if scattered and spec.group_size else None
        return {
            path: _judged(
                kernel,
                quantized_matrix(*part, bits=spec.bits, group=group),
                hessian,
                solved.damping,
                spec=spec,
            )
            for (path, kernel), part in zip(kernels.items(), parts, strict=True)
        }

    _check_groups(block, groups)
    _check_kernels(params, groups, functools.partial(_check_grid, spec))
    return _walk(
        block, params, inputs, groups, compress, true_sequential, batch, report
    )


def _judged(
    kernel: jax.Array,
    matrix: QuantizedMatrix,
    hessian: jax.Array,
    damping: float,
    *,
    spec: GridSpec,
) -> _Made:
    """Returns a matrix with its loss, and that of rounding to the nearest."""
    values, loss, rounded = _compared(kernel, matrix, hessian, spec=spec)
    return _Made(values, matrix, loss, rounded, damping)


@functools.partial(jax.jit, static_argnames="spec")
def _compared(
    kernel: jax.Array, matrix: QuantizedMatrix, hessian: jax.Array, *, spec: GridSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    values = matrix.dequantize()
    integers, grid = grids.round_to_nearest(kernel, spec)
    rounded = grids.dequantize(integers, *grid.by_input(len(integers)), spec)
    return values, _lost(kernel, values, hessian), _lost(kernel, rounded, hessian)


def round_blocks(params: Any, paths: Sequence[str], spec: GridSpec) -> Any:
    """Rounds the stacked kernels at `paths` to the nearest; needs no calibration.

    Returns:
      The parameters with a `QuantizedMatrix` for every kernel named.

    Raises:
      ConfigError: as `quantize_blocks`.
    """
    _check_kernels(params, [paths], functools.partial(_check_grid, spec))

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
    options = options or PruneOptions()

    def compress(
        kernels: Mapping[str, jax.Array], hessian: jax.Array, layer: int
    ) -> dict[str, _Made]:
        name = f"block {layer}, {', '.join(kernels)}"
        factor = factored(hessian, options.damping, name)
        made = {}
        for path, kernel in kernels.items():
            new = pruned(kernel, factor, options).kernel
            lost = _lost(kernel, new, hessian)
            made[path] = _Made(new, new, lost, float("nan"), factor.damping)
        return made

    _check_groups(block, groups)
    _check_kernels(params, groups, options.check_inputs)
    return _walk(
        block, params, inputs, groups, compress, true_sequential, batch, report
    )


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
    compress: _Compress,
    true_sequential: bool,
    batch: int,
    report: Callable[[LayerReport], None],
) -> Compressed:
    depth = len(jax.tree.leaves(params)[0])
    parts = _parts(inputs, batch)
    done, reports = [], []
    for layer in range(depth):
        own = jax.tree.map(operator.itemgetter(layer), params)
        stored, before = {}, own
        for group in groups:
            seen = own if true_sequential else before
            hessian = _gather(block, seen, parts, group[0])
            flat = trees.flatten(own)
            kernels = {
                path: flat[f"{path}/kernel"].astype(jnp.float32) for path in group
            }
            for path, made in compress(kernels, hessian.matrix, layer).items():
                own = replaced(own, {f"{path}/kernel": made.values})
                stored[f"{path}/kernel"] = made.stored
                lost = float(made.loss), float(made.rounded)
                found = LayerReport(layer, path, *lost, made.damping)
                reports.append(found)
                report(found)
        parts = _advance(block, own, parts)
        done.append(replaced(own, stored))
        log.info("block %d of %d is compressed", layer + 1, depth)
    params = jax.tree.map(_stacked, *done, is_leaf=_is_matrix)
    return Compressed(params, tuple(reports), jnp.concatenate(parts))


def _stacked(*leaves: Any) -> Any:
    """Stacks what the blocks have."""
    if _is_matrix(leaves[0]):
        return stack_matrices(leaves)
    return jnp.stack(leaves)


def _check_grid(spec: GridSpec, inputs: int, name: str) -> None:
    rule = "a packed matrix can hold no ternary grid"
    checks.require(not spec.ternary, rule, ternary=spec.ternary)
    spec.groups(inputs, name)


def _check_kernels(
    params: Any, groups: Groups, check_inputs: Callable[[int, str], None]
) -> None:
    """Raises ConfigError unless there are finite kernels that can be compressed."""
    flat = trees.flatten(params, _is_matrix)
    kernels = {path: flat.get(f"{path}/kernel") for group in groups for path in group}
    for path, kernel in kernels.items():
        if (
            not isinstance(kernel, jax.Array | np.ndarray)
            or kernel.ndim != 3
            or not jnp.issubdtype(kernel.dtype, jnp.floating)
        ):
            raise ConfigError(
                f"{path}: expected a kernel of floats, [blocks, inputs, outputs]: got "
                f"{kernel!r:.60}"
            )
        check_inputs(kernel.shape[1], path)
    if any(isinstance(kernel, jax.core.Tracer) for kernel in kernels.values()):
        return
    for path, finite in jax.device_get(_finite(kernels)).items():
        if not finite.all():
            raise ConfigError(
                f"block {finite.argmin()}, {path}: the kernel is not finite"
            )


@jax.jit
def _finite(kernels: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {
        path: jnp.isfinite(kernel).all(axis=(1, 2)) for path, kernel in kernels.items()
    }


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


@jax.jit
def _lost(kernel: jax.Array, made: jax.Array, hessian: jax.Array) -> jax.Array:
    off = kernel - made
    return jnp.sum(off * jnp.matmul(hessian, off, precision="highest"))


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedMatrix)
