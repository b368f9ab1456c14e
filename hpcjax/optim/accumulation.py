"""Gradients of a batch in several passes, of which each needs a part of the memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.core.errors import ConfigError
from hpcjax.core.method import Gradients, PassResult, StepInput
from hpcjax.core.varying import vary

# What a pass may tell the optimizer, all of which can be put together.
_KNOWN = {"value", "value_fn", "step", "loss_terms", "taps"}


def accumulate(gradients: Gradients, passes: int) -> Gradients:
    """Returns a backward pass over equal parts of the batch, one after another.

    Gradients, means and the loss are those of the whole batch: of part i with nᵢ scored
    items they count nᵢ / Σ nᵢ. So are K-FAC's statistics: A is the mean of the parts'
    Aᵢ, and of B, which is 1/nᵢ² times the second moment of single items' gradients, the
    result is Σ nᵢ² Bᵢ / (p (Σ nᵢ)²) with p parts. Layers that look at several examples,
    such as batch norm, see those of one part, and running statistics pass from part to
    part; each part has draws of its own.

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
    if passes == 1:
        return gradients

    def accumulated(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        parts = _Parts(gradients, one_pass, state, _cut(one_pass.batch, passes), passes)
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
        self.numbered, self.passes = (jnp.arange(passes), cut), passes

    def run(self, params: Any, running: Any, part: Any) -> tuple[PassResult, Any]:
        """Returns the result of a part, and the number of its scored items."""
        number, batch = part
        one_pass = self.one_pass._replace(
            batch=batch,
            model_state=running,
            key=jax.random.fold_in(self.one_pass.key, number),
        )
        found = self.gradients(one_pass, params, self.state)
        told = set(found.extras)
        if told - _KNOWN or "loss_terms" not in told:
            raise ConfigError(
                "this backward pass cannot be accumulated: it must tell loss_terms and "
                f"at most {sorted(_KNOWN)} beside; it tells {sorted(told)}"
            )
        return found, found.extras["loss_terms"]

    def differentiate(self, params: Any) -> PassResult:
        """Returns the result of all parts together."""

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            running, sums = carry
            found, terms = self.run(params, running, part)
            sums = jax.tree.map(jnp.add, sums, _weigh(found, terms))
            return (found.model_state, sums), None

        # A scan's carry keeps its type: statistics differ between devices from the
        # second part on.
        running = vary(self.one_pass.model_state, self.one_pass.axes)
        first = jax.tree.map(lambda leaf: leaf[0], self.numbered)
        shapes = jax.eval_shape(lambda: _weigh(*self.run(params, running, first)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        start = running, vary(zeros, self.one_pass.axes)
        (running, sums), _ = jax.lax.scan(body, start, self.numbered)
        # Where nothing at all was scored, means are not numbers, as of one pass.
        terms = sums["terms"]
        whole = jax.tree.map(
            lambda leaf: leaf / terms.astype(leaf.dtype),
            {name: sums[name] for name in ("grads", "means", "value")},
        )
        taps = jax.tree.map_with_path(
            lambda path, leaf: leaf / (self.passes * (terms**2 if _is_g(path) else 1)),
            sums["taps"],
        )
        extras = {
            "value": whole["value"],
            "value_fn": self.value_fn(terms),
            "step": self.one_pass.step,
            "loss_terms": terms,
        }
        if taps:
            extras["taps"] = taps
        return PassResult(whole["grads"], whole["means"], running, extras)

    def value_fn(self, terms: Any) -> Callable[[Any], Any]:
        """Returns the loss of all parts as a function of the parameters."""

        def value(params: Any) -> Any:
            def add(total: Any, part: Any) -> tuple[Any, None]:
                found, own = self.run(params, self.one_pass.model_state, part)
                loss = found.extras["value"]
                return total + jnp.where(own > 0, own * loss, 0), None

            zero = vary(jnp.zeros_like(terms), self.one_pass.axes)
            return jax.lax.scan(add, zero, self.numbered)[0] / terms

        return value


def _weigh(found: PassResult, terms: Any) -> dict[str, Any]:
    """Returns what is summed over parts: everything times what a part counts."""

    def times(leaf: Any, weight: Any) -> Any:
        # Means of a part in which nothing is scored are not numbers.
        weighed = leaf * weight.astype(leaf.dtype)
        return jnp.where(terms > 0, weighed, jnp.zeros_like(leaf))

    summed = {
        "grads": found.grads,
        "means": found.means,
        "value": found.extras["value"],
    }
    taps = jax.tree.map_with_path(
        lambda path, leaf: times(leaf, terms**2) if _is_g(path) else leaf,
        found.extras.get("taps", {}),
    )
    weighed = jax.tree.map(lambda leaf: times(leaf, terms), summed)
    return {**weighed, "taps": taps, "terms": terms}


def _cut(batch: Any, passes: int) -> dict[str, Any]:
    """Returns a batch with its rows as `[passes, rows / passes, ...]`."""
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if any(count % passes for count in rows):
        raise ConfigError(
            f"{passes} passes must divide the rows of a device's batch: got {rows}"
        )
    return jax.tree.map(
        lambda leaf: leaf.reshape(passes, -1, *leaf.shape[1:]), dict(batch)
    )


def _is_g(path: tuple[Any, ...]) -> bool:
    """Returns whether a statistic is of gradients: its last key is "g"."""
    return str(getattr(path[-1], "key", "")) == "g"
