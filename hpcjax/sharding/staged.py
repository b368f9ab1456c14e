"""A backward pass in segments, so that gradients are sent while others are computed.

A compiled gradient returns all of its results at its end. Here a network is a chain of
segments whose forward and backward passes are compiled separately, and the gradients of
the last segment are ready first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hpcjax import hostcomm
from hpcjax.core import checks
from hpcjax.hostcomm import Agent, Tag, Transport

Segment = Callable[[Any, Any], Any]
Loss = Callable[[Any, Any], jax.Array]
Ready = Callable[[int, Any], None]
StagedGradients = Callable[..., tuple[Any, list[Any]]]


def staged_value_and_grad(segments: Sequence[Segment], loss: Loss) -> StagedGradients:
    """Returns `jax.value_and_grad` of a chain of segments, run segment by segment.

    The loss is `loss(f_L(params_L, … f_1(params_1, x)), targets)`. Segments that are
    the same function of arrays of the same shapes are compiled once.

    Args:
      segments: `f(params, x) -> y`, of arrays or trees.
      loss: `loss(y, targets)`, a scalar.

    Returns:
      `run(params, x, targets, ready=None) -> (loss, gradients)`, with parameters and
      gradients of each segment; x is not differentiated. `ready(number, gradients)` is
      called as soon as a segment's gradients are computed, from the last segment to the
      first, and must return before the backward pass goes on.

    Raises:
      ConfigError: there are no segments; when called, parameters are not one for each.

    Examples:
      >>> run = staged_value_and_grad([jax.numpy.multiply] * 2, lambda y, t: (y - t)**2)
      >>> loss, grads = run([3.0, 2.0], 1.0, 1.0)
      >>> float(loss), [float(grad) for grad in grads]
      (25.0, [20.0, 30.0])
    """
    count = len(segments)
    checks.require(count > 0, "there must be segments", segments=count)
    ends = jax.jit(jax.value_and_grad(loss))

    def run(
        params: Sequence[Any], x: Any, targets: Any, ready: Ready | None = None
    ) -> tuple[jax.Array, list[Any]]:
        rule = f"there must be parameters for each of {count} segments"
        checks.require(len(params) == count, rule, params=len(params))
        back = []
        for number, segment in enumerate(segments):
            x, pull = _forward(segment, number == 0, params[number], x)
            back.append(pull)
        value, error = ends(x, targets)
        grads: list[Any] = [None] * count
        for number in reversed(range(count)):
            # Popped, so that the activations of a segment are freed after its backward
            # pass.
            grads[number], *before = _backward(back.pop(), error)
            error = before[0] if before else None
            if ready is not None:
                ready(number, jax.block_until_ready(grads[number]))
        return value, grads

    return run


def averaged_value_and_grad(
    segments: Sequence[Segment], loss: Loss, transport: Transport, agent: Agent
) -> StagedGradients:
    """Returns `staged_value_and_grad` with gradients averaged over all ranks.

    Each segment's gradients are one bucket, which the agent all-reduces while gradients
    of the segments before it are computed. The loss is this rank's own.

    Args:
      segments: see `staged_value_and_grad`.
      loss: likewise.
      transport: of this rank; all ranks must make the same calls.
      agent: the thread that communicates; must not use tags of kind "bucket" otherwise.

    Raises:
      ConfigError: as `staged_value_and_grad` does.
    """
    local = staged_value_and_grad(segments, loss)

    def run(
        params: Sequence[Any], x: Any, targets: Any, ready: Ready | None = None
    ) -> tuple[jax.Array, list[Any]]:
        pending: dict[int, hostcomm.Work] = {}

        def send(number: int, grads: Any) -> None:
            tag = Tag("bucket", number)
            pending[number] = agent.submit(_average, transport, grads, tag)
            if ready is not None:
                ready(number, grads)

        value, _ = local(params, x, targets, send)
        return value, [pending[number].result() for number in range(len(params))]

    return run


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(segment: Segment, first: bool, params: Any, x: Any) -> tuple[Any, Any]:
    # The inputs of the first segment need no gradient, and may be integers.
    if first:
        return jax.vjp(lambda own: segment(own, x), params)
    return jax.vjp(segment, params, x)


@jax.jit
def _backward(pull: Any, error: Any) -> Any:
    return pull(error)


def _average(transport: Transport, tree: Any, tag: Tag) -> Any:
    """Returns the mean of all ranks' trees as numpy arrays, sent as one vector.

    Sums are taken in float32 or better. The tree may be empty.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    arrays = [np.asarray(leaf) for leaf in leaves]
    wide = np.result_type(np.float32, *arrays)
    flat = np.concatenate([array.reshape(-1) for array in arrays], dtype=wide)
    mean = hostcomm.allreduce(transport, flat, tag=tag)
    mean /= transport.size
    ends = np.cumsum([array.size for array in arrays])
    parts = np.split(mean, ends[:-1])
    pairs = zip(parts, arrays, strict=True)
    means = [p.reshape(a.shape).astype(a.dtype, copy=False) for p, a in pairs]
    return jax.tree.unflatten(structure, means)
