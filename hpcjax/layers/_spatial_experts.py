"""Spatial mixture of experts: which filters are used depends on the place."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.layers import _precision
from hpcjax.layers._conv import conv, patches
from hpcjax.layers._globe import GlobePadding, pad_globe
from hpcjax.layers.routing_config import Damping, RoutingLoss

ExpertProducts = Literal["dense", "gather"]


class _Learning(NamedTuple):
    """How `_serve` learns; see `serve`."""

    weighted: bool
    routing_loss: RoutingLoss | None
    damping: Damping | None
    elements: int | None
    loss_scale: float
    axis_name: str | None


def choose_experts(
    gate: Float[Array, "*places experts"], outputs: int
) -> Int[Array, "*places outputs"]:
    """Returns the numbers of the experts with the largest gates, the largest first.

    Of equal gates the expert of lower number comes first. Output c of a place is that
    of the expert with the c-th largest gate, so where two gates are about equal a step
    may exchange two outputs.

    Args:
      gate: g, of each place, and of each example where it depends on that.
      outputs: e, experts of a place.

    Raises:
      ConfigError: more outputs than experts.

    References:
      Dryden, Hoefler, Spatial Mixture-of-Experts, NeurIPS 2022, §2.

    Examples:
      >>> choose_experts(jnp.array([[0.1, 2.0, 2.0], [3.0, 0.0, 1.0]]), 2).tolist()
      [[1, 2], [0, 2]]
    """
    count = gate.shape[-1]
    rule = "outputs must be between 1 and the number of experts"
    checks.require(1 <= outputs <= count, rule, outputs=outputs, experts=count)
    return jax.lax.top_k(gate, outputs)[1]


def find_small(
    errors: Float[Array, "batch ..."],
    quantile: float,
    eps: float,
    *,
    relative: bool = False,
    axis_name: str | None = None,
) -> Bool[Array, "batch ..."]:
    """Says which errors are at most their example's quantile, plus `eps`.

    The quantile is that of all of the example's errors, linear between two of them, in
    float32.

    Args:
      errors: r, none negative.
      quantile: q.
      eps: ε, in the errors' unit.
      relative: whether ε is in units of an example's mean error.
      axis_name: a mesh axis that places are cut over; the quantile is that of all.

    Examples:
      >>> find_small(jnp.array([[0.0, 1.0, 2.0, 3.0]]), 0.5, 0.0).tolist()
      [[True, True, False, False]]
    """
    rows = errors.astype(jnp.float32).reshape(len(errors), -1)
    if axis_name is not None:
        rows = jax.lax.all_gather(rows, axis_name, axis=1, tiled=True)
    threshold = jnp.quantile(rows, quantile, axis=1)
    slack = eps * jnp.mean(rows, axis=1) if relative else eps
    limit = (threshold + slack).reshape(-1, *(1,) * (errors.ndim - 1))
    return errors <= limit


def routing_labels(
    right: Bool[Array, "*places outputs"],
    indices: Int[Array, "*places outputs"],
    num_experts: int,
) -> Float[Array, "*places experts"]:
    """Returns what gates should be: 1 for experts that were right, 0 for wrong ones.

    Each expert that was not used gets n / (E − e), with n wrong ones of the place's e:
    one of them would have been right, for all that is known. So the labels of a place
    add up to e.

    Args:
      right: whether an output's error was small.
      indices: the expert of each output, no expert twice.
      num_experts: E.

    Raises:
      ConfigError: no expert is left that was not used.

    Examples:
      >>> right = jnp.array([[True, False]])
      >>> routing_labels(right, jnp.array([[2, 0]]), 4).tolist()
      [[0.0, 0.5, 1.0, 0.5]]
    """
    outputs = indices.shape[-1]
    check_unselected(outputs, num_experts)
    used = jax.nn.one_hot(indices, num_experts)
    wrong = jnp.sum(~right, axis=-1, keepdims=True)
    share = wrong / (num_experts - outputs)
    hits = jnp.sum(used * right[..., None], axis=-2)
    return hits + share * (1 - jnp.sum(used, axis=-2))


def check_unselected(outputs: int, num_experts: int) -> None:
    """Raises ConfigError if every expert is used at every place."""
    rule = (
        "no unselected experts: a routing loss, or damping, needs more experts than "
        "outputs"
    )
    good = outputs < num_experts
    checks.require(good, rule, outputs=outputs, experts=num_experts)


def serve(
    chosen: Float[Array, "batch height width outputs"],
    gate: Float[Array, "*batch height width experts"],
    indices: Int[Array, "*batch height width outputs"],
    *,
    weighted: bool = False,
    routing_loss: RoutingLoss | None = None,
    damping: Damping | None = None,
    elements: int | None = None,
    loss_scale: float = 1.0,
    axis_name: str | None = None,
) -> Float[Array, "batch height width outputs"]:
    """Returns what the chosen experts put out, and teaches gates and experts by errors.

    With δ, the cotangent of the result, and N elements in the mean that the loss is,
    the error of an output is r = |δ| N / 2: of the squared error this is |ŷ − y| in the
    last layer, and elsewhere in proportion to what the loss is sensitive to. Outputs
    with small errors are right (`find_small`), which makes `routing_labels`; the
    gradient of gates is that of their binary cross-entropy,

        ∂/∂g mean BCE(σ(g), labels) = (σ(g) − labels) / (B H W E),

    and not that of the task. With damping, experts get δ times its factor where r is
    not small, by damping's own ε.

    Args:
      chosen: outputs of the chosen experts.
      gate: g; without the batch's axis, gates of places alone.
      indices: of the chosen experts, see `choose_experts`.
      weighted: whether the result is each output times its gate. Then r is of the
        gate's gradient, δ times the output.
      routing_loss: how gates learn; None: by the gradient of the task, which is zero
        unless outputs are weighted.
      damping: of the experts' gradients; None for none.
      elements: N; None for the number of all outputs of the batch.
      loss_scale: by which the task's loss is multiplied.
      axis_name: a mesh axis that places are cut over, inside `shard_map`. Gradients
        are then parts of a mean over all places, of which the loss must be.

    Raises:
      ConfigError: a gate of another size than the outputs, or as `routing_labels`.

    References:
      Dryden, Hoefler, Spatial Mixture-of-Experts, NeurIPS 2022, §3.
    """
    check_gate(gate, chosen.shape[1:3])
    if routing_loss is not None or damping is not None:
        check_unselected(chosen.shape[-1], gate.shape[-1])
    learning = _Learning(
        weighted, routing_loss, damping, elements, loss_scale, axis_name
    )
    return _serve(learning, chosen, gate, indices)


def check_gate(gate: Any, places: tuple[int, ...], experts: int | None = None) -> None:
    """Raises ConfigError unless there is a gate for each place, and each expert."""
    if gate.shape[-3:-1] != places:
        found, wanted = (f"{h}x{w}" for h, w in (places, gate.shape[-3:-1]))
        raise ConfigError(f"the gate was built for {wanted}, got {found}")
    gates = gate.shape[-1]
    rule = "there must be a gate for each expert"
    checks.require(experts in (None, gates), rule, gates=gates, experts=experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _serve(
    learning: _Learning, chosen: jax.Array, gate: jax.Array, indices: jax.Array
) -> jax.Array:
    if not learning.weighted:
        return chosen
    return chosen * jnp.take_along_axis(gate, indices, axis=-1).astype(chosen.dtype)


def _serve_forward(
    learning: _Learning, chosen: jax.Array, gate: jax.Array, indices: jax.Array
) -> tuple[jax.Array, Any]:
    return _serve(learning, chosen, gate, indices), (chosen, gate, indices)


def _serve_backward(
    learning: _Learning, kept: Any, delta: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    chosen, gate, indices = kept
    devices = jax.lax.axis_size(learning.axis_name) if learning.axis_name else 1
    elements = learning.elements or delta.size * devices
    scale = elements / (2 * learning.loss_scale)
    task = jnp.float32(delta) * chosen if learning.weighted else jnp.float32(delta)
    if (loss := learning.routing_loss) is not None:
        right = _small(jnp.abs(task) * scale, loss, learning.axis_name)
        to_gate = _teach(gate, right, indices, loss.weight * learning.loss_scale)
        to_gate = to_gate / devices
    elif learning.weighted:
        to_gate = _scatter(task, gate, indices)
    else:
        to_gate = jnp.zeros_like(gate)
    to_chosen = delta
    if learning.weighted:
        to_chosen = delta * jnp.take_along_axis(gate, indices, axis=-1)
    if (damping := learning.damping) is not None:
        good = _small(jnp.abs(jnp.float32(delta)) * scale, damping, learning.axis_name)
        to_chosen = jnp.where(good, to_chosen, damping.factor * to_chosen)
    return to_chosen.astype(chosen.dtype), to_gate.astype(gate.dtype), None


_serve.defvjp(_serve_forward, _serve_backward)


def _small(
    errors: jax.Array, rule: RoutingLoss | Damping, axis_name: str | None
) -> jax.Array:
    return find_small(
        errors, rule.quantile, rule.eps, relative=rule.relative, axis_name=axis_name
    )


def _teach(
    gate: jax.Array, right: jax.Array, indices: jax.Array, weight: float
) -> jax.Array:
    """Returns the gradient of the mean cross-entropy of gates, times a weight."""
    every = jnp.broadcast_to(indices, right.shape)
    labels = routing_labels(right, every, gate.shape[-1])
    odds = jax.nn.sigmoid(gate.astype(jnp.float32))
    return _sum_like(weight / labels.size * (odds - labels), gate)


def _scatter(task: jax.Array, gate: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the gradient of gates by which chosen outputs were multiplied."""
    used = jax.nn.one_hot(indices, gate.shape[-1])
    return _sum_like(jnp.sum(task[..., None] * used, axis=-2), gate)


