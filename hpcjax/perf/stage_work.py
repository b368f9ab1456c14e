"""What a stage of a pipeline computes, in a process of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.sharding.schedules import Op

Stage = Callable[[Any, Any, Any], jax.Array]


class StageWork:
    """Passes of micro-batches through one stage, and the gradient of their mean loss.

    The backward pass computes the forward pass again from the input that was saved.

    Attributes:
      losses: of the last stage's micro-batches, `{number: loss}`.

    Args:
      function: `(params, x, target) -> y`, of the last stage a loss. x is what the
        stage below gave.
      params: of the stage.
      micro_batches: of a batch, m; the loss of a batch is the mean over them.
      inputs: of the first stage, `[m, ...]`, each a micro-batch; None for others.
      targets: of the last stage, `[m, ...]`; None for others, whose target is None.
      deterministic: whether gradients of micro-batches are kept and added in the order
        of their numbers, so that the sum is the same to the bit whatever came first.

    Raises:
      ConfigError: inputs or targets of another number of micro-batches.
    """

    def __init__(
        self,
        function: Stage,
        params: Any,
        micro_batches: int,
        *,
        inputs: Any = None,
        targets: Any = None,
        deterministic: bool = False,
    ) -> None:
        for name, given in (("inputs", inputs), ("targets", targets)):
            if given is not None:
                rule = f"{name} must be of {micro_batches} micro-batches"
                checks.require(
                    len(given) == micro_batches, rule, micro_batches=len(given)
                )
        self._params, self._count = params, micro_batches
        self._inputs, self._targets = inputs, targets
        self._deterministic = deterministic
        self._forward = jax.jit(function)
        self._backward = jax.jit(_make_backward(function))
        self.losses: dict[int, float] = {}
        self._saved: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._added = 0

    def run_op(self, op: Op, received: np.ndarray | None) -> np.ndarray | None:
        """Runs a forward or a backward pass, see `DeviceWork.run_op`."""
        number = op.micro_batch
        target = None if self._targets is None else self._targets[number]
        if op.kind == "F":
            x = received if self._inputs is None else self._inputs[number]
            self._saved[number] = x
            y = np.asarray(self._forward(self._params, x, target))
            if self._targets is not None:
                self.losses[number] = float(y)
            return y
        if received is None:
            received = np.full((), 1 / self._count, np.float32)  # of the mean of losses
        x = self._saved.pop(number)
        gradient, slope = self._backward(self._params, x, target, received)
        key = number if self._deterministic else 0
        old = self._found.get(key)
        new = gradient if old is None else jax.tree.map(jnp.add, old, gradient)
        self._found[key] = jax.block_until_ready(new)
        self._added += 1
        return np.asarray(slope) if self._inputs is None else None

    def take_gradient(self) -> Any:
        """Returns the gradient of the mean loss, and begins a new batch.

        Raises:
          HpcjaxError: it is of more or fewer backward passes than a batch has, as after
            a step that failed; the new batch begins.
        """
        parts = [self._found[number] for number in sorted(self._found)]
        added, self._found, self._added = self._added, {}, 0
        if added != self._count:
            raise HpcjaxError(
                f"a gradient is of {self._count} micro-batches: {added} backward "
                "passes ran since the last one"
            )
        return jax.tree.map(lambda *each: sum(each[1:], each[0]), *parts)


def check_stages(
    functions: Sequence[Stage], params: Sequence[Any], x: Any, target: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Checks by shapes alone that each stage takes what the stage below gives.

    Args:
      functions: of each stage, as `StageWork` takes them.
      params: of each stage.
      x: a micro-batch of inputs, of the first stage, or its shape.
      target: its target, of the last stage, which must give a loss.

    Returns:
      What each stage gives.

    Raises:
      ConfigError: names the stages of which one cannot take what the other gives; a
        stage that gives no array of floating numbers, a loss that is no real scalar, or
        other numbers of both.

    Examples:
      >>> layer = lambda w, x, target: x @ w
      >>> loss = lambda w, x, target: jnp.mean((x @ w - target) ** 2)
      >>> w = jnp.zeros((5, 5))
      >>> [each.shape for each in check_stages([layer, loss], [w, w], w, w)]
      [(5, 5), ()]
    """
    checks.require_count(1, stages=len(functions))
    rule = f"params must be of {len(functions)} stages"
    checks.require(len(params) == len(functions), rule, params=len(params))
    given, last = [jax.eval_shape(lambda x: x, x)], len(functions) - 1
    rule = "a micro-batch of inputs must be an array"
    checks.require(_is_array(given[0]), rule, given=_name(given[0]))
    for stage, (function, own) in enumerate(zip(functions, params, strict=True)):
        source = f"stage {stage - 1} gives" if stage else "is the pipeline's input"
        try:
            y = jax.eval_shape(
                function, own, given[-1], target if stage == last else None
            )
        except Exception as error:  # of any kind: the function is the user's
            what = f"stage {stage} cannot take {_name(given[-1])}, which {source}"
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(f"{what}: {why}") from error
        rule = f"stage {stage} must give an array of floating numbers"
        good = _is_array(y) and jnp.issubdtype(y.dtype, jnp.inexact)
        checks.require(good, rule, given=_name(y))
        given.append(y)
    loss = given[-1]
    good = loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating)
    checks.require(good, "the loss must be a real scalar", loss=_name(loss))
    return tuple(given[1:])


def _is_array(shape: Any) -> bool:
    return isinstance(shape, jax.ShapeDtypeStruct)


def _name(shape: Any) -> str:
    if not _is_array(shape):
        return type(shape).__name__
    return f"{shape.dtype}{list(shape.shape)}"


def _make_backward(function: Stage) -> Callable[..., Any]:
    """Returns what gives the gradient of parameters, and that of floating inputs."""

    def backward(params: Any, x: Any, target: Any, slope: Any) -> Any:
        if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact):
            y, pull = jax.vjp(lambda p, x: function(p, x, target), params, x)
            return pull(jnp.asarray(slope, y.dtype))
        y, pull = jax.vjp(lambda p: function(p, x, target), params)
        return *pull(jnp.asarray(slope, y.dtype)), None

    return backward
