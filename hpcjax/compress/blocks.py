"""Compresses the matrices of a stack of blocks, one block after the other.

A block is any `core.Model` that maps `[batch, time, width]` to the same shape; the
parameters of all blocks are stacked along axis 0. Nothing here is specific to language
models.
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
from hpcjax.compress.elimination import factorize
from hpcjax.compress.gptq import Hessian, hessian_init, hessian_update, solve
from hpcjax.compress.sparsegpt import prune_factored
from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import SEEN, Model, Tap, check_taps
from hpcjax.kernels import QuantizedMatrix, quantized_matrix, stack_matrices

log = logging.getLogger(__name__)

Groups = Sequence[Sequence[str]]


class CompressedMatrix(NamedTuple):
    """One compressed matrix; see `LayerReport` for the last three.

    Attributes:
      values: the plain kernel, `[inputs, outputs]`.
      stored: what takes its place in the parameters.
    """

    values: jax.Array
    stored: Any
    loss: jax.Array
    rounded: jax.Array | float
    damping: float


# (kernels with the same inputs, by path; their H; number of the block) -> by path
_Compress = Callable[
    [Mapping[str, jax.Array], jax.Array, int], Mapping[str, CompressedMatrix]
]


class LayerReport(NamedTuple):
    """The error of one compressed matrix.

    Attributes:
      layer: number of the block; in `quantize_network`, of the layer.
      path: of the matrix in the block.
      loss: tr((W − Ŵ)ᵀ H (W − Ŵ)) with the undamped H of the calibration.
      rounded: the loss of rounding to the nearest on the same grid; NaN for pruning.
      damping: share of the mean diagonal that was added to H.
    """

    layer: int
    path: str
    loss: float
    rounded: float
    damping: float


class Compressed(NamedTuple):
    """Compressed blocks.

    Attributes:
      params: the stacked parameters, with `QuantizedMatrix` or pruned kernels.
      reports: one for each matrix, in the order of compression.
      outputs: of the last compressed block for the calibration inputs.
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
    """Quantizes the matrices of every block with GPTQ.

    The blocks are treated in order. The Hessians of a block's matrices come from the
    calibration sequences that have passed the quantized blocks before it. Then the
    matrices are quantized, and the quantized block computes the inputs of the next one.

    Args:
      block: one block, from `[batch, time, width]` to the same shape, with state `{}`.
      params: parameters of all blocks, stacked along axis 0, in any floating dtype.
      inputs: calibration inputs of the first block, `[sequences, time, width]`.
      groups: paths of the matrices, in the order in which they run; matrices with the
        same input form a group and share a Hessian.
      spec: the grid; not a ternary one.
      options: of GPTQ; None for the defaults.
      true_sequential: whether the Hessian of a group is that of the block with all
        earlier groups quantized; else of the unquantized block.
      batch: sequences in a forward pass.
      report: called after each matrix.

    Returns:
      The parameters, with a `QuantizedMatrix` with float32 scales for every named
      kernel.

    Raises:
      ConfigError: before any work: a ternary grid, groups that do not divide the inputs
        of a matrix, a path without a kernel or with one that is not finite.
      ValueError: a path that is not a layer of the block or is named twice; no
        sequences.
      numpy.linalg.LinAlgError: see `solve`; the message names block and path.
    """
    options = options or GptqOptions()
    # Only then is a group not of neighbouring inputs, and must be stored by input.
    scattered = options.act_order and not options.static_groups

    def compress(
        kernels: Mapping[str, jax.Array], hessian: jax.Array, layer: int
    ) -> dict[str, CompressedMatrix]:
        # Outputs are independent of each other, so that all matrices with one Hessian
        # can be solved as one.
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
            path: report_matrix(
                kernel,
                quantized_matrix(*part, bits=spec.bits, group=group),
                hessian,
                solved.damping,
                spec=spec,
            )
            for (path, kernel), part in zip(kernels.items(), parts, strict=True)
        }

    _check_groups(block, groups)
    _check_kernels(params, groups, functools.partial(check_grid, spec))
    return _walk(
        block, params, inputs, groups, compress, true_sequential, batch, report
    )


def report_matrix(
    kernel: jax.Array,
    matrix: QuantizedMatrix,
    hessian: jax.Array,
    damping: float,
    *,
    spec: GridSpec,
) -> CompressedMatrix:
    """Returns a matrix with its loss, and that of rounding to the nearest."""
    values, loss, rounded = _compare_to_rounding(kernel, matrix, hessian, spec=spec)
    return CompressedMatrix(values, matrix, loss, rounded, damping)


