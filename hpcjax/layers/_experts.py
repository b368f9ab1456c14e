"""Mixture of experts: each token goes through the few experts its router chooses."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpcjax.core import shards
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import Axes, vary_like, varying_axes
from hpcjax.layers import _dense

log = logging.getLogger(__name__)

# (rows, kernel [experts, inputs, outputs], bias [experts, outputs] or None) -> rows;
# each row is multiplied by the matrix of its own expert. Both may be `shards.Part`.
ExpertDense = Callable[[jax.Array, Any, Any], jax.Array]
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
    routing: Routing, *, axis_name: Axes | None = None
) -> Float[Array, ""]:
    """Returns E Σ_e f_e P_e over E experts.

    f_e is the fraction of tokens whose first choice is e, P_e the mean probability of
    e. The loss is 1 if both are uniform and E if one expert gets every token with
    probability 1. Only P has a gradient; f is piecewise constant.

    Args:
      routing: the routing of this device's tokens.
      axis_name: mesh axes over which f and P are averaged before they are multiplied,
        so that the loss is that of all tokens; None: these tokens alone.

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
        share, probability = jax.tree.map(
            shards.received, lax.pmean((share, probability), axis_name)
        )
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
    priority: Float[Array, "tokens top_k"] | None = None,
    like: Any = None,
    compute: str = "float32",
) -> Float[Array, "tokens width"]:
    """Returns Σ_j gate_j · function_{e_j}(x) over each token's chosen experts e_j.

    Without a capacity no token is dropped: rows are sorted by expert and multiplied by
    `jax.lax.ragged_dot` (which supports `vmap` over all operands or none). With one,
    every expert takes at most `capacity` rows: first all tokens' first choices in order
    of their priority, then their second choices, and so on. A choice whose expert is
    full is dropped and adds nothing. If nothing is dropped both give the same result.

    Of kernels that are a `core.shards.Part`, inside `shard_map`, each of X devices has
    its own tokens, routed among all experts, and E / X experts. Two `all_to_all` of
    E · capacity · width numbers move the rows to their experts and back. Where features
    of experts are cut as well, over T devices with equal tokens, each of these sends
    capacity / T rows of an expert and they gather what they have received, which drops
    the duplicates (DTD); with `once=False` in the parts all send all rows.

    Args:
      x: one row for each token.
      routing: from `route`.
      function: `(rows, dense) -> rows`, the network of an expert. It acts on each row
        alone and applies weights by `dense(rows, kernel, bias)`, which multiplies each
        row by its own expert's matrix in `kernel` [experts, inputs, outputs] and adds
        its row of `bias` [experts, outputs], if any.
      capacity: rows that an expert takes from each device; None: no limit, which
        between devices is a capacity of all tokens. Between devices it is rounded up to
        a multiple of T.
      priority: of choices, the highest is served first; None for the order of tokens.
      like: a kernel [experts, inputs, features] with which experts begin. Its cuts say
        over which mesh axes experts are split, and over which their features are.
      compute: dtype of the products' operands; they accumulate in float32.

    Returns:
      `[tokens, width]` in the dtype of `x`.

    Raises:
      ValueError: a capacity below 1, or devices that do not have equally many experts.
      ConfigError: tokens that differ along the axes that features are cut over.

    References:
      Lepikhin et al., GShard, arXiv 2006.16668, §2.2; Gale et al., MegaBlocks, arXiv
      2211.15841; Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach, ICS
      2023.

    Examples:
      >>> double = jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
      >>> routing = route(jnp.array([[0.0, 99.0], [99.0, 0.0]]), 1)
      >>> x = jnp.ones((2, 2))
      >>> experts(x, routing, lambda rows, dense: dense(rows, double, None)).tolist()
      [[2.0, 2.0], [1.0, 1.0]]
    """
    tokens, count = routing.probabilities.shape
    spread = _read_spread(like, x, count)
    if capacity is None and spread.devices == 1:
        rows = _dropless(x, routing, function, count, compute)
    else:
        sizes = count, spread.round_up(tokens, capacity)
        function = functools.partial(_exchange, spread, function)
        slots = _find_slots(routing.experts, sizes, priority)
        rows = _with_capacity(x, slots, function, sizes, compute)
    mixed = jnp.sum(rows.astype(jnp.float32) * routing.gates.T[..., None], axis=0)
    return mixed.astype(x.dtype)


