"""Changing a matrix input after input while the inputs that follow make up for it.

With U the upper Cholesky factor of H⁻¹ = UᵀU and e = (w − w̃) / U_ii the error of input
i, the rest becomes W_j ← W_j − U_ij e: the least of ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) that the
values chosen so far allow. What w̃ is makes the method: a rounded weight is GPTQ, a
zero where a mask says so SparseGPT.

No inverse is formed. R = U⁻¹ is the upper Cholesky factor of H = R Rᵀ, and W − Ŵ = UᵀE
says E = Rᵀ(W − Ŵ): when input i is reached, earlier ones have added
Σ_j (R_ji / R_ii) (W − Ŵ)_j to it. What inputs further on have become follows from
E = 0 for them, a triangular system.

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

_TRIES, _FIRST = 3, 1e-5
# Inputs whose updates reach the rest of their block at once: as many as fit in a core's
# cache, with a few hundred outputs.
_STEP = 16


class Pending(NamedTuple):
    """The inputs as they are in the middle of a block, whose updates are not applied.

    Attributes:
      given: W, `[inputs, outputs]`.
      weights: the same with what the blocks before have added.
      shares: R_ji / R_ii, `[inputs, inputs]`.
      start: the block's place.
      changes: W − Ŵ of the block's inputs so far, `[block, outputs]`; the others are
        zero.
    """

    given: jax.Array
    weights: jax.Array
    shares: jax.Array
    start: jax.Array
    changes: jax.Array

    def rows(self, place: jax.Array, count: int) -> jax.Array:
        """Returns what `count` inputs from `place` on have become.

        Args:
          place: of the first; those before it are done.
          count: how many.
        """
        first, own = (
            jax.lax.dynamic_slice_in_dim(array, place, count)
            for array in (self.given, self.weights)
        )
        ahead = jax.lax.dynamic_slice_in_dim(self.shares, place, count, axis=1)
        square = jax.lax.dynamic_slice_in_dim(ahead, place, count)
        ahead = jax.lax.dynamic_slice_in_dim(ahead, self.start, len(self.changes))
        added = own - first + _product(ahead.T, self.changes)
        return first + jax.scipy.linalg.solve_triangular(
            square, added, trans=1, unit_diagonal=True
        )


# (place, row, made, pending) -> (value, made): what input `place`, now `row` [outputs],
# becomes, and what the visits before made, with this one's.
Visit = Callable[[jax.Array, jax.Array, Any, Pending], tuple[jax.Array, Any]]
# What the visits made, W − Ŵ of the block so far, and ½ Σ e² of each output.
_Carry = tuple[Any, jax.Array, jax.Array]


def eliminate(
    weights: Float[Array, "inputs outputs"],
    factor: Float[Array, "inputs inputs"],
    visit: Visit,
    made: Any,
    *,
    block: int,
    begin: Callable[[jax.Array, Any, Pending], Any] | None = None,
) -> tuple[Any, Float[Array, " outputs"]]:
    """Visits the inputs in order; those that follow make up for every change.

    Args:
      weights: W.
      factor: R.
      visit: what an input becomes, see `Visit`.
      made: given to the first visit.
      block: inputs whose updates reach the rest at once; changes no result.
      begin: `(place, made, pending) -> made` before each block. The last block is
        filled up with inputs of zeros.

    Returns:
      What the visits made, and ½ Σ e² for each output.
    """
    inputs = len(weights)
    block = min(block, inputs)
    given, factor = _filled_up(weights, factor, -inputs % block)
    scale = jnp.diagonal(factor)
    shares, count = factor / scale, len(given) // block

    def outer(number: jax.Array, carry: tuple) -> tuple:
        weights, made, loss = carry
        start = number * block
        none = jnp.zeros_like(given[:block])
        pending = Pending(given, weights, shares, start, none)
        if begin is not None:
            made = begin(start, made, pending)
        # The inputs that fill up the last block are not visited.
        real = jnp.minimum(block, inputs - start)
        made, changes, loss = _within(real, scale, pending, visit, (made, none, loss))
        rows = jax.lax.dynamic_slice_in_dim(shares, start, block)

        def update(other: jax.Array, weights: jax.Array) -> jax.Array:
            ahead = jax.lax.dynamic_slice_in_dim(rows, other * block, block, axis=1)
            later = jax.lax.dynamic_slice_in_dim(weights, other * block, block)
            later += _product(ahead.T, changes)
            return jax.lax.dynamic_update_slice_in_dim(
                weights, later, other * block, axis=0
            )

        return jax.lax.fori_loop(number + 1, count, update, weights), made, loss

    carry = given, made, jnp.zeros_like(given[0])
    _, made, loss = jax.lax.fori_loop(0, count, outer, carry)
    return made, loss


def _within(
    count: jax.Array, scale: jax.Array, pending: Pending, visit: Visit, carry: _Carry
) -> _Carry:
    """Visits `count` inputs of a block, in groups of `_STEP` or a little less.

    Args:
      count: inputs to visit.
      scale: R_ii.
      pending: before the first visit.
      visit: see `eliminate`.
      carry: see `_Carry`.
    """
    start, block = pending.start, len(pending.changes)
    size = next(size for size in range(_STEP, 0, -1) if block % size == 0)
    first, before, shares = (
        jax.lax.dynamic_slice_in_dim(array, start, block)
        for array in (pending.given, pending.weights, pending.shares)
    )
    square = jax.lax.dynamic_slice_in_dim(shares, start, block, axis=1)

    def group(number: jax.Array, carry: _Carry) -> _Carry:
        begin = number * size
        ahead = jax.lax.dynamic_slice_in_dim(square, begin, size, axis=1)
        own = jax.lax.dynamic_slice_in_dim(before, begin, size)
        own += _product(ahead.T, carry[1])
        ahead = jax.lax.dynamic_slice_in_dim(ahead, begin, size)

        def step(number: jax.Array, carry: tuple) -> tuple:
            own, made, changes, loss = carry
            place = begin + number
            row = own[number]
            now = pending._replace(changes=changes)
            value, made = visit(start + place, row, made, now)
            change = first[place] - value
            loss += (scale[start + place] * (row - value)) ** 2 / 2
            changes = jax.lax.dynamic_update_index_in_dim(changes, change, place, 0)
            return own + ahead[number][:, None] * change, made, changes, loss

        visits = jnp.clip(count - begin, 0, size)
        return jax.lax.fori_loop(0, visits, step, (own, *carry))[1:]

    return jax.lax.fori_loop(0, block // size, group, carry)


def _filled_up(
    weights: jax.Array, factor: jax.Array, more: int
) -> tuple[jax.Array, jax.Array]:
    """Adds inputs of zeros, which change nothing."""
    ends = jnp.arange(len(weights), len(weights) + more)
    factor = jnp.pad(factor, ((0, more), (0, more))).at[ends, ends].set(1)
    return jnp.pad(weights, ((0, more), (0, 0))), factor


class Factored(NamedTuple):
    """A Hessian, ready to be used.

    Attributes:
      factor: R, upper triangular, of the damped and ordered H = R Rᵀ.
      order: the order of inputs that R is of.
      alive: inputs that were not always zero. The others cost nothing: their weights
        are to be dropped, and H is one on their diagonal.
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
    if not _finite(kernel):
        raise ValueError(f"{name}: the kernel is not finite")


