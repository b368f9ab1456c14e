"""Training a small language model to give the distributions of a large one.

References:
  Hinton, Vinyals and Dean, arXiv 1503.02531; Zhou et al., DistillSpec, ICLR 2024, for
  what an accepted draft asks for.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Shaped

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, Diverged, nearest
from hpcjax.core.model import Model
from hpcjax.core.patterns import check_patterns

Divergence = Literal["forward", "reverse", "total_variation"]


class Distilled(NamedTuple):
    """A student after distillation.

    Attributes:
      params: its parameters.
      losses: of each step, before its update.
    """

    params: Any
    losses: Float[np.ndarray, " steps"]


def distillation_loss(
    teacher_logits: Float[Array, "*batch vocabulary"],
    student_logits: Float[Array, "*batch vocabulary"],
    divergence: Divergence = "forward",
) -> Float[Array, "*batch"]:
    """Returns how far the student's distribution is from the teacher's, at each place.

    With p the teacher's and q the student's softmax, in float32: Σ p log(p/q), which
    covers all that the teacher may say; Σ q log(q/p), which avoids what it would not;
    or ½ Σ |p − q|, which is one minus the probability that a draft is accepted.

    Args:
      teacher_logits: `[..., vocabulary]`.
      student_logits: the same.
      divergence: "forward", "reverse" or "total_variation", in this order.

    Raises:
      ConfigError: an unknown divergence.

    Examples:
      >>> teacher, student = jnp.array([0.0, 0.0]), jnp.array([0.0, jnp.log(3.0)])
      >>> round(distillation_loss(teacher, student, "total_variation").item(), 6)
      0.25
    """
    if divergence not in get_args(Divergence):
        known = get_args(Divergence)
        raise ConfigError(
            f"unknown divergence: got {divergence!r}{nearest(divergence, known)}"
        )
    log_p, log_q = (
        jax.nn.log_softmax(logits.astype(jnp.float32))
        for logits in (teacher_logits, student_logits)
    )
    if divergence == "total_variation":
        return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1) / 2
    if divergence == "reverse":
        log_p, log_q = log_q, log_p
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def distil(
    student: Model,
    student_params: Any,
    teacher: Model,
    teacher_params: Any,
    batches: Iterable[Shaped[np.ndarray, "batch time"] | Shaped[Array, "batch time"]],
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    frozen: Sequence[str] = (),
    divergence: Divergence = "forward",
    report: Callable[[int, float], None] = lambda *_: None,
) -> Distilled:
    """Trains a student on a teacher's distributions, all places of a batch alike.

    Args:
      student: a model of tokens `[batch, time]` without a state of its own.
      student_params: where it begins; left as they are.
      teacher: a model with the same vocabulary.
      teacher_params: its parameters.
      batches: tokens, at least `steps` times.
      optimizer: changes what is not frozen.
      steps: how many.
      frozen: regexes of paths that are not trained, such as `"^embed/"`.
      divergence: see `distillation_loss`.
      report: called with the step, from 1 on, and its loss.

    Raises:
      ConfigError: no steps, a regex that no path matches, everything frozen, or too few
        batches, models of different vocabularies or with `loss_chunk`.
      Diverged: a loss that is not finite.
    """
    flat = trees.flatten(student_params)
    trained, kept = _parted(flat, frozen)
    if steps < 1:
        raise ConfigError(f"steps must be at least 1: got steps={steps}")

    # What it donates must not be the caller's.
    trained = jax.tree.map(jnp.copy, trained)
    state = optimizer.init(trained)

    step = _step(student, student_params, teacher, optimizer, divergence)
    losses: list[float] = []
    for number, x in zip(range(1, steps + 1), batches, strict=False):
        trained, state, loss = step(
            trained, state, kept, teacher_params, jnp.asarray(x)
        )
        losses.append(float(loss))
        if not np.isfinite(losses[-1]):
            raise Diverged(f"the loss of step {number} is {losses[-1]}")
        report(number, losses[-1])
    if len(losses) < steps:
        raise ConfigError(f"{steps} steps need as many batches: got {len(losses)}")
    params = trees.unflatten(student_params, {**trained, **kept})
    return Distilled(params, np.array(losses))


def _step(
    student: Model,
    like: Any,
    teacher: Model,
    optimizer: optax.GradientTransformation,
    divergence: Divergence,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Returns a compiled step, which is given all parameters and donates what moves."""
    # Else the caller's parameters would be kept by it.
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)

    def loss_of(trained: Any, kept: Any, teacher_params: Any, x: jax.Array) -> Any:
        params = trees.unflatten(like, {**trained, **kept})
        said, _ = teacher.apply(teacher_params, {}, x, train=False)
        tried, _ = student.apply(params, {}, x, train=True)
        shapes = [getattr(logits, "shape", None) for logits in (said, tried)]
        if shapes[0] != shapes[1] or None in shapes:
            raise ConfigError(
                "teacher and student must give logits of the same words, not in "
                f"chunks (loss_chunk): got shapes {shapes[0]} and {shapes[1]}"
            )
        # Formed again in the backward pass: no softmax is kept beside the logits.
        loss = jax.checkpoint(
            functools.partial(distillation_loss, divergence=divergence)
        )
        return jnp.mean(loss(jax.lax.stop_gradient(said), tried))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        trained: Any, state: Any, kept: Any, teacher_params: Any, x: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(trained, kept, teacher_params, x)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, loss

    return step


def _parted(
    flat: dict[str, Any], frozen: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is trained and what is not, by path."""
    check_patterns("frozen", frozen)
    for pattern in frozen:
        if not any(re.search(pattern, path) for path in flat):
            raise ConfigError(
                f"frozen must match paths of {list(flat)}: got {pattern!r}"
            )
    still = {path for path in flat if any(re.search(each, path) for each in frozen)}
    if len(still) == len(flat):
        raise ConfigError(f"frozen leaves nothing to train: got {tuple(frozen)}")
    trained = {path: leaf for path, leaf in flat.items() if path not in still}
    return trained, {path: flat[path] for path in still}
