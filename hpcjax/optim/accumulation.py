"""Gradients of a batch in several passes, of which each needs a part of the memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import Gradients, PassResult, StepInput
from hpcjax.core.varying import vary, varying_axes

# What a pass may tell the optimizer, all of which can be put together.
_KNOWN = {"value", "value_fn", "step", "loss_terms", "taps"}


def accumulate(gradients: Gradients, passes: int) -> Gradients:
    """Returns a backward pass over equal parts of the batch, one after another.

    Each of p parts divides its sums by share / p, so that gradients, means and the loss
    of the whole are the means of the parts', however many items each has scored. So are
    K-FAC's statistics: A is the mean of the parts' Aᵢ, and of B, which is (p / share)²
    times the second moment of single items' gradients, the mean of Bᵢ / p². Layers that
    look at several examples, such as batch norm, see those of one part, and running
    statistics pass from part to part; what is drawn for a row does not change.

    Args:
      gradients: the backward pass of one part, such as `whole_backward`.
      passes: number of parts.

    Raises:
      ConfigError: when traced, if the parts do not divide the batch's rows, or the pass
        returns extras that cannot be put together.

    Examples:
      >>> from hpcjax import optim
      >>> accumulate(optim.whole_backward, 1) is optim.whole_backward
      True
    """
    rule = "gradients must be a backward pass, a function"
    checks.require(callable(gradients), rule, gradients=gradients)
    if passes == 1:
        return gradients

    def accumulated(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        cut = _cut((dict(one_pass.batch), one_pass.key.rows), passes)
        parts = _Parts(gradients, one_pass, state, cut, passes)
        return parts.differentiate(params)

    return accumulated


class _Parts:
    """The parts of one batch, and the backward pass of each."""

    def __init__(
        self,
        gradients: Gradients,
        one_pass: StepInput,
        state: Any,
        cut: Any,
        passes: int,
    ) -> None:
        self.gradients, self.one_pass, self.state = gradients, one_pass, state
        self.cut, self.passes = cut, passes

    def run(self, params: Any, running: Any, part: Any) -> PassResult:
        """Returns the result of a part."""
        batch, rows = part
        one_pass = self.one_pass._replace(
            batch=batch,
            model_state=running,
            key=dataclasses.replace(self.one_pass.key, rows=rows),
            share=self.one_pass.share / self.passes,
        )
        found = self.gradients(one_pass, params, self.state)
        told = set(found.extras)
        if told - _KNOWN or "loss_terms" not in told:
            raise ConfigError(
                "this backward pass cannot be accumulated: it must tell loss_terms and "
                f"at most {sorted(_KNOWN)} beside; it tells {sorted(told)}"
            )
        return found

    def differentiate(self, params: Any) -> PassResult:
        """Returns the result of all parts together."""

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            running, sums = carry
            found = self.run(params, running, part)
            sums = jax.tree.map(jnp.add, sums, _summed(found))
            return (self.vary(found.model_state), sums), None

        # A scan's carry keeps its type: some statistics differ between devices from the
        # second part on.
        running = self.vary(self.one_pass.model_state)
        first = jax.tree.map(lambda leaf: leaf[0], self.cut)
        shapes = jax.eval_shape(lambda: _summed(self.run(params, running, first)))
        start = running, jax.tree.map(self.zeros, shapes)
        (running, sums), _ = jax.lax.scan(body, start, self.cut)
        whole = jax.tree.map(lambda leaf: leaf / self.passes, sums)
        extras = {
            "value": whole["value"],
            "value_fn": self.value_fn,
            "step": self.one_pass.step,
            "loss_terms": self.one_pass.share,
        }
        if whole["taps"]:
            extras["taps"] = jax.tree.map_with_path(
                lambda path, leaf: leaf / (self.passes**2 if _is_g(path) else 1),
                whole["taps"],
            )
        return PassResult(whole["grads"], whole["means"], running, extras)

    def vary(self, state: Any) -> Any:
        """Marks running statistics as differing between devices."""
        return vary(state, self.one_pass.axes)

    def zeros(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns zeros that may differ between devices wherever the sum will."""
        # Gradients of parameters held in parts differ along the axes of the parts, too.
        axes = {*self.one_pass.axes, *varying_axes(like)}
        return vary(jnp.zeros(like.shape, like.dtype), tuple(sorted(axes)))

    def value_fn(self, params: Any) -> Any:
        """Returns the loss of all parts."""

        def add(total: Any, part: Any) -> tuple[Any, None]:
            found = self.run(params, self.one_pass.model_state, part)
            return total + found.extras["value"], None

        zero = vary(jnp.zeros_like(self.one_pass.share), self.one_pass.axes)
        return jax.lax.scan(add, zero, self.cut)[0] / self.passes


def _summed(found: PassResult) -> dict[str, Any]:
    """Returns what is summed over parts."""
    return {
        "grads": found.grads,
        "means": found.means,
        "value": found.extras["value"],
        "taps": found.extras.get("taps", {}),
    }


def _cut(batch: Any, passes: int) -> Any:
    """Returns a batch with its rows as `[passes, rows / passes, ...]`."""
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if any(count % passes for count in rows):
        raise ConfigError(
            f"{passes} passes must divide the rows of a device's batch: got {rows}"
        )
    return jax.tree.map(lambda leaf: leaf.reshape(passes, -1, *leaf.shape[1:]), batch)


def _is_g(path: tuple[Any, ...]) -> bool:
    """Returns whether a statistic is of gradients: its last key is "g"."""
    return str(getattr(path[-1], "key", "")) == "g"
