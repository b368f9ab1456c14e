"""What a stage of a pipeline computes, in a process of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.compress import Codec
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.perf import _stage_codes
from hpcjax.sharding.schedules import Op

Stage = Callable[[Any, Any, Any], jax.Array]


class StageWork:
    """Passes of micro-batches through one stage, and the gradient of their mean loss.

    The backward pass computes the forward pass again from the input that was saved.

    With a codec stages send packed codes up, and down the slopes of the codes' floating
    arrays: d numbers of an autoencoder's, k of entries, a quantizer's whole. `params`
    are then `{"stage": of the function, "sent": .., "received": ..}`: what the codec
    has learnt for what this stage sends, and for what it is sent, both as `Codec.init`
    draws them. Without the name activations pass as they are. Gradients are alike; an
    encoder's is the sender's, a decoder's the receiver's, the others' are zeros.

    Attributes:
      losses: of the last stage's micro-batches, `{number: loss}`.
      message: what packed codes are called, by codec and `like`; "" without.

    Args:
      function: `(params, x, target) -> y`, of the last stage a loss. x is what the
        stage below gave.
      params: of the stage.
      micro_batches: of a batch, m; the loss of a batch is the mean over them.
      inputs: of the first stage, `[m, ...]`, each a micro-batch; None for others.
      targets: of the last stage, `[m, ...]`; None for others, whose target is None.
      deterministic: whether gradients of micro-batches are kept and added in the order
        of their numbers, so that the sum is the same to the bit whatever came first.
      codec: of what is sent; the same for all stages.
      like: shape and dtype of activations between stages, of a micro-batch.
      key: of a codec that draws, of this stage; each pass draws others.

    Raises:
      ConfigError: inputs or targets of another number of micro-batches; a codec that
        does not take the activations, or that stages cannot send each other by, or has
        learnt arrays of other shapes.
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
        codec: Codec | None = None,
        like: Any = None,
        key: jax.Array | None = None,
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
        ends = {"first": inputs is not None, "last": targets is not None}
        _stage_codes.check(codec, params, like, key, **ends)
        self._passes = _stage_codes.Passes(function, params, codec, like)
        self.message = self._passes.name
        self._key = key if codec is not None and codec.draws else None
        self._drawn = 0
        self.losses: dict[int, float] = {}
        self._saved: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._added = 0

    def run_op(self, op: Op, received: np.ndarray | None) -> np.ndarray | None:
        """Runs a forward or a backward pass, see `DeviceWork.run_op`."""
        number, passes = op.micro_batch, self._passes
        target = None if self._targets is None else self._targets[number]
        if op.kind == "F":
            return self._run_forward(number, target, received)
        if received is None:
            received = np.full((), 1 / self._count, np.float32)  # of the mean of losses
        x, sent = self._saved.pop(number)
        slope = passes.read(received, passes.encodes)
        gradient, slopes = passes.backward(self._params, x, target, slope, sent)
        key = number if self._deterministic else 0
        old = self._found.get(key)
        new = gradient if old is None else jax.tree.map(jnp.add, old, gradient)
        self._found[key] = jax.block_until_ready(new)
        self._added += 1
        if self._inputs is not None:
            return None
        return passes.write(slopes if passes.decodes else slopes[0], passes.decodes)

    def _run_forward(
        self, number: int, target: Any, received: np.ndarray | None
    ) -> np.ndarray:
        passes, x = self._passes, received
        if self._inputs is not None:
            x = self._inputs[number]
        elif received is not None:
            x = passes.read(received, passes.decodes)
        key = self._key
        if key is not None:
            key, self._drawn = jax.random.fold_in(key, self._drawn), self._drawn + 1
        y = passes.forward(self._params, x, target, key)
        self._saved[number] = x, passes.keep(y)
        if self._targets is not None:
            self.losses[number] = float(y)
        return passes.write(y, passes.encodes)

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