class _Spread(NamedTuple):
    """How experts are spread over devices.

    Attributes:
      experts: mesh axes that experts and tokens are split over.
      features: mesh axes that features of experts are cut over; tokens are equal.
      once: whether the devices of `features` share out what they send.
      devices: X, that share out the experts.
      copies: T, with equal tokens.
    """

    experts: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    once: bool = True
    devices: int = 1
    copies: int = 1

    @property
    def rows(self) -> shards.Cuts:
        """How the rows of an expert are cut, in the last dimension but one."""
        return tuple((-2, axis) for axis in self.features) if self.once else ()

    def round_up(self, tokens: int, capacity: int | None) -> int:
        """Returns the least multiple of T that is not below a capacity, or tokens."""
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1: got capacity={capacity}")
        copies = self.copies if self.devices > 1 else 1
        wanted = tokens if capacity is None else capacity
        rounded = -(-wanted // copies) * copies
        if capacity is not None and rounded > capacity:
            _warn_rounded(capacity, copies, rounded)
        return rounded


@functools.cache
def _warn_rounded(capacity: int, copies: int, rounded: int) -> None:
    log.warning(
        "capacity %d is not a multiple of the %d devices with equal tokens; an expert "
        "takes %d rows",
        *(capacity, copies, rounded),
    )


def _read_spread(like: Any, x: jax.Array, count: int) -> _Spread:
    if not isinstance(like, shards.Part):
        return _Spread()
    kernel, of_experts, of_features = shards.open_part(like, -3, -1)
    devices, copies = (lax.axis_size(axes) for axes in (of_experts, of_features))
    if len(kernel) * devices != count:
        raise ValueError(
            f"each of {devices} devices must have equally many experts: got "
            f"{len(kernel)} on this one, {count} in all"
        )
    differing = varying_axes(x) & set(of_features)
    if copies > 1 and differing:
        raise ConfigError(
            "tokens must be equal on the devices that features of experts are cut "
            f"over: got tokens that differ along {sorted(differing)}"
        )
    return _Spread(of_experts, of_features, like.once, devices, copies)


def _exchange(
    spread: _Spread, function: ExpertFunction, rows: jax.Array, dense: ExpertDense
) -> jax.Array:
    """Applies a function to rows `[experts, capacity, width]`, where the experts are.

    `[experts, capacity, width]` on each of X devices becomes `[experts / X, X capacity,
    width]`, all rows of the experts that it has. The second exchange is the inverse and
    returns every row to its slot.
    """
    if spread.devices == 1:
        return function(rows, dense)
    exchange = functools.partial(lax.all_to_all, axis_name=spread.experts, tiled=True)
    rows = exchange(shards.share_out(rows, spread.rows), split_axis=0, concat_axis=1)
    y = function(shards.received(shards.gather_equal(rows, spread.rows)), dense)
    y = exchange(shards.share_out(y, spread.rows), split_axis=1, concat_axis=0)
    return shards.received(shards.gather_equal(y, spread.rows))


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

    def dense(rows: jax.Array, kernel: Any, bias: Any) -> jax.Array:
        bias, _ = shards.open_part(bias, -1)
        added = None if bias is None else bias[own]
        return _dense.multiply(_ragged, rows, kernel, added, sizes, compute=compute)

    # The remainder recovers t; the argsort of a permutation is its inverse.
    y = function(x[order % tokens], dense)
    return y[jnp.argsort(order)].reshape(top_k, tokens, -1)


def _find_slots(
    chosen: Int[Array, "tokens top_k"],
    sizes: tuple[int, int],
    priority: jax.Array | None,
) -> Int[Array, " choices"]:
    """Returns where the rows of experts have each choice, (experts, capacity) sizes.

    Entry j · tokens + t is the j-th choice of token t, so that the running count below
    serves all first choices before any second one. A choice's place is the number of
    earlier choices of the same expert. Rows lie at expert · capacity + place; a choice
    that is dropped points behind the end, where `set` and `get` ignore it.
    """
    count, capacity = sizes
    if priority is None:
        order = None
    else:
        order = jnp.argsort(-priority, axis=0, stable=True)
        chosen = jnp.take_along_axis(chosen, order, axis=0)
    experts = chosen.T.reshape(-1)
    taken = jnp.cumsum(jax.nn.one_hot(experts, count, dtype=jnp.int32), axis=0)
    place = jnp.take_along_axis(taken, experts[:, None], axis=1)[:, 0] - 1
    slot = jnp.where(place < capacity, experts * capacity + place, count * capacity)
    if order is None:
        return slot
    back = jnp.argsort(order, axis=0).T
    return jnp.take_along_axis(slot.reshape(back.shape), back, axis=1).reshape(-1)


def _with_capacity(
    x: jax.Array,
    slots: Int[Array, " choices"],
    function: ExpertFunction,
    sizes: tuple[int, int],
    compute: str,
) -> jax.Array:
    """Returns the experts' results `[top_k, tokens, width]`, zero where dropped."""
    count, capacity = sizes
    beyond, top_k = count * capacity, len(slots) // len(x)
    candidates = jnp.tile(x, (top_k, 1))
    empty = vary_like(jnp.zeros((beyond, x.shape[-1]), x.dtype), candidates)
    rows = empty.at[slots].set(candidates, mode="drop").reshape(count, capacity, -1)

    def dense(rows: jax.Array, kernel: Any, bias: Any) -> jax.Array:
        bias, _ = shards.open_part(bias, -1)
        added = None if bias is None else bias[:, None]
        return _dense.multiply(_batched, rows, kernel, added, compute=compute)

    y = function(rows, dense)
    y = y.reshape(beyond, -1).at[slots].get(mode="fill", fill_value=0)
    return y.reshape(top_k, len(x), -1)
