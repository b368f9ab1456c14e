"""Passes of a stage between processes, whose neighbours may send codes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.compress import Codec
from hpcjax.core import checks
from hpcjax.hostcomm import pack_array, unpack_array

STAGE, SENT, RECEIVED = "stage", "sent", "received"


class Passes:
    """A stage's forward and backward pass, from and to what is sent.

    Attributes:
      encodes: whether the stage sends codes.
      decodes: whether it is sent codes.
      name: of a message with a code.
    """

    def __init__(self, function: Any, params: Any, codec: Codec | None, like: Any):
        names = frozenset(params) if codec else frozenset()
        self.encodes, self.decodes = SENT in names, RECEIVED in names
        self._function, self._codec, self._like = function, codec, like
        self._through = getattr(codec, "grad", "") == "through"
        # Places say nothing of the shape that they are of.
        self.name = f"{codec} of {_describe(like)}" if codec else ""
        self.forward, self.backward = jax.jit(self._forward), jax.jit(self._backward)

    def read(self, received: np.ndarray, coded: bool) -> Any:
        """Returns what a neighbour has packed."""
        if coded:
            return unpack_array(self.name, received)
        rule = (
            "a neighbour sends a code, for which the stage has no codec or parameters"
        )
        is_code = received.dtype == np.uint8 and received.ndim == 1
        checks.require(not is_code, rule, received=f"uint8{list(received.shape)}")
        return received

    def write(self, made: Any, coded: bool) -> np.ndarray:
        """Returns what is sent to a neighbour."""
        return pack_array(self.name, made) if coded else np.asarray(made)

    def keep(self, code: Any) -> Any:
        """Returns the places that a backward pass encodes at again."""
        if not self.encodes or self._through:
            return None
        return jax.tree.map(lambda leaf: None if _passes(leaf) else leaf, code)

    def _forward(self, params: Any, x: Any, target: Any, key: Any) -> Any:
        x = self._decode(params, x) if self.decodes else x
        y = self._apply(params, x, target)
        return self._encode(params, y, {"key": key}) if self.encodes else y

    def _backward(self, params: Any, x: Any, target: Any, slope: Any, sent: Any) -> Any:
        """Returns slopes of parameters and of what was received, [] of integers.

        Through a quantizer slopes pass as if nothing had been rounded: what decodes is
        the input, and the stage's own output what they are of.
        """
        if self.decodes and self._through:
            x = self._decode(params, x)
        leaves, tree = jax.tree.flatten(x)
        floats = [leaf for leaf in leaves if _passes(leaf)]

        def run(params: Any, floats: Any) -> Any:
            each = iter(floats)
            x = tree.unflatten(next(each) if _passes(a) else a for a in leaves)
            if self.decodes and not self._through:
                x = self._decode(params, x)
            y = self._apply(params, x, target)
            if self.encodes and not self._through:
                y = self._encode(params, y, {"sent": sent})
            return [leaf for leaf in jax.tree.leaves(y) if _passes(leaf)]

        y, pull = jax.vjp(run, params, floats)
        slopes = zip(jax.tree.leaves(slope), y, strict=True)
        return pull([jnp.asarray(a, like.dtype) for a, like in slopes])

    def _apply(self, params: Any, x: Any, target: Any) -> Any:
        own = params if self._codec is None else params[STAGE]
        y = self._function(own, x, target)
        if self.encodes:
            ours, like = _describe(y), _describe(self._like)
            checks.require(ours == like, f"a stage must give like={like}", given=ours)
        return y

    def _encode(self, params: Any, y: Any, more: Mapping[str, Any]) -> Any:
        return self._codec.encode(y, {**params[SENT], **more})  # pyrefly: ignore

    def _decode(self, params: Any, code: Any) -> Any:
        return self._codec.decode(code, self._like, params[RECEIVED])  # pyrefly: ignore


def check(
    codec: Codec | None, params: Any, like: Any, key: Any, *, first: bool, last: bool
) -> None:
    """Raises ConfigError for what a stage cannot send or be sent."""
    if codec is None:
        return
    codec.check_between()
    given = sorted(params) if isinstance(params, Mapping) else type(params).__name__
    allowed = {STAGE, *(() if last else (SENT,)), *(() if first else (RECEIVED,))}
    good = isinstance(params, Mapping) and STAGE in params and {*params} <= allowed
    rule = f"with a codec params are of {STAGE!r}, and codes by {sorted(allowed)}"
    checks.require(good and len(params) > 1, rule, params=given)
    checks.require(like is not None, "a codec needs like, an activation", like=like)
    codec.wire_bytes(like.shape, like.dtype, where="pipeline")  # raises, too
    drawn = jax.eval_shape(lambda: codec.init(jax.random.key(0), like.shape[-1]))
    learnt = {name: leaf.shape for name, leaf in drawn.items()}
    for name in sorted({SENT, RECEIVED} & {*params}):
        own = {key: jnp.shape(leaf) for key, leaf in params[name].items()}
        rule = f"{name!r} must be as {codec} draws it, {learnt}"
        checks.require(own == learnt, rule, **{name: own})
    if SENT in params:
        rule = "a codec that draws needs a key"
        checks.require(not codec.draws or key is not None, rule, key=key)
        given = {**params[SENT], "key": key}
        jax.eval_shape(lambda y: codec.encode(y, given), like)


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"


def _passes(leaf: Any) -> bool:
    """Says whether a leaf has a slope."""
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)
