"""Mixture of experts: each token goes through the few experts its router chooses."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpcjax.core.varying import vary_like
from hpcjax.layers import _precision

# (rows, kernel [experts, inputs, outputs], bias [experts, outputs] or None) -> rows;
# each row is multiplied by the matrix of its own expert.
ExpertDense = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
ExpertFunction = Callable[[jax.Array, ExpertDense], jax.Array]


class Routing(NamedTuple):
    """The router's choice of experts for each token.

    Attributes:
      probabilities: softmax over all experts, float32.
      experts: numbers of the chosen experts, the most probable first.
      gates: the weights of the chosen experts' results in the output.
    """

    probabilities: Float[Array, "tokens experts"]
    experts: Int[Array, "tokens top_k"]
    gates: Float[Array, "tokens top_k"]


def route(logits: Float[Array, "tokens experts"], top_k: int) -> Routing:
    """Chooses the `top_k` most probable experts of each token.

    p = softmax(logits) in float32. With top_k = 1 the gate is p itself, through which
    the router gets its gradient: p / p would be the constant 1. With several choices it
    is p / Σ p over the chosen ones.

    Args:
      logits: the router's outputs, `[tokens, experts]`.
      top_k: number of experts for each token.

    Raises:
      ValueError: `top_k` is not between 1 and the number of experts.

    References:
      Shazeer et al., arXiv 1701.06538, §2.1; Fedus et al., arXiv 2101.03961, §2.1.

    Examples:
      >>> routing = route(jnp.log(jnp.array([[0.1, 0.6, 0.3]])), 2)
      >>> routing.experts.tolist(), bool(jnp.isclose(routing.gates[0, 0], 2 / 3))
      ([[1, 2]], True)
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"top_k must be between 1 and the number of experts: got top_k={top_k}, "
            f"{logits.shape[-1]} experts"
        )
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    gates, experts = lax.top_k(probabilities, top_k)
    if top_k > 1:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(probabilities, experts, gates)


def load_balance_loss(
    routing: Routing, *, axis_name: str | None = None
) -> Float[Array, ""]:
    """Returns E Σ_e f_e P_e over E experts.

    f_e is the fraction of tokens whose first choice is e, P_e the mean probability of
    e. The loss is 1 if both are uniform and E if one expert gets every token with
    probability 1. Only P has a gradient; f is piecewise constant.

    Args:
      routing: the routing of this device's tokens.
      axis_name: a mesh axis over which f and P are averaged before they are
        multiplied; None: these tokens alone.

    References:
      Fedus et al., Switch Transformers, arXiv 2101.03961, Eq. 4.

    Examples:
      >>> float(load_balance_loss(route(jnp.array([[50.0, 0.0], [0.0, 50.0]]), 1)))
      1.0
    """
    count = routing.probabilities.shape[-1]
    first = jax.nn.one_hot(routing.experts[:, 0], count, dtype=jnp.float32)
    share, probability = jnp.mean(first, 0), jnp.mean(routing.probabilities, 0)
    if axis_name is not None:
        share, probability = lax.pmean((share, probability), axis_name)
    return count * jnp.sum(share * probability)


def router_z_loss(logits: Float[Array, "tokens experts"]) -> Float[Array, ""]:
    """Returns the mean over tokens of (log Σ_e exp logit_e)²; it keeps logits small.

    References:
      Zoph et al., ST-MoE, arXiv 2202.08906, Eq. 5.

    Examples:
      >>> float(router_z_loss(jnp.zeros((3, 1))))
      0.0
    """
    sizes = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return jnp.mean(jnp.square(sizes))


