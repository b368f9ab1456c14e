"""What stages of a pipeline send each other: outputs and slopes, or codes of both.

Without codes all of this is the identity: outputs and slopes are of one type and share
an inbox. With codes `up` and `down` are payloads of their own, each a dict with `CODE`
and, if some stages are sent whole inputs, `WHOLE`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary
from hpcjax.sharding._pipeline_plan import Branch
from hpcjax.sharding.schedules import Schedule
from hpcjax.sharding.stage_functions import StageFunctions

UP, DOWN = "up", "down"
CODE, WHOLE = "code", "whole"
WAYS = {"from_below": UP, "from_above": DOWN}
Pairs = list[tuple[int, int]]


class Payloads:
    """What an op of a stage is given, and what it sends."""

    def __init__(self, functions: StageFunctions, axes: tuple[str, ...]) -> None:
        self._functions, self._axes = functions, axes
        self.encode: Any = functions.encode
        self.decode: Any = functions.decode
        self.coded = None if functions.encode is None else functions.coded

    def shapes(self, x: Any, code: Any) -> Any:
        """Returns the shapes of all that is sent at a tick."""
        if self.coded is None:
            return x
        slope = x if self._functions.through else _split_floats(code)[0]
        if not jax.tree.leaves(slope):
            raise ConfigError(
                "no slope passes a code without floating-point arrays: set through, or "
                f"send some: got {[str(leaf.dtype) for leaf in jax.tree.leaves(code)]}"
            )
        whole = {WHOLE: x} if self.coded > 1 else {}
        return {UP: {**whole, CODE: code}, DOWN: {**whole, CODE: slope}}

    def going(self, way: str, both: Any) -> Any:
        """Returns what goes up or down."""
        return both if self.coded is None else both[way]

    def given(self, branch: Branch, payload: Any) -> Any:
        """Returns what a stage is sent for its input.

        The first stage makes its input itself, and there may be no whole one.
        """
        if self.coded is None:
            return payload
        return payload.get(CODE if branch.decodes else WHOLE, ())

    def kept(self, sent: Any) -> Any:
        """Returns what a stage keeps of the code that it has sent; () for nothing."""
        if self.coded is None or self._functions.through:
            return ()
        return jax.tree.map(
            lambda leaf: None if _passes(leaf) else leaf, sent[UP][CODE]
        )

    def slope(self, branch: Branch, payload: Any) -> Any:
        """Returns the slope of what a stage has sent."""
        if self.coded is None:
            return payload
        return payload[CODE if branch.encodes else WHOLE]

    def wrap(self, branch: Branch, way: str, made: Any, shapes: Any) -> Any:
        """Returns what an op sends, with zeros for what it does not."""
        if self.coded is None:
            return made
        sent = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        kind = CODE if (branch.encodes if way == UP else branch.decodes) else WHOLE
        if kind in sent[way]:
            sent[way] = {**sent[way], kind: made}
        return vary(sent, self._axes)

    def exchange(
        self,
        result: Any,
        pairs: Mapping[str, Pairs],
        inbox: Any,
        put: Callable[[str, Any, Any], Any],
        send: Callable[[Any, Pairs], Any],
    ) -> Any:
        """Returns the inbox with what neighbours have sent.

        Args:
          result: what this device sends.
          pairs: devices that communicate, by source.
          inbox: before.
          put: `(source, inbox, received)`, returns the inbox.
          send: `(payload, pairs)`, returns what arrives.
        """
        for source, between in pairs.items():
            if self.coded is None:
                inbox = put(source, inbox, send(result, between))
                continue
            way, received = WAYS[source], {}
            for kind, own in result[WAYS[source]].items():
                # The higher device of a pair has the stage that is sent a code, or not.
                ours = [
                    pair for pair in between
                    if (max(pair) >= self.coded) == (kind == CODE)
                ]  # fmt: skip
                received[kind] = send(own, ours)
            inbox = {**inbox, way: put(source, inbox[way], received)}
        return inbox

    def split(
        self, branch: Branch, forward: Callable[..., Any], decode: Any, given: Any
    ) -> tuple[Callable[[Any, Any], Any], Any]:
        """Returns an op as a function of weights and floating arrays, and the latter.

        They are those of the code. Where slopes pass through they are what decodes from
        it, and the result is what would be encoded.

        Args:
          branch: of the op.
          forward: `(branch, weights, given)`.
          decode: `(given)`.
          given: what the stage was sent.
        """
        if self.coded is None:
            return lambda weights, x: forward(branch, weights, x), given
        inner = branch
        if self._functions.through:
            given = decode(given) if branch.decodes else given
            inner = branch._replace(decodes=False, encodes=False)
        floats, rest = _split_floats(given)
        structure = jax.tree.structure(given)

        def run(weights: Any, floats: Any) -> Any:
            parts = iter(floats)
            leaves = [next(parts) if leaf is None else leaf for leaf in rest]
            y = forward(inner, weights, jax.tree.unflatten(structure, leaves))
            return _split_floats(y)[0] if inner.encodes else y

        if inner.decodes:
            return run, floats
        return lambda weights, x: run(weights, jax.tree.leaves(x)), given


def _split_floats(tree: Any) -> tuple[list[Any], list[Any]]:
    """Returns the floating leaves, and all leaves with None for each of these."""
    leaves = jax.tree.leaves(tree)
    floats = [leaf for leaf in leaves if _passes(leaf)]
    return floats, [None if _passes(leaf) else leaf for leaf in leaves]


def _passes(leaf: Any) -> bool:
    """Says whether a leaf has a slope."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def check_codes(schedule: Schedule, functions: StageFunctions) -> None:
    """Raises ConfigError for codes that a schedule's stages cannot send each other."""
    if (functions.encode is None) != (functions.decode is None):
        raise ConfigError("encode and decode go together: got one of them")
    if functions.encode is None:
        return
    if schedule.holders != (tuple(range(schedule.stages)),):
        raise ConfigError(
            "codes pass between stages of which each device has one, in order, as in "
            f"gpipe, one_f_one_b and zero_bubble_h1: got {schedule.name}"
        )
    if not 1 <= functions.coded < schedule.stages:
        raise ConfigError(
            f"coded must be a stage behind the first, 1 to {schedule.stages - 1}: got "
            f"{functions.coded}"
        )