@functools.partial(jax.jit, static_argnames="spec")
def _compare_to_rounding(
    kernel: jax.Array, matrix: QuantizedMatrix, hessian: jax.Array, *, spec: GridSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    values = matrix.dequantize()
    integers, grid = grids.round_to_nearest(kernel, spec)
    rounded = grids.dequantize(integers, *grid.by_input(len(integers)), spec)
    return (
        values,
        _quadratic_loss(kernel, values, hessian),
        _quadratic_loss(kernel, rounded, hessian),
    )


def round_blocks(params: Any, paths: Sequence[str], spec: GridSpec) -> Any:
    """Rounds the stacked kernels at `paths` to the nearest, without calibration.

    Returns:
      The parameters, with a `QuantizedMatrix` for every named kernel.

    Raises:
      ConfigError: as `quantize_blocks` does.
    """
    _check_kernels(params, [paths], functools.partial(check_grid, spec))

    def round_kernel(kernel: jax.Array) -> QuantizedMatrix:
        integers, grid = grids.round_to_nearest(kernel.astype(jnp.float32), spec)
        return quantized_matrix(integers, grid.scale, grid.zero, bits=spec.bits)

    flat = trees.flatten(params)
    kernels = [f"{path}/kernel" for path in paths]
    rounded = {kernel: jax.vmap(round_kernel)(flat[kernel]) for kernel in kernels}
    return replace_leaves(params, rounded)


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
    """Prunes the matrices of every block with SparseGPT; see `quantize_blocks`."""
    options = options or PruneOptions()

    def compress(
        kernels: Mapping[str, jax.Array], hessian: jax.Array, layer: int
    ) -> dict[str, CompressedMatrix]:
        name = f"block {layer}, {', '.join(kernels)}"
        factor = factorize(hessian, options.damping, name)
        compressed = {}
        for path, kernel in kernels.items():
            new = prune_factored(kernel, factor, options).kernel
            loss = _quadratic_loss(kernel, new, hessian)
            compressed[path] = CompressedMatrix(
                new, new, loss, float("nan"), factor.damping
            )
        return compressed

    _check_groups(block, groups)
    _check_kernels(params, groups, options.check_inputs)
    return _walk(
        block, params, inputs, groups, compress, true_sequential, batch, report
    )


def dequantize_params(params: Any, dtype: str = "float32") -> Any:
    """Returns parameters with plain kernels in place of every `QuantizedMatrix`."""
    return jax.tree.map(
        lambda leaf: leaf.dequantize(dtype) if _is_matrix(leaf) else leaf,
        params,
        is_leaf=_is_matrix,
    )


def replace_leaves(params: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns nested dicts with the leaves at some paths replaced.

    Examples:
      >>> replace_leaves({"a": {"b": 1, "c": 2}}, {"a/c": 3})
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
    parts = _split_batches(inputs, batch)
    done, reports = [], []
    for layer in range(depth):
        own = jax.tree.map(operator.itemgetter(layer), params)
        stored, before = {}, own
        for group in groups:
            seen = own if true_sequential else before
            hessian = _gather_hessian(block, seen, parts, group[0])
            flat = trees.flatten(own)
            kernels = {
                path: flat[f"{path}/kernel"].astype(jnp.float32) for path in group
            }
            for path, matrix in compress(kernels, hessian.matrix, layer).items():
                # The forward passes here use plain kernels; the stored form replaces
                # them once the block is done.
                own = replace_leaves(own, {f"{path}/kernel": matrix.values})
                stored[f"{path}/kernel"] = matrix.stored
                losses = float(matrix.loss), float(matrix.rounded)
                reports.append(LayerReport(layer, path, *losses, matrix.damping))
                report(reports[-1])
        parts = _advance(block, own, parts)
        done.append(replace_leaves(own, stored))
        log.info("block %d of %d is compressed", layer + 1, depth)
    params = jax.tree.map(_stack_leaves, *done, is_leaf=_is_matrix)
    return Compressed(params, tuple(reports), jnp.concatenate(parts))


def _stack_leaves(*leaves: Any) -> Any:
    """Stacks the same leaf of all blocks."""
    if _is_matrix(leaves[0]):
        return stack_matrices(leaves)
    return jnp.stack(leaves)


def check_grid(spec: GridSpec, inputs: int, name: str) -> None:
    """Raises ConfigError unless a packed matrix of so many inputs can have the grid."""
    rule = "a packed matrix can hold no ternary grid"
    checks.require(not spec.ternary, rule, ternary=spec.ternary)
    spec.groups(inputs, name)


def _check_kernels(
    params: Any, groups: Groups, check_inputs: Callable[[int, str], None]
) -> None:
    """Raises ConfigError unless all kernels exist, are finite and fit the options."""
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
    # Under `jit` the values are not known, and cannot be checked.
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


def _split_batches(inputs: jax.Array, batch: int) -> list[jax.Array]:
    """Splits the sequences into batches; the last one may be smaller."""
    if not len(inputs) or batch < 1:
        raise ValueError(
            "calibration needs sequences, and a batch of at least one: got "
            f"{len(inputs)} sequences, batch={batch}"
        )
    return [inputs[start : start + batch] for start in range(0, len(inputs), batch)]


def _gather_hessian(
    block: Model, params: Any, parts: Sequence[jax.Array], path: str
) -> Hessian:
    """Returns the Hessian of the layer at `path`, over all parts."""
    hessian = hessian_init(trees.flatten(params)[f"{path}/kernel"].shape[0])
    for part in parts:
        hessian = _update(params, part, hessian, block=block, path=path)
    return hessian


@functools.partial(jax.jit, static_argnames=("block", "path"))
def _update(
    params: Any, x: jax.Array, hessian: Hessian, *, block: Model, path: str
) -> Hessian:
    # The block's output is not used, so that XLA drops all that runs behind the layer.
    _, state = block.apply(
        params, {}, x, train=False, taps={path: Tap(forward=_tap_input)}
    )
    return hessian_update(hessian, state[SEEN][path].astype(jnp.float32))


def _tap_input(x: jax.Array, y: jax.Array) -> jax.Array:
    del y
    return x


def _advance(block: Model, params: Any, parts: Sequence[jax.Array]) -> list[jax.Array]:
    return [_apply(params, part, block=block) for part in parts]


@functools.partial(jax.jit, static_argnames="block")
def _apply(params: Any, x: jax.Array, *, block: Model) -> jax.Array:
    return block.apply(params, {}, x, train=False)[0]


@jax.jit
def _quadratic_loss(kernel: jax.Array, new: jax.Array, hessian: jax.Array) -> jax.Array:
    """Returns tr(Dᵀ H D) of the difference D = W − Ŵ, as Σ D ∘ (H D)."""
    difference = kernel - new
    return jnp.sum(difference * jnp.matmul(hessian, difference, precision="highest"))


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedMatrix)