def factored(
    hessian: Float[Array, "inputs inputs"],
    damping: float,
    name: str,
    *,
    ordered: bool = False,
) -> Factored:
    """Returns the factor of H + share · mean diagonal · I.

    The share is `damping`, or ten times as much, up to three times, until H has a
    Cholesky factor.

    Args:
      hessian: H.
      damping: the first share.
      name: of the layer, for errors.
      ordered: by falling diagonal of H.

    Raises:
      ValueError: H is not symmetric or not finite.
      numpy.linalg.LinAlgError: it never has a factor; the message names the layer.
    """
    share = damping
    for _ in range(_TRIES + 1):
        factor, order, alive, facts = _factored(
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
def _factored(hessian: jax.Array, share: jax.Array, *, ordered: bool) -> tuple:
    diagonal = jnp.diagonal(hessian)
    alive = diagonal != 0
    diagonal = jnp.where(alive, diagonal, 1)
    size = jnp.max(jnp.abs(hessian))
    far = jnp.max(jnp.abs(hessian - hessian.T))
    more = share * jnp.mean(diagonal) + ~alive
    damped = hessian + jnp.diag(more)
    order = jnp.arange(len(hessian))
    if ordered:
        order = jnp.argsort(-diagonal, stable=True)
        damped = damped[order][:, order]
    # An upper factor is the lower one of H back to front, back to front.
    with jax.default_matmul_precision("highest"):
        lower = jax.lax.linalg.cholesky(damped[::-1, ::-1], symmetrize_input=False)
    factor = lower[::-1, ::-1]
    facts = jnp.isfinite(size), far <= 1e-3 * size, jnp.isfinite(factor).all()
    return factor, order, alive, jnp.stack(facts)


@jax.jit
def _finite(kernel: jax.Array) -> jax.Array:
    return jnp.isfinite(kernel).all()


def _product(left: Shaped[Array, "n k"], right: Shaped[Array, "k m"]) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")
