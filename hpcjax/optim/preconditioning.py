"""The frame around preconditioners of matrices, which Jorge and Shampoo fill."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from hpcjax.core import patterns, trees
from hpcjax.optim import matrices, norms
from hpcjax.optim.full_precision import in_full_precision


class Preconditioner(NamedTuple):
    """The factors of one parameter, one per block; an unconditioned side has none.

    A factor is a NamedTuple of arrays with a field `matrix`, which is applied.

    Attributes:
      left: factors of the rows.
      right: factors of the columns.
      alignment: cosine between the preconditioned and the raw gradient.
    """

    left: tuple[Any, ...]
    right: tuple[Any, ...]
    alignment: Float[Array, ""]


class PreconditionedState(NamedTuple):
    """State of a preconditioning transform.

    Attributes:
      count: steps done.
      momentum: m, like the parameters, float32 or better.
      factors: `{path: Preconditioner}` of the parameters that have one. For a tree
        without parameters one empty array, so that `optax.tree_map_params` treats
        all of it as not being parameters.
      metrics: scalars over all parameters.
    """

    count: Int[Array, ""]
    momentum: Any
    factors: Any
    metrics: dict[str, Array]


class Method(NamedTuple):
    """What distinguishes one preconditioning method from another.

    Attributes:
      init: `(dim, dtype=...) -> factor`.
      refresh: `(factors, gradients, count) -> factors`, where each gradient's rows are
        the side of its factor.
      metrics: `(left factors, right factors, alignments) -> {name: scalar}`.
      check: `(old metrics, new metrics)`, called after each step if given.
    """

    init: Callable[..., Any]
    refresh: Callable[[list[Any], list[Array], Array], list[Any]]
    metrics: Callable[[list[Any], list[Any], list[Array]], dict[str, Array]]
    check: Callable[[dict[str, Array], dict[str, Array]], None] | None = None


def plans(params: Any, cuts: matrices.Cuts) -> dict[str, matrices.MatrixPlan]:
    """Returns the plans of the parameters that are preconditioned, by path.

    Raises:
      ConfigError: a regex of `cuts.stacked` that matches no parameter.

    Examples:
      >>> shapes = {"b": jnp.ones(3), "k": jnp.ones((2, 3))}
      >>> list(plans(shapes, matrices.Cuts(max_dim=8)))
      ['k']
    """
    leaves = trees.flatten(params)
    patterns.check_stacked(cuts.stacked, leaves)
    found = {
        path: matrices.matrix_plan(
            leaf.shape,
            cuts.max_dim,
            cuts.block_size,
            stack=any(re.search(rule, path) for rule in cuts.stacked),
        )
        for path, leaf in leaves.items()
    }
    return {path: plan for path, plan in found.items() if plan is not None}


def worst(values: list[Array], reduce: Callable[[Array], Array]) -> Float[Array, ""]:
    """Returns the reduction of scalars as float32, zero when there are none.

    Examples:
      >>> float(worst([jnp.ones(()), jnp.zeros(())], jnp.max))
      1.0
    """
    if not values:
        return jnp.zeros((), jnp.float32)
    return reduce(jnp.stack([value.astype(jnp.float32) for value in values]))


def _init_preconditioner(
    plan: matrices.MatrixPlan, dtype: Any, method: Method
) -> Preconditioner:
    heights = [h for h in plan.row_sizes for _ in plan.column_sizes]
    widths = [w for _ in plan.row_sizes for w in plan.column_sizes]
    return Preconditioner(
        left=tuple(method.init(h, dtype=dtype) for h in heights if plan.left),
        right=tuple(method.init(w, dtype=dtype) for w in widths if plan.right),
        alignment=jnp.zeros((), dtype),
    )


def _refreshed(
    factors: dict[str, Preconditioner],
    blocks: dict[str, list[Array]],
    count: Array,
    method: Method,
) -> dict[str, Preconditioner]:
    """Returns the factors after the method has seen the gradients' blocks."""
    jobs: list[tuple[Any, Array]] = []
    for path, item in factors.items():
        jobs += zip(item.left, blocks[path], strict=False)
        jobs += zip(item.right, [block.T for block in blocks[path]], strict=False)
    if not jobs:
        return factors
    states, gradients = zip(*jobs, strict=True)
    queue = iter(method.refresh(list(states), list(gradients), count))
    return {
        path: item._replace(
            left=tuple(next(queue) for _ in item.left),
            right=tuple(next(queue) for _ in item.right),
        )
        for path, item in factors.items()
    }