def _sum_like(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Sums over the examples if gates are the same for all of them."""
    return jnp.sum(x, axis=0) if gate.ndim < x.ndim else x


def select_experts(
    y: Float[Array, "batch height width experts"],
    gate: Float[Array, "*batch height width experts"],
    outputs: int,
    **learning: Any,
) -> Float[Array, "batch height width outputs"]:
    """Returns of each place the outputs of the experts with the largest gates.

    Args:
      y: outputs of all experts.
      gate: g, of each place, and of each example where it depends on that.
      outputs: e, experts of a place.
      **learning: as of `serve`.

    Raises:
      ConfigError: gates of more or fewer experts, or as `choose_experts` and `serve`.

    Examples:
      >>> y = jnp.array([5.0, 6.0, 7.0]).reshape(1, 1, 1, 3)
      >>> select_experts(y, jnp.array([[[0.0, 2.0, 1.0]]]), 2).tolist()
      [[[[6.0, 7.0]]]]
    """
    check_gate(gate, y.shape[1:3], y.shape[-1])
    indices = choose_experts(gate, outputs)
    return serve(_take(y, indices), gate, indices, **learning)


def _take(y: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take_along_axis(y, indices.reshape(-1, *indices.shape[-3:]), axis=-1)


def spatial_experts(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "size size inputs experts"],
    gate: Float[Array, "*batch height width experts"],
    outputs: int,
    *,
    padding: GlobePadding = "zero",
    products: ExpertProducts = "dense",
    compute: str = "float32",
    axis_name: str | None = None,
    **learning: Any,
) -> Float[Array, "batch height width outputs"]:
    """Returns a convolution whose filters are chosen at each place.

    An expert is one filter W_i, and out[p, c] = (x ∗ W_{I[p, c]})[p], where I[p, c] has
    the c-th largest gate of place p. Every place is served, by as many experts.

    Args:
      x: fields `[batch, height, width, inputs]`.
      kernel: filters of odd size.
      gate: g, of each place, and of each example where it depends on that.
      outputs: e, experts of a place.
      padding: of the width; beyond the first and the last row there are zeros.
      products: "dense" computes all experts everywhere, and "gather" those that are
        chosen alone, e/E of the products, for which it copies each place's filters.
      compute: dtype of the products' operands; sums are float32.
      axis_name: a mesh axis that the height is cut over, inside `shard_map`: neighbours
        exchange their border rows, and r's quantile is that of all places.
      **learning: as of `serve`.

    Raises:
      ConfigError: a kernel of even size, unknown products, or as `select_experts`.

    References:
      Dryden, Hoefler, Spatial Mixture-of-Experts, NeurIPS 2022, §2.

    Examples:
      >>> stencils = jnp.array([1.0, -1.0]).reshape(1, 1, 1, 2)
      >>> gate = jnp.array([[[0.0, 1.0], [1.0, 0.0]]])
      >>> spatial_experts(jnp.ones((1, 1, 2, 1)), stencils, gate, 1).ravel().tolist()
      [-1.0, 1.0]
    """
    size = kernel.shape[0]
    checks.require_choice("products", products, ("dense", "gather"))
    rule = "kernel must have an odd size"
    checks.require(size % 2 == 1, rule, kernel=kernel.shape)
    check_gate(gate, x.shape[1:3], kernel.shape[-1])
    indices = choose_experts(gate, outputs)
    x = _pad(x, size // 2, padding, axis_name)
    if products == "dense":
        chosen = _take(conv(x, kernel, padding="VALID", compute=compute), indices)
    else:
        chosen = _multiply_chosen(x, kernel, indices, compute)
    return serve(chosen, gate, indices, axis_name=axis_name, **learning)


def _multiply_chosen(
    x: jax.Array, kernel: jax.Array, indices: jax.Array, compute: str
) -> jax.Array:
    """Multiplies each place's patch by the filters that are chosen there."""
    size, _, _, count = kernel.shape
    filters = kernel.reshape(-1, count).T[indices]
    batch = "b" if indices.ndim > 3 else ""

    def product(x: jax.Array, filters: jax.Array, accumulate: str | None) -> jax.Array:
        form = f"bhws,{batch}hwes->bhwe"
        return jnp.einsum(form, x, filters, preferred_element_type=accumulate)

    taken = patches(x, (size, size), padding="VALID")
    y = _precision.accumulate_float32(product, taken, filters, compute)
    return y.astype(compute)


def _pad(
    x: jax.Array, size: int, padding: GlobePadding, axis_name: str | None
) -> jax.Array:
    """Adds a border, whose rows are those of neighbours if the height is cut."""
    if axis_name is None or size == 0:
        return pad_globe(x, size, padding)
    devices = jax.lax.axis_size(axis_name)
    # What nobody sends is zero: beyond the first row and the last.
    down = [(i, i + 1) for i in range(devices - 1)]
    up = [(i + 1, i) for i in range(devices - 1)]
    above = jax.lax.ppermute(x[:, -size:], axis_name, down)
    below = jax.lax.ppermute(x[:, :size], axis_name, up)
    rows = jnp.concatenate([above, x, below], axis=1)
    return pad_globe(rows, size, padding)[:, size:-size]


def routing_map(
    gate: Float[Array, "height width experts"], outputs: int = 1
) -> Int[Array, "height width outputs"]:
    """Returns which experts serve each place: all that inference needs of a gate.

    Examples:
      >>> routing_map(jnp.array([[[0.0, 1.0], [3.0, 2.0]]]))[..., 0].tolist()
      [[1, 0]]
    """
    return choose_experts(gate, outputs)
