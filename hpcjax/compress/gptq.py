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
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped, UInt8

from hpcjax.compress import grids
from hpcjax.compress.config import GptqOptions, GridSpec
from hpcjax.compress.grids import Grid
from hpcjax.core.structs import pytree
from hpcjax.core.varying import vary_like

_TRIES, _FIRST = 3, 1e-5


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
    before, after = state.count.astype(dtype), count.astype(dtype)
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
      ConfigError: the groups do not divide the inputs.
      ValueError: H is of another shape, not symmetric or not finite.
      numpy.linalg.LinAlgError: H is not positive definite, not even with a damping
        that was raised ten times as far three times over.

    Examples:
      >>> kernel = jnp.array([[0.3], [-1.0], [2.0]])
      >>> solved = solve(kernel, jnp.eye(3), GridSpec(bits=2))
      >>> solved.integers.ravel().tolist()
      [1, 0, 3]
    """
    options = options or GptqOptions()
    spec.groups(kernel.shape[0])
    _check(kernel, hessian, name)
    if mesh is not None and kernel.shape[1] % mesh.shape[axis]:
        raise ValueError(
            f"{name}: outputs must be a multiple of the devices of {axis!r}: got "
            f"{kernel.shape[1]} and {mesh.shape[axis]}"
        )
    alive = jnp.diagonal(hessian) != 0
    # An input that was always zero costs nothing: its weights are dropped.
    given = jnp.where(alive[:, None], kernel, 0)
    hessian = hessian + jnp.diag(jnp.where(alive, 0, 1).astype(hessian.dtype))
    order = jnp.arange(len(hessian))
    if options.act_order:
        order = jnp.argsort(-jnp.diagonal(hessian), stable=True)
    upper, damping = _factor(hessian[order][:, order], options.damping, name)
    integers, grid, losses = _quantize(
        kernel, given, upper, order, spec=spec, options=options, mesh=mesh, axis=axis
    )
    size = spec.group_size or len(hessian)
    place = jnp.argsort(order)
    by_input = jnp.arange(len(hessian)) if options.static_groups else place
    return Solved(
        integers[place], grid, by_input // size, jnp.sum(losses), order, damping
    )


def _check(kernel: jax.Array, hessian: jax.Array, name: str) -> None:
    inputs = kernel.shape[0]
    if hessian.shape != (inputs, inputs):
        raise ValueError(
            f"{name}: the Hessian must be [{inputs}, {inputs}] for a kernel of "
            f"{inputs} inputs: got {list(hessian.shape)}"
        )
    found = np.asarray(hessian)
    if not np.isfinite(found).all():
        raise ValueError(f"{name}: the Hessian is not finite")
    scale = np.abs(found).max()
    if np.abs(found - found.T).max() > 1e-3 * scale:
        raise ValueError(f"{name}: the Hessian is not symmetric")


def _factor(hessian: jax.Array, damping: float, name: str) -> tuple[jax.Array, float]:
    """Returns U with (H + share · mean diagonal · I)⁻¹ = UᵀU, and the share."""
    share = damping
    for _ in range(_TRIES + 1):
        upper = _inverse_factor(hessian, jnp.asarray(share, hessian.dtype))
        if bool(jnp.isfinite(upper).all()):
            return upper, share
        share = 10 * (share or _FIRST)
    raise np.linalg.LinAlgError(
        f"{name}: the Hessian is not positive definite with a damping of {damping}, "
        f"nor of {share / 10:g}; it needs more or more varied calibration data"
    )


@jax.jit
def _inverse_factor(hessian: jax.Array, share: jax.Array) -> jax.Array:
    n = len(hessian)
    damped = hessian + share * jnp.mean(jnp.diagonal(hessian)) * jnp.eye(
        n, dtype=hessian.dtype
    )
    # H = R Rᵀ with R upper triangular, from the Cholesky factor of H back to front;
    # then U = R⁻¹.
    with jax.default_matmul_precision("highest"):
        lower = jnp.linalg.cholesky(damped[::-1, ::-1])
        inverse = jax.scipy.linalg.solve_triangular(
            lower, jnp.eye(n, dtype=hessian.dtype), lower=True
        )
    return inverse[::-1, ::-1]


@functools.partial(jax.jit, static_argnames=("spec", "options", "mesh", "axis"))
def _quantize(
    *arrays: jax.Array,
    spec: GridSpec,
    options: GptqOptions,
    mesh: Mesh | None,
    axis: str,
) -> tuple[jax.Array, Grid, jax.Array]:
    """Returns what `_columns` does, compiled once for all kernels of a shape."""
    run = functools.partial(_columns, spec=spec, options=options)
    if mesh is not None:
        columns = P(None, axis)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(columns, columns, P(), P()),
            out_specs=(columns, columns, P(axis)),
        )
    return run(*arrays)


def _columns(
    kernel: jax.Array,
    given: jax.Array,
    upper: jax.Array,
    order: jax.Array,
    *,
    spec: GridSpec,
    options: GptqOptions,
) -> tuple[jax.Array, Grid, jax.Array]:
    """Returns integers in the order they were made, grids, and Σ e²/2 by output."""
    inputs = kernel.shape[0]
    size, block = spec.group_size or inputs, min(options.block, inputs)
    current = spec.group_size is not None and not options.static_groups
    grid = grids.fit_grid(kernel, spec)
    more = -inputs % block
    weights, upper = _filled_up(given[order], upper, more)
    of_input = order // size if options.static_groups else jnp.arange(inputs) // size
    of_input = jnp.pad(of_input, (0, more), mode="edge")

    def outer(number: jax.Array, carry: tuple) -> tuple:
        weights, integers, grid, loss = carry
        start = number * block
        rows = jax.lax.dynamic_slice_in_dim(upper, start, block)
        square = jax.lax.dynamic_slice_in_dim(rows, start, block, axis=1)
        before = jax.lax.dynamic_slice_in_dim(weights, start, block)

        def refitted(place: jax.Array, grid: Grid, errors: jax.Array) -> Grid:
            return _refitted(weights, rows, place, grid, errors, size, spec)

        def inner(step: jax.Array, carry: tuple) -> tuple:
            block_weights, integers, grid, errors = carry
            place = start + step
            if current:
                begins = (place % size == 0) & (place < inputs)
                grid = jax.lax.cond(
                    begins,
                    refitted,
                    lambda _, grid, __: grid,
                    place,
                    grid,
                    errors,
                )
            own = of_input[place]
            scale, zero = grid.scale[own], grid.zero[own]
            row = block_weights[step]
            q = grids.quantize(row, scale, zero, spec)
            error = (row - grids.dequantize(q, scale, zero, spec)) / square[step, step]
            block_weights = block_weights - square[step][:, None] * error
            return (
                block_weights,
                jax.lax.dynamic_update_index_in_dim(integers, q, place, 0),
                grid,
                jax.lax.dynamic_update_index_in_dim(errors, error, step, 0),
            )

        errors = jnp.zeros_like(before)
        _, integers, grid, errors = jax.lax.fori_loop(
            0, block, inner, (before, integers, grid, errors)
        )
        # Also the block itself, which is not looked at again.
        weights = weights - _product(rows.T, errors)
        return weights, integers, grid, loss + jnp.sum(errors**2, axis=0) / 2

    integers = vary_like(jnp.zeros(weights.shape, jnp.uint8), weights)
    carry = weights, integers, grid, jnp.zeros_like(weights[0])
    _, integers, grid, loss = jax.lax.fori_loop(
        0, (inputs + more) // block, outer, carry
    )
    return integers[:inputs], grid, loss


def _filled_up(
    weights: jax.Array, upper: jax.Array, more: int
) -> tuple[jax.Array, jax.Array]:
    """Adds inputs of zeros, which are on every grid: they cost and change nothing."""
    ends = jnp.arange(len(weights), len(weights) + more)
    upper = jnp.pad(upper, ((0, more), (0, more))).at[ends, ends].set(1)
    return jnp.pad(weights, ((0, more), (0, 0))), upper


def _refitted(
    weights: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    grid: Grid,
    errors: jax.Array,
    size: int,
    spec: GridSpec,
) -> Grid:
    """Fits the grid of the group that begins at `place` to what W has become.

    `weights` are those before the block, whose errors so far are still to be taken off.
    """
    own = jax.lax.dynamic_slice_in_dim(weights, place, size)
    ahead = jax.lax.dynamic_slice_in_dim(rows, place, size, axis=1)
    made = grids.fit_grid(own - _product(ahead.T, errors), spec)
    return jax.tree.map(
        lambda all_, new: jax.lax.dynamic_update_slice_in_dim(
            all_, new, place // size, 0
        ),
        grid,
        made,
    )


def _product(left: Shaped[Array, "n k"], right: Shaped[Array, "k m"]) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")
