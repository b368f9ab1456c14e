"""Changes a matrix input by input, while later inputs compensate for the error.

Input i, a row w of the kernel W `[inputs, outputs]`, is replaced by w̃. With U the upper
Cholesky factor of H⁻¹ = UᵀU and the error e = (w − w̃) / U_ii, later inputs become
W_j ← W_j − U_ij e. This minimises ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) given the values chosen so
far. The choice of w̃ makes the method: rounded weights for GPTQ, zeros at masked weights
for SparseGPT.

No inverse is formed. R = U⁻¹ is the upper Cholesky factor of H = R Rᵀ. All updates
together say W − Ŵ = UᵀE, hence E = Rᵀ(W − Ŵ): when input i is visited, earlier inputs
j < i have added Σ_j (R_ji / R_ii) (W − Ŵ)_j to it. The present values of inputs that
are not visited yet are those for which E would be 0, a triangular system.

References:
  Frantar et al., GPTQ, ICLR 2023, §3; Frantar and Alistarh, SparseGPT, ICML 2023, §3.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

# Increases of the damping, and the first one above a damping of zero.
_TRIES, _FIRST = 3, 1e-5
# Inputs after which their updates are applied to the rest of the block. So many rows of
# a few hundred outputs fit in the cache of a core.
_STEP = 16


class Pending(NamedTuple):
    """The inputs in the middle of a block, whose updates are not applied yet.

    Attributes:
      original: W, `[inputs, outputs]`.
      weights: W with the updates of the blocks before, `[inputs, outputs]`.
      shares: R_ji / R_ii in row j and column i, `[inputs, inputs]`.
      start: number of the block's first input.
      changes: W − Ŵ of the block's inputs so far, `[block, outputs]`; 0 for inputs that
        are not visited.
    """

    original: jax.Array
    weights: jax.Array
    shares: jax.Array
    start: jax.Array
    changes: jax.Array

    def rows(self, place: jax.Array, count: int) -> jax.Array:
        """Returns the present values of `count` inputs from `place` on.

        Args:
          place: number of the first one; all inputs before it have been visited.
          count: number of inputs.
        """
        # The values x of inputs i >= place have E_i = 0. With s_ji = R_ji / R_ii and
        # d = x - W this reads
        #   d_i + Σ_{place <= j < i} s_ji d_j = Σ_{j < place} s_ji (W - Ŵ)_j,
        # a unit lower triangular system for d.
        first, own = (
            jax.lax.dynamic_slice_in_dim(array, place, count)
            for array in (self.original, self.weights)
        )
        ahead = jax.lax.dynamic_slice_in_dim(self.shares, place, count, axis=1)
        square = jax.lax.dynamic_slice_in_dim(ahead, place, count)
        ahead = jax.lax.dynamic_slice_in_dim(ahead, self.start, len(self.changes))
        added = own - first + _product(ahead.T, self.changes)
        return first + jax.scipy.linalg.solve_triangular(
            square, added, trans=1, unit_diagonal=True
        )


# (place, row, state, pending) -> (value, state): replaces `row` [outputs], the present
# value of input `place`, by `value`. The state is passed on from visit to visit.
Visit = Callable[[jax.Array, jax.Array, Any, Pending], tuple[jax.Array, Any]]
# The state of visits, W − Ŵ of the block so far, and ½ Σ e² of each output.
_Carry = tuple[Any, jax.Array, jax.Array]


def eliminate(
    weights: Float[Array, "inputs outputs"],
    factor: Float[Array, "inputs inputs"],
    visit: Visit,
    state: Any,
    *,
    block: int,
    begin: Callable[[jax.Array, Any, Pending], Any] | None = None,
) -> tuple[Any, Float[Array, " outputs"]]:
    """Visits the inputs in order; later inputs compensate for every change.

    Args:
      weights: W.
      factor: R.
      visit: replaces an input, see `Visit`.
      state: of the first visit.
      block: inputs whose updates are applied together to later blocks; affects the time
        but not the result.
      begin: `(place, state, pending) -> state`, called before each block. The last
        block is padded with inputs of zeros.

    Returns:
      The state after the last visit, and ½ Σ e² of each output.
    """
    inputs = len(weights)
    block = min(block, inputs)
    original, factor = _pad_inputs(weights, factor, -inputs % block)
    scale = jnp.diagonal(factor)
    # Column i divided by R_ii.
    shares, count = factor / scale, len(original) // block

    def outer(number: jax.Array, carry: tuple) -> tuple:
        weights, state, loss = carry
        start = number * block
        none = jnp.zeros_like(original[:block])
        pending = Pending(original, weights, shares, start, none)
        if begin is not None:
            state = begin(start, state, pending)
        # The inputs that pad the last block are not visited.
        real = jnp.minimum(block, inputs - start)
        state, changes, loss = _visit_block(
            real, scale, pending, visit, (state, none, loss)
        )
        rows = jax.lax.dynamic_slice_in_dim(shares, start, block)

        def update(other: jax.Array, weights: jax.Array) -> jax.Array:
            ahead = jax.lax.dynamic_slice_in_dim(rows, other * block, block, axis=1)
            later = jax.lax.dynamic_slice_in_dim(weights, other * block, block)
            later += _product(ahead.T, changes)
            return jax.lax.dynamic_update_slice_in_dim(
                weights, later, other * block, axis=0
            )

        # Only later blocks are updated; R is upper triangular, so that half of the
        # products are left out.
        return jax.lax.fori_loop(number + 1, count, update, weights), state, loss

    carry = original, state, jnp.zeros_like(original[0])
    _, state, loss = jax.lax.fori_loop(0, count, outer, carry)
    return state, loss


def _visit_block(
    count: jax.Array, scale: jax.Array, pending: Pending, visit: Visit, carry: _Carry
) -> _Carry:
    """Visits the first `count` inputs of a block, in groups of at most `_STEP`.

    Args:
      count: number of inputs to visit.
      scale: R_ii.
      pending: the inputs before the first visit.
      visit: see `eliminate`.
      carry: see `_Carry`.
    """
    start, block = pending.start, len(pending.changes)
    size = next(size for size in range(_STEP, 0, -1) if block % size == 0)
    first, before, shares = (
        jax.lax.dynamic_slice_in_dim(array, start, block)
        for array in (pending.original, pending.weights, pending.shares)
    )
    square = jax.lax.dynamic_slice_in_dim(shares, start, block, axis=1)

    def group(number: jax.Array, carry: _Carry) -> _Carry:
        begin = number * size
        ahead = jax.lax.dynamic_slice_in_dim(square, begin, size, axis=1)
        own = jax.lax.dynamic_slice_in_dim(before, begin, size)
        # The updates of all groups before; changes of later inputs are still 0.
        own += _product(ahead.T, carry[1])
        ahead = jax.lax.dynamic_slice_in_dim(ahead, begin, size)

        def step(number: jax.Array, carry: tuple) -> tuple:
            own, state, changes, loss = carry
            place = begin + number
            row = own[number]
            now = pending._replace(changes=changes)
            value, state = visit(start + place, row, state, now)
            # W - Ŵ is relative to the original W, the error e to the present row:
            # e = (row - value) / U_ii = R_ii (row - value).
            change = first[place] - value
            loss += (scale[start + place] * (row - value)) ** 2 / 2
            changes = jax.lax.dynamic_update_index_in_dim(changes, change, place, 0)
            # Rows of visited inputs change, too, but are not read again.
            return own + ahead[number][:, None] * change, state, changes, loss

        visits = jnp.clip(count - begin, 0, size)
        return jax.lax.fori_loop(0, visits, step, (own, *carry))[1:]

    return jax.lax.fori_loop(0, block // size, group, carry)


def _pad_inputs(
    weights: jax.Array, factor: jax.Array, more: int
) -> tuple[jax.Array, jax.Array]:
    """Appends inputs of zeros, with an identity block in R, that change nothing."""
    ends = jnp.arange(len(weights), len(weights) + more)
    factor = jnp.pad(factor, ((0, more), (0, more))).at[ends, ends].set(1)
    return jnp.pad(weights, ((0, more), (0, 0))), factor


class Factored(NamedTuple):
    """A factored Hessian.

    Attributes:
      factor: R, upper triangular, of the damped and ordered H = R Rᵀ.
      order: the order of inputs in R.
      alive: mask of the inputs that were not always zero. Weights of the other inputs
        have no effect and should be set to 0; H has a 1 on their diagonal.
      damping: share of the mean diagonal that was added to H.
    """

    factor: Float[Array, "inputs inputs"]
    order: Int[Array, " inputs"]
    alive: Bool[Array, " inputs"]
    damping: float


def check_problem(kernel: jax.Array, hessian: jax.Array, name: str) -> None:
    """Raises ValueError unless a kernel is finite and fits its Hessian."""
    types = [f"{array.dtype}{list(array.shape)}" for array in (kernel, hessian)]
    if (
        kernel.ndim != 2
        or not kernel.size
        or kernel.dtype not in ("float32", "float64")
        or kernel.dtype != hessian.dtype
    ):
        raise ValueError(
            f"{name}: kernel and Hessian must be matrices, both float32 or both "
            f"float64: got {types[0]} and {types[1]}"
        )
    if hessian.shape != (len(kernel), len(kernel)):
        raise ValueError(
            f"{name}: the Hessian must be [inputs, inputs] for a kernel [inputs, "
            f"outputs]: got {types[1]} for {types[0]}"
        )
    if not _is_finite(kernel):
        raise ValueError(f"{name}: the kernel is not finite")


def factorize(
    hessian: Float[Array, "inputs inputs"],
    damping: float,
    name: str,
    *,
    ordered: bool = False,
) -> Factored:
    """Returns the upper Cholesky factor of H + share · mean diagonal · I.

    The share is `damping`; if there is no factor, it is increased tenfold, up to three
    times.

    Args:
      hessian: H.
      damping: the first share.
      name: of the layer, for errors.
      ordered: sorts the inputs by decreasing diagonal of H.

    Raises:
      ValueError: H is not symmetric or not finite.
      numpy.linalg.LinAlgError: no share gives a factor; the message names the layer.
    """
    share = damping
    for _ in range(_TRIES + 1):
        factor, order, alive, facts = _factorize(
            hessian, jnp.asarray(share, hessian.dtype), ordered=ordered
        )
        finite, symmetric, definite = np.asarray(facts)
        if not finite:
            raise ValueError(f"{name}: the Hessian is not finite")
        if not symmetric:
            raise ValueError(f"{name}: the Hessian is not symmetric")
        if definite:
            return Factored(factor, order, alive, share)
        share = 10 * (share or _FIRST)
    raise np.linalg.LinAlgError(
        f"{name}: the Hessian is not positive definite with a damping of {damping}, "
        f"nor of {share / 10:g}; it needs more or more varied calibration data"
    )


@functools.partial(jax.jit, static_argnames="ordered")
def _factorize(hessian: jax.Array, share: jax.Array, *, ordered: bool) -> tuple:
    diagonal = jnp.diagonal(hessian)
    alive = diagonal != 0
    diagonal = jnp.where(alive, diagonal, 1)
    largest = jnp.max(jnp.abs(hessian))
    asymmetry = jnp.max(jnp.abs(hessian - hessian.T))
    damped = hessian + jnp.diag(share * jnp.mean(diagonal) + ~alive)
    order = jnp.arange(len(hessian))
    if ordered:
        order = jnp.argsort(-diagonal, stable=True)
        damped = damped[order][:, order]
    # With J the reversal of rows, J H J = L Lᵀ gives H = (J L J)(J L J)ᵀ, and J L J is
    # upper triangular.
    with jax.default_matmul_precision("highest"):
        lower = jax.lax.linalg.cholesky(damped[::-1, ::-1], symmetrize_input=False)
    factor = lower[::-1, ::-1]
    # Without a factor, `cholesky` returns NaN.
    finite, definite = jnp.isfinite(hessian).all(), jnp.isfinite(factor).all()
    symmetric = asymmetry <= 1e-3 * largest
    return factor, order, alive, jnp.stack((finite, symmetric, definite))


@jax.jit
def _is_finite(kernel: jax.Array) -> jax.Array:
    return jnp.isfinite(kernel).all()


def _product(left: Shaped[Array, "n k"], right: Shaped[Array, "k m"]) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")