def _preconditioned(
    factors: dict[str, Preconditioner], blocks: dict[str, list[Array]], precision: str
) -> dict[str, list[Array]]:
    """Returns the blocks of L̂GR̂."""
    jobs = [
        (
            item.left[i].matrix if item.left else None,
            block,
            item.right[i].matrix if item.right else None,
        )
        for path, item in factors.items()
        for i, block in enumerate(blocks[path])
    ]
    sandwich = functools.partial(matrices.sandwich, precision=precision)
    queue = iter(matrices.map_equal_shapes(sandwich, jobs))
    return {path: [next(queue) for _ in blocks[path]] for path in factors}


def _metrics(factors: dict[str, Preconditioner], method: Method) -> dict[str, Array]:
    return method.metrics(
        [state for item in factors.values() for state in item.left],
        [state for item in factors.values() for state in item.right],
        [item.alignment for item in factors.values()],
    )


def scale_by_preconditioners(
    method: Method,
    b1: float,
    cuts: matrices.Cuts,
    precision: str = "highest",
) -> optax.GradientTransformationExtraArgs:
    """Preconditions each parameter from left and right, then smooths by momentum.

    G̃ = LGR per block of the parameter seen as a matrix, m ← β₁m + (1 − β₁)G̃. A
    parameter with no preconditioned side gets the momentum of its raw gradient.
    Expects averaged gradients and computes in float32 or better.

    Args:
      method: how factors start, are refreshed and are reported.
      b1: β₁.
      cuts: which blocks parameters are cut into.
      precision: of the products with G.

    Returns:
      A transform whose state is a `PreconditionedState`.
    """

    def init(params):
        leaves = trees.flatten(params)
        factors = {
            path: _init_preconditioner(plan, leaves[path].dtype, method)
            for path, plan in plans(params, cuts).items()
        }
        return PreconditionedState(
            count=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(jnp.zeros_like, params),
            factors=factors if leaves else jnp.zeros(0),
            metrics=_metrics(factors, method),
        )

    def step(gradients: dict[str, Array], state: PreconditionedState):
        chosen = plans(gradients, cuts)
        blocks = {
            path: matrices.to_blocks(plan, gradients[path])
            for path, plan in chosen.items()
        }
        factors = _refreshed(state.factors, blocks, state.count, method)
        found = _preconditioned(factors, blocks, precision)
        new = dict(gradients)
        for path, plan in chosen.items():
            gradient = gradients[path]
            new[path] = matrices.from_blocks(plan, found[path], gradient.shape)
            alignment = norms.cosine(new[path], gradient)
            factors[path] = factors[path]._replace(alignment=alignment)
        return new, factors

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        if not jax.tree.leaves(updates):
            return updates, state
        new, factors = step(trees.flatten(updates), state)
        momentum = jax.tree.map(
            lambda m, g: b1 * m + (1 - b1) * g,
            state.momentum,
            trees.unflatten(updates, new),
        )
        metrics = _metrics(factors, method)
        if method.check is not None:
            method.check(state.metrics, metrics)
        count = jnp.asarray(optax.safe_increment(state.count))
        return momentum, PreconditionedState(count, momentum, factors, metrics)

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))


def factors_of(state: Any) -> dict[str, Any]:
    """Returns every factor in an optimizer's state by path, side and block.

    Args:
      state: the state of a preconditioning transform, or of anything containing it.

    Examples:
      >>> from hpcjax import optim
      >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
      >>> found = factors_of(optim.scale_by_jorge().init(params))
      >>> {name: factor.matrix.shape for name, factor in found.items()}
      {'dense/kernel/left/0': (3, 3), 'dense/kernel/right/0': (2, 2)}
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, PreconditionedState)

    return {
        f"{path}/{side}/{index}": factor
        for node in jax.tree.leaves(state, is_leaf=is_state)
        if is_state(node) and isinstance(node.factors, dict)
        for path, item in node.factors.items()
        for side in ("left", "right")
        for index, factor in enumerate(getattr(item, side))
    }
