"""Distillation: trains a small language model on the distributions of a large one.

References:
  Hinton, Vinyals and Dean, arXiv 1503.02531; Zhou et al., DistillSpec, ICLR 2024, for
  the divergences that suit draft models of speculative decoding.
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
    """A distilled student.

    Attributes:
      params: of the student.
      losses: the loss of each step, in front of its update.
    """

    params: Any
    losses: Float[np.ndarray, " steps"]


def distillation_loss(
    teacher_logits: Float[Array, "*batch vocabulary"],
    student_logits: Float[Array, "*batch vocabulary"],
    divergence: Divergence = "forward",
) -> Float[Array, "*batch"]:
    """Returns a divergence of the student's distribution from the teacher's.

    With p the teacher's and q the student's softmax, in float32:

    - "forward": Σ p log(p/q), large where q misses tokens that p makes likely;
    - "reverse": Σ q log(q/p), large where q makes tokens likely that p does not;
    - "total_variation": ½ Σ |p − q|, one minus the probability that a token drawn from
      q is accepted in speculative decoding.

    Args:
      teacher_logits: `[..., vocabulary]`.
      student_logits: `[..., vocabulary]`.
      divergence: which of them.

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
    """Trains a student on a teacher's distributions.

    The loss is the mean of `distillation_loss` over all positions of a batch.

    Args:
      student: a model of tokens `[batch, time]` without a state.
      student_params: its initial parameters, which are not changed.
      teacher: a model with the same vocabulary.
      teacher_params: parameters of the teacher.
      batches: tokens; at least `steps` batches.
      optimizer: updates the parameters that are not frozen.
      steps: number of steps.
      frozen: regexes of paths that are not trained, such as `"^embed/"`.
      divergence: see `distillation_loss`.
      report: called with the number of each step, from 1, and its loss.

    Raises:
      ConfigError: no steps, a regex that no path matches, everything frozen, too few
        batches, or models with different vocabularies or with `loss_chunk`.
      Diverged: a loss that is not finite.
    """
    flat = trees.flatten(student_params)
    trained, kept = _split_frozen(flat, frozen)
    if steps < 1:
        raise ConfigError(f"steps must be at least 1: got steps={steps}")

    # A copy, since the steps donate these arrays, and the caller keeps its own.
    trained = jax.tree.map(jnp.copy, trained)
    state = optimizer.init(trained)

    step = _make_step(student, student_params, teacher, optimizer, divergence)
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


def _make_step(
    student: Model,
    like: Any,
    teacher: Model,
    optimizer: optax.GradientTransformation,
    divergence: Divergence,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Returns a compiled step, which donates the trained parameters and the state."""
    # Only shapes: the closure would keep the caller's parameters in memory.
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)

    def loss_of(trained: Any, kept: Any, teacher_params: Any, x: jax.Array) -> Any:
        params = trees.unflatten(like, {**trained, **kept})
        teacher_logits, _ = teacher.apply(teacher_params, {}, x, train=False)
        student_logits, _ = student.apply(params, {}, x, train=True)
        both = teacher_logits, student_logits
        shapes = [getattr(logits, "shape", None) for logits in both]
        if shapes[0] != shapes[1] or None in shapes:
            raise ConfigError(
                "teacher and student must give logits of the same words, not in "
                f"chunks (loss_chunk): got shapes {shapes[0]} and {shapes[1]}"
            )
        # Recomputed in the backward pass, so that no softmax [batch, time, vocabulary]
        # is stored besides the logits.
        loss = jax.checkpoint(
            functools.partial(distillation_loss, divergence=divergence)
        )
        return jnp.mean(loss(jax.lax.stop_gradient(teacher_logits), student_logits))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        trained: Any, state: Any, kept: Any, teacher_params: Any, x: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(trained, kept, teacher_params, x)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, loss

    return step


def _split_frozen(
    flat: dict[str, Any], frozen: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the trained and the frozen parameters, by path."""
    check_patterns("frozen", frozen)
    for pattern in frozen:
        if not any(re.search(pattern, path) for path in flat):
            raise ConfigError(
                f"frozen must match paths of {list(flat)}: got {pattern!r}"
            )
    fixed = {path for path in flat if any(re.search(regex, path) for regex in frozen)}
    if len(fixed) == len(flat):
        raise ConfigError(f"frozen leaves nothing to train: got {tuple(frozen)}")
    trained = {path: leaf for path, leaf in flat.items() if path not in fixed}
    return trained, {path: flat[path] for path in fixed}
