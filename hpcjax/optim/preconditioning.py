"""The frame around preconditioners of matrices, which Jorge and Shampoo fill."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core import patterns, trees
from hpcjax.core.structs import pytree, static
from hpcjax.optim import matrices, norms
from hpcjax.optim.full_precision import in_full_precision


@pytree
class Factors:
    """The factors of all parameters; those of sides of one length are stacked.

    So the program has an operation for each length, not one for each factor.

    Attributes:
      groups: the factors of each length, each leaf with a first dimension that counts
        them. A factor is a NamedTuple of `matrix`, which is applied, `figures`, one
        array of all its scalars, and whatever matrices it needs besides.
      alignments: array of cosines between preconditioned and raw gradients, of each
        parameter.
      names: of the factors of each group, such as `"dense/kernel/left/0"`; the number
        is that of the block.
    """

    groups: tuple[Any, ...]
    alignments: Any
    names: tuple[tuple[str, ...], ...] = static()


class PreconditionedState(NamedTuple):
    """State of a preconditioning transform.

    Attributes:
      count: steps done.
      momentum: m, like the parameters, float32 or better.
      factors: `Factors`. For a tree without parameters one empty array, so that
        `optax.tree_map_params` treats all of it as not being parameters.
      metrics: scalars over all parameters.
    """

    count: Int[Array, ""]
    momentum: Any
    factors: Any
    metrics: dict[str, Array]


class Figures(NamedTuple):
    """What a method makes its metrics of.

    Attributes:
      figures: of all factors.
      left: whether a factor is that of rows.
      sign: the least sign of ⟨preconditioned, raw gradient⟩ of a parameter.
    """

    figures: Float[Array, "factors number"]
    left: Bool[np.ndarray, " factors"]
    sign: Float[Array, ""]


class Preconditioner(NamedTuple):
    """What distinguishes one preconditioning method from another.

    Attributes:
      init: `(dim, dtype=...) -> factor`.
      refresh: `(groups, gradients, count) -> groups`: stacked factors, and for each
        group a list of gradients, whose rows are the sides of the factors.
      metrics: `(figures) -> {name: scalar}`.
      check: `(old metrics, new metrics)`, called after each step if given.
    """

    init: Callable[..., Any]
    refresh: Callable[[list[Any], list[list[Array]], Array], list[Any]]
    metrics: Callable[[Figures], dict[str, Array]]
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
    patterns.check_stacked(cuts.stacked, trees.paths(params))
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


def _init(
    plans: dict[str, matrices.MatrixPlan],
    dtypes: dict[str, Any],
    method: Preconditioner,
) -> Factors:
    groups: dict[tuple[int, Any], list[str]] = {}
    for path, plan in plans.items():
        sizes = itertools.product(plan.row_sizes, plan.column_sizes)
        for index, (height, width) in enumerate(sizes):
            if plan.left:
                named = groups.setdefault((height, dtypes[path]), [])
                named.append(f"{path}/left/{index}")
            if plan.right:
                named = groups.setdefault((width, dtypes[path]), [])
                named.append(f"{path}/right/{index}")

    def stacked(dim: int, dtype: Any, count: int) -> Any:
        factor = method.init(dim, dtype=dtype)
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * count), factor)

    wide = jnp.result_type(jnp.float32, *(dtypes[path] for path in plans))
    return Factors(
        groups=tuple(stacked(*key, len(names)) for key, names in groups.items()),
        alignments=jnp.zeros(len(plans), wide),
        names=tuple(map(tuple, groups.values())),
    )


def _refreshed(
    factors: Factors,
    blocks: dict[str, list[Array]],
    count: Array,
    method: Preconditioner,
) -> Factors:
    """Returns the factors after the method has seen the gradients' blocks."""
    if not factors.groups:
        return factors
    gradients: dict[str, Array] = {}
    for path, own in blocks.items():
        for index, block in enumerate(own):
            gradients[f"{path}/left/{index}"] = block
            gradients[f"{path}/right/{index}"] = block.T
    wanted = [[gradients[name] for name in names] for names in factors.names]
    groups = method.refresh(list(factors.groups), wanted, count)
    return dataclasses.replace(factors, groups=tuple(groups))


def _preconditioned(
    factors: Factors, blocks: dict[str, list[Array]], precision: str
) -> dict[str, list[Array]]:
    """Returns the blocks of L̂GR̂."""
    found = {
        name: group.matrix[place]
        for group, names in zip(factors.groups, factors.names, strict=True)
        for place, name in enumerate(names)
    }
    jobs = [
        (found.get(f"{path}/left/{i}"), block, found.get(f"{path}/right/{i}"))
        for path, own in blocks.items()
        for i, block in enumerate(own)
    ]
    sandwich = functools.partial(matrices.sandwich, precision=precision)
    queue = iter(matrices.map_equal_shapes(sandwich, jobs))
    return {path: [next(queue) for _ in own] for path, own in blocks.items()}


def _metrics(factors: Factors, method: Preconditioner) -> dict[str, Array]:
    # A row of zeros is what there is to say where there are no factors.
    none = jnp.zeros_like(method.init(1, dtype=jnp.dtype("float32")).figures)[None]
    names = itertools.chain(*factors.names)
    signs = jnp.sign(factors.alignments)
    found = Figures(
        figures=jnp.concatenate([none, *(group.figures for group in factors.groups)]),
        left=np.array([False, *(name.split("/")[-2] == "left" for name in names)]),
        sign=signs.min() if signs.size else jnp.zeros(()),
    )
    made = method.metrics(found)
    return {name: value.astype(jnp.float32) for name, value in made.items()}


def scale_by_preconditioners(
    method: Preconditioner,
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
        dtypes = {path: leaf.dtype for path, leaf in leaves.items()}
        factors = _init(plans(params, cuts), dtypes, method)
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
        new = gradients | {
            path: matrices.from_blocks(plan, found[path], gradients[path].shape)
            for path, plan in chosen.items()
        }
        if chosen:
            alignments = jnp.stack(
                [norms.cosine(new[path], gradients[path]) for path in chosen]
            )
            factors = dataclasses.replace(factors, alignments=alignments)
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

    def part(group: Any, place: int) -> Any:
        # There may be further dimensions before, as of states that a scan stacked.
        return type(group)(
            **{
                field: leaf[..., place, :]
                if field == "figures"
                else leaf[..., place, :, :]
                for field, leaf in group._asdict().items()
            }
        )

    return {
        name: part(group, place)
        for node in jax.tree.leaves(state, is_leaf=is_state)
        if is_state(node) and isinstance(node.factors, Factors)
        for group, names in zip(node.factors.groups, node.factors.names, strict=True)
        for place, name in enumerate(names)
    }
