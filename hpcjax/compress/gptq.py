"""GPTQ: inputs are quantized one by one, and later ones compensate for the error.

Kernels are `[inputs, outputs]`, the transpose of the paper's W, so that a step works on
contiguous memory.

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
from hpcjax.compress.elimination import Pending, check_problem, eliminate, factorize
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
    """Adds b sequences: H ← H n/(n+b) + 2/(n+b) Σ x xᵀ, n ← n + b.

    Args:
      state: of the sequences so far.
      x: inputs of the layer, `[b, ..., inputs]`; the sum is over all but the last axis.
    """
    rows = x.reshape(-1, x.shape[-1])
    dtype, count = state.matrix.dtype, state.count + x.shape[0]
    total = jnp.einsum(
        "ri,rj->ij", rows, rows, precision="highest", preferred_element_type=dtype
    )
    # n counts sequences, not tokens, as in the published code; this only scales H. The
    # maximum avoids 0 / 0 if there are no sequences at all.
    before, after = state.count.astype(dtype), jnp.maximum(count, 1).astype(dtype)
    matrix = state.matrix * (before / after) + total * (2 / after)
    return Hessian(matrix=matrix, count=count)


class Solved(NamedTuple):
    """A quantized kernel.

    Attributes:
      integers: `[inputs, outputs]`, in the original order of inputs.
      grid: of each group and output.
      group: the group of each input, `[inputs]`.
      loss: ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) with the damped H. Inputs that were always zero in
        the calibration have W = 0 here.
      order: the order in which inputs were quantized.
      damping: share of the mean diagonal that was added to H.
    """

    integers: UInt8[Array, "inputs outputs"]
    grid: Grid
    group: Int[Array, " inputs"]
    loss: Float[Array, ""]
    order: Int[Array, " inputs"]
    damping: float

    def kernel(self, spec: GridSpec) -> Float[Array, "inputs outputs"]:
        """Returns the dequantized weights Ŵ."""
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
    """Quantizes a kernel such that ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) stays small.

    Inputs are visited in order. The weights w of input i are rounded to w̃; then the
    error e = (w − w̃) / U_ii is subtracted from later inputs j, W_j ← W_j − U_ij e, with
    U the upper Cholesky factor of H⁻¹ = UᵀU. Without groups, the grid is fitted to the
    original W. With groups, the grid of a group is fitted when its first input is
    reached, to the updated W, or, with `static_groups`, to the original W.

    Args:
      kernel: W, `[inputs, outputs]`, float32 or float64.
      hessian: H, `[inputs, inputs]`, such as from `hessian_update`.
      spec: the grid.
      options: damping and order; None for the defaults.
      mesh: splits the outputs over the devices of `axis`; None for one device.
      axis: of the mesh.
      name: of the layer, for errors.

    Raises:
      ConfigError: the groups do not divide the inputs, or the mesh has no such axis.
      ValueError: W or H has a wrong shape or dtype or is not finite, or H is not
        symmetric.
      numpy.linalg.LinAlgError: H is not positive definite, not even with three tenfold
        increases of the damping.

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
    factored = factorize(hessian, options.damping, name, ordered=options.act_order)
    integers, grid, loss, group = _quantize(
        kernel,
        *(factored.factor, factored.order, factored.alive),
        spec=spec,
        options=options,
        mesh=mesh,
        axis=axis,
    )
    return Solved(integers, grid, group, loss, factored.order, factored.damping)


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
    """Returns integers, grids, the loss, and the group of each input."""
    run = functools.partial(_quantize_columns, spec=spec, options=options)
    if mesh is not None:
        # Outputs are independent of each other: no communication is needed.
        columns = P(None, axis)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(columns, P(), P(), P()),
            out_specs=(columns, columns, P(axis)),
        )
    integers, grid, losses = run(kernel, factor, order, alive)
    # The inverse permutation: input i was visited at place[i].
    place = jnp.argsort(order)
    # A group is of neighbouring inputs if grids were fitted first, else of inputs that
    # were visited after one another.
    by_input = jnp.arange(len(order)) if options.static_groups else place
    group = by_input // (spec.group_size or len(order))
    return integers[place], grid, jnp.sum(losses), group


def _quantize_columns(
    kernel: jax.Array,
    factor: jax.Array,
    order: jax.Array,
    alive: jax.Array,
    *,
    spec: GridSpec,
    options: GptqOptions,
) -> tuple[jax.Array, Grid, jax.Array]:
    """Returns integers in the order of visits, grids, and Σ e²/2 of each output."""
    inputs = kernel.shape[0]
    size = spec.group_size or inputs
    refit = spec.group_size is not None and not options.static_groups
    of_input = order // size if options.static_groups else jnp.arange(inputs) // size

    def visit(
        place: jax.Array, row: jax.Array, state: tuple, pending: Pending
    ) -> tuple[jax.Array, tuple]:
        integers, grid = state
        if refit:
            grid = jax.lax.cond(
                place % size == 0,
                lambda grid: _refit_group(pending, place, grid, size, spec),
                lambda grid: grid,
                grid,
            )
        own = of_input[place]
        scale, zero = grid.scale[own], grid.zero[own]
        q = grids.quantize(row, scale, zero, spec)
        integers = jax.lax.dynamic_update_index_in_dim(integers, q, place, 0)
        return grids.dequantize(q, scale, zero, spec), (integers, grid)

    # Inside `shard_map`, a loop's state must vary over the mesh as its updates do.
    integers = vary_like(jnp.zeros(kernel.shape, jnp.uint8), kernel)
    state, loss = eliminate(
        # The grid is fitted before the weights of dead inputs become zero, as in the
        # published code.
        jnp.where(alive[:, None], kernel, 0)[order],
        factor,
        visit,
        (integers, grids.fit_grid(kernel, spec)),
        block=options.block,
    )
    integers, grid = state
    return integers, grid, loss


def _refit_group(
    pending: Pending, place: jax.Array, grid: Grid, size: int, spec: GridSpec
) -> Grid:
    """Replaces the grid of the group that begins at `place` by one of the updated W."""
    own = grids.fit_grid(pending.rows(place, size), spec)
    return jax.tree.map(
        lambda all_, new: jax.lax.dynamic_update_slice_in_dim(
            all_, new, place // size, 0
        ),
        grid,
        own,
    )
