"""GPTQ: rounding one input after another, the rest making up for it.

Kernels are `[inputs, outputs]`, so that a step works on contiguous memory: the
transpose of the paper's W.

References:
  Frantar, Ashkboos, Hoefler and Alistarh, GPTQ, ICLR 2023.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt8

from hpcjax.compress import grids
from hpcjax.compress.config import GptqOptions, GridSpec
from hpcjax.compress.elimination import Pending, check_problem, eliminate, factored
from hpcjax.compress.grids import Grid
from hpcjax.core import checks
from hpcjax.core.structs import pytree
from hpcjax.core.varying import vary_like


@pytree
class Hessian:
    """Running H = (2/n) Σ x xᵀ over n sequences.

    Attributes:
      matrix: H, `[inputs, inputs]`.
      count: n.
    """

    matrix: Float[Array, "inputs inputs"]
    count: Int[Array, ""]


def hessian_init(inputs: int, dtype: str = "float32") -> Hessian:
    """Returns the Hessian of no sequences."""
    return Hessian(
        matrix=jnp.zeros((inputs, inputs), dtype), count=jnp.zeros((), jnp.int32)
    )


def hessian_update(
    state: Hessian, x: Float[Array, "sequences *time inputs"]
) -> Hessian:
    """Adds sequences: H ← H n/(n+b) + 2/(n+b) Σ x xᵀ, n ← n + b.

    Args:
      state: so far.
      x: what the layer was given, `[b, ..., inputs]`; all places count alike.
    """
    rows = x.reshape(-1, x.shape[-1])
    dtype, count = state.matrix.dtype, state.count + x.shape[0]
    total = jnp.einsum(
        "ri,rj->ij", rows, rows, precision="highest", preferred_element_type=dtype
    )
    # Of no sequences at all, H stays zero.
    before, after = state.count.astype(dtype), jnp.maximum(count, 1).astype(dtype)
    matrix = state.matrix * (before / after) + total * (2 / after)
    return Hessian(matrix=matrix, count=count)


class Solved(NamedTuple):
    """A kernel on a grid.

    Attributes:
      integers: `[inputs, outputs]`, in the order of the inputs.
      grid: of each group.
      group: which group's grid an input has, `[inputs]`.
      loss: ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) with the damped H that was used, W being zero where
        an input was always zero.
      order: the order in which inputs were taken.
      damping: share of the mean diagonal that was added to H.
    """

    integers: UInt8[Array, "inputs outputs"]
    grid: Grid
    group: Int[Array, " inputs"]
    loss: Float[Array, ""]
    order: Int[Array, " inputs"]
    damping: float

    def kernel(self, spec: GridSpec) -> Float[Array, "inputs outputs"]:
        """Returns the weights that the integers stand for."""
        scale, zero = self.grid.scale[self.group], self.grid.zero[self.group]
        return grids.dequantize(self.integers, scale, zero, spec)


def solve(
    kernel: Float[Array, "inputs outputs"],
    hessian: Float[Array, "rows columns"],
    spec: GridSpec,
    options: GptqOptions | None = None,
    *,
    mesh: Mesh | None = None,
    axis: str = "data",
    name: str = "the layer",
) -> Solved:
    """Quantizes a kernel so that ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) stays small.

    Input i is rounded, w̃, and its error e = (w − w̃) / U_ii is taken off the inputs that
    follow, W_j ← W_j − U_ij e, with U the upper Cholesky factor of H⁻¹ = UᵀU. Without
    groups the grid is fitted to W as it was given; with groups, when the first input of
    the group is reached, to what W has become, unless `static_groups`.

    Args:
      kernel: W, `[inputs, outputs]`, float32 or float64.
      hessian: H, `[inputs, inputs]`, such as `hessian_update` gathers.
      spec: the grid.
      options: damping and order; None for the defaults.
      mesh: shares the outputs out over the devices of `axis`; None for one device.
      axis: of the mesh.
      name: of the layer, for errors.

    Raises:
      ConfigError: the groups do not divide the inputs, or the mesh has no such axis.
      ValueError: W or H is of another shape or dtype or not finite, or H is not
        symmetric.
      numpy.linalg.LinAlgError: H is not positive definite, not even with a damping
        that was raised ten times as far three times over.

    Examples:
      >>> kernel = jnp.array([[0.3], [-1.0], [2.0]])
      >>> solved = solve(kernel, jnp.eye(3), GridSpec(bits=2))
      >>> solved.integers.ravel().tolist()
      [1, 0, 3]
    """
    options = options or GptqOptions()
    check_problem(kernel, hessian, name)
    inputs, outputs = kernel.shape
    spec.groups(inputs, name)
    if mesh is not None:
        checks.require_choice("axis", axis, mesh.axis_names)
        if outputs % mesh.shape[axis]:
            raise ValueError(
                f"{name}: outputs must be a multiple of the devices of {axis!r}: got "
                f"{outputs} and {mesh.shape[axis]}"
            )
    found = factored(hessian, options.damping, name, ordered=options.act_order)
    integers, grid, loss, group = _quantize(
        kernel,
        *(found.factor, found.order, found.alive),
        spec=spec,
        options=options,
        mesh=mesh,
        axis=axis,
    )
    return Solved(integers, grid, group, loss, found.order, found.damping)


@functools.partial(jax.jit, static_argnames=("spec", "options", "mesh", "axis"))
def _quantize(
    kernel: jax.Array,
    factor: jax.Array,
    order: jax.Array,
    alive: jax.Array,
    *,
    spec: GridSpec,
    options: GptqOptions,
    mesh: Mesh | None,
    axis: str,
) -> tuple[jax.Array, Grid, jax.Array, jax.Array]:
    """Returns integers and their grids and groups by input, and the loss.

    Compiled once for all kernels of a shape.
    """
    run = functools.partial(_columns, spec=spec, options=options)
    if mesh is not None:
        columns = P(None, axis)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(columns, P(), P(), P()),
            out_specs=(columns, columns, P(axis)),
        )
    integers, grid, losses = run(kernel, factor, order, alive)
    place = jnp.argsort(order)
    by_input = jnp.arange(len(order)) if options.static_groups else place
    group = by_input // (spec.group_size or len(order))
    return integers[place], grid, jnp.sum(losses), group


def _columns(
    kernel: jax.Array,
    factor: jax.Array,
    order: jax.Array,
    alive: jax.Array,
    *,
    spec: GridSpec,
    options: GptqOptions,
) -> tuple[jax.Array, Grid, jax.Array]:
    """Returns integers in the order they were made, grids, and Σ e²/2 by output."""
    inputs = kernel.shape[0]
    size = spec.group_size or inputs
    current = spec.group_size is not None and not options.static_groups
    of_input = order // size if options.static_groups else jnp.arange(inputs) // size

    def visit(
        place: jax.Array, row: jax.Array, made: tuple, pending: Pending
    ) -> tuple[jax.Array, tuple]:
        integers, grid = made
        if current:
            grid = jax.lax.cond(
                place % size == 0,
                lambda grid: _refitted(pending, place, grid, size, spec),
                lambda grid: grid,
                grid,
            )
        own = of_input[place]
        scale, zero = grid.scale[own], grid.zero[own]
        q = grids.quantize(row, scale, zero, spec)
        integers = jax.lax.dynamic_update_index_in_dim(integers, q, place, 0)
        return grids.dequantize(q, scale, zero, spec), (integers, grid)

    integers = vary_like(jnp.zeros(kernel.shape, jnp.uint8), kernel)
    made, loss = eliminate(
        jnp.where(alive[:, None], kernel, 0)[order],
        factor,
        visit,
        (integers, grids.fit_grid(kernel, spec)),
        block=options.block,
    )
    integers, grid = made
    return integers, grid, loss


def _refitted(
    pending: Pending, place: jax.Array, grid: Grid, size: int, spec: GridSpec
) -> Grid:
    """Fits the grid of the group that begins at `place` to what W has become."""
    made = grids.fit_grid(pending.rows(place, size), spec)
    return jax.tree.map(
        lambda all_, new: jax.lax.dynamic_update_slice_in_dim(
            all_, new, place // size, 0
        ),
        grid,
        made,
    )