def expert_capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Returns ⌈factor · top_k · tokens / experts⌉, at most `tokens`.

    Examples:
      >>> expert_capacity(6, 4, 1, 1.0), expert_capacity(6, 4, 2, 2.0)
      (2, 6)
    """
    # Rounded before the ceiling: in floating point 1.1 · 2 · 50 / 2 exceeds 55.
    return min(math.ceil(round(factor * top_k * tokens / experts, 9)), tokens)


def experts(
    x: Float[Array, "tokens width"],
    routing: Routing,
    function: ExpertFunction,
    *,
    capacity: int | None = None,
    axis_name: str | None = None,
    compute: str = "float32",
) -> Float[Array, "tokens width"]:
    """Returns Σ_j gate_j · function_{e_j}(x) over each token's chosen experts e_j.

    Without a capacity no token is dropped: rows are sorted by expert and multiplied by
    `jax.lax.ragged_dot` (which supports `vmap` over all operands or none). With one,
    every expert takes at most `capacity` rows: first all tokens' first choices in order
    of the tokens, then their second choices, and so on. A choice whose expert is full
    is dropped and adds nothing. If nothing is dropped both give the same result.

    Args:
      x: one row for each token.
      routing: from `route`.
      function: `(rows, dense) -> rows`, the network of an expert. It acts on each row
        alone and applies weights by `dense(rows, kernel, bias)`, which multiplies each
        row by its own expert's matrix in `kernel` [experts, inputs, outputs] and adds
        its row of `bias` [experts, outputs], if any.
      capacity: rows that an expert takes from each device; None: no limit.
      axis_name: with a capacity and inside `shard_map`: the mesh axis over which tokens
        and experts are split. Each of n devices holds its own tokens, routed among all
        experts, and matrices `[experts / n, ...]` in the order of the axis; two
        `all_to_all` of `experts · capacity · width` numbers each move the rows.
      compute: dtype of the products' operands; they accumulate in float32.

    Returns:
      `[tokens, width]` in the dtype of `x`.

    Raises:
      ValueError: a capacity below 1, an axis without a capacity, or one that does not
        divide the number of experts.

    References:
      Lepikhin et al., GShard, arXiv 2006.16668, §2.2; Gale et al., MegaBlocks, arXiv
      2211.15841.

    Examples:
      >>> double = jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
      >>> routing = route(jnp.array([[0.0, 99.0], [99.0, 0.0]]), 1)
      >>> x = jnp.ones((2, 2))
      >>> experts(x, routing, lambda rows, dense: dense(rows, double, None)).tolist()
      [[2.0, 2.0], [1.0, 1.0]]
    """
    count = routing.probabilities.shape[-1]
    if capacity is None:
        if axis_name is not None:
            raise ValueError(f"experts over an axis need a capacity: got {axis_name=}")
        rows = _dropless(x, routing, function, count, compute)
    else:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1: got capacity={capacity}")
        rows = _with_capacity(
            x, routing, function, (count, capacity), axis_name, compute
        )
    mixed = jnp.sum(rows.astype(jnp.float32) * routing.gates.T[..., None], axis=0)
    return mixed.astype(x.dtype)


def _ragged(
    rows: jax.Array, kernel: jax.Array, dtype: str | None, sizes: jax.Array
) -> jax.Array:
    return lax.ragged_dot(rows, kernel, sizes, preferred_element_type=dtype)


def _batched(rows: jax.Array, kernel: jax.Array, dtype: str | None) -> jax.Array:
    return jnp.matmul(rows, kernel, preferred_element_type=dtype)


def _dropless(
    x: jax.Array, routing: Routing, function: ExpertFunction, count: int, compute: str
) -> jax.Array:
    """Returns the experts' results `[top_k, tokens, width]`."""
    tokens, top_k = routing.experts.shape
    # Entry j · tokens + t is the j-th choice of token t. Sorted by expert, rows of one
    # expert are contiguous, as `ragged_dot` needs; `sizes` are the lengths of the runs.
    chosen = routing.experts.T.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=count)
    own = chosen[order]

    def dense(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = _precision.accumulate_float32(_ragged, rows, kernel, compute, sizes)
        return (y if bias is None else y + bias[own].astype(y.dtype)).astype(compute)

    # The remainder recovers t; the argsort of a permutation is its inverse.
    y = function(x[order % tokens], dense)
    return y[jnp.argsort(order)].reshape(top_k, tokens, -1)


def _with_capacity(
    x: jax.Array,
    routing: Routing,
    function: ExpertFunction,
    sizes: tuple[int, int],
    axis_name: str | None,
    compute: str,
) -> jax.Array:
    """Returns the experts' results `[top_k, tokens, width]`, zero where dropped."""
    count, capacity = sizes
    tokens, top_k = routing.experts.shape
    # Entry j · tokens + t is the j-th choice of token t, so that the running count
    # below serves all first choices before any second one. A choice's place is the
    # number of earlier choices of the same expert. Rows lie at expert · capacity +
    # place; a choice that is dropped points behind the end, where `set` and `get`
    # ignore it.
    chosen = routing.experts.T.reshape(-1)
    taken = jnp.cumsum(jax.nn.one_hot(chosen, count, dtype=jnp.int32), axis=0)
    place = jnp.take_along_axis(taken, chosen[:, None], axis=1)[:, 0] - 1
    beyond = count * capacity
    slot = jnp.where(place < capacity, chosen * capacity + place, beyond)
    candidates = jnp.tile(x, (top_k, 1))
    empty = vary_like(jnp.zeros((beyond, x.shape[-1]), x.dtype), candidates)
    rows = empty.at[slot].set(candidates, mode="drop").reshape(count, capacity, -1)

    def dense(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = _precision.accumulate_float32(_batched, rows, kernel, compute)
        y = y if bias is None else y + bias[:, None].astype(y.dtype)
        return y.astype(compute)

    if axis_name is None:
        y = function(rows, dense)
    else:
        devices = lax.axis_size(axis_name)
        if count % devices:
            raise ValueError(
                f"the devices of axis {axis_name!r} must divide the experts: got "
                f"{devices} devices, {count} experts"
            )
        exchange = functools.partial(lax.all_to_all, axis_name=axis_name, tiled=True)
        # [experts, capacity, width] on each device becomes [experts / n, n · capacity,
        # width]: all rows of the experts it owns. The second exchange is the inverse
        # and returns every row to its slot.
        rows = exchange(rows, split_axis=0, concat_axis=1)
        y = exchange(function(rows, dense), split_axis=1, concat_axis=0)
    y = y.reshape(beyond, -1).at[slot].get(mode="fill", fill_value=0)
    return y.reshape(top_k, tokens, -1)
