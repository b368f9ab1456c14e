"""Telling whether a transform may work on parts of parameters."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from hpcjax.core import shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.shards import Specs

NEEDS = (
    "parameters that are spread over devices need an optimizer that works on elements "
    "and, by `cut`, on norms, such as sgd, adamw or lamb"
)
# A dimension that is cut has this size while a transform is looked at, and no other one
# a multiple of it.
_CUT, _OTHER = 11, 2
_AXIS = "part"
_COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "pmax", "pmin", "psum", "psum_invariant"),
}
# What an element becomes by these depends on others, or on its place.
_MIXING = {
    *("argsort", "axis_index", "conv_general_dilated", "cumlogsumexp", "cummax"),
    *("cummin", "cumprod", "cumsum", "dot_general", "fft", "gather", "iota"),
    *("random_bits", "rev", "scan", "scatter", "scatter-add", "sort", "threefry2x32"),
    *("top_k", "while"),
}


def check_cuttable(
    tx: optax.GradientTransformation, shapes: Any, stepped: Specs
) -> None:
    """Raises ConfigError unless a transform gives parts what it would give the whole.

    Its state must consist of numbers and of arrays like parameters: Adafactor's rows,
    Jorge's and Shampoo's factors are neither. And its update is traced, and followed
    from its arguments to its results, all branches of it. What is summed up, or taken
    the maximum of, along a dimension that is cut is of a part until a collective along
    the axes that `cut` tells has made one of all parts. No result may depend on it, as
    those of `optax.clip_by_global_norm` do, nor on places or draws.

    Whether what is done by collectives is right is not looked at.

    Args:
      tx: the transform; its rules are for the paths of `shapes`.
      shapes: of the parameters.
      stepped: how they are to be cut.
    """
    cut = {
        path: tuple({dim for dim, _ in shards.list_cuts(stepped, path, leaf.ndim)})
        for path, leaf in trees.flatten(shapes).items()
    }
    likes = {
        path: jax.ShapeDtypeStruct(_mark(leaf.ndim, cut[path]), leaf.dtype)
        for path, leaf in trees.flatten(shapes).items()
    }
    params = trees.unflatten(shapes, likes)
    told = {path: (_AXIS,) for path, dims in cut.items() if dims}
    try:
        state = jax.eval_shape(tx.init, params)
        _check_state(tx, state, params)
        results, partial = _follow(tx, state, params, told)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{NEEDS}: this one cannot be looked at: {error}") from error
    wrong = [
        path for path, is_of_part in zip(results, partial, strict=True) if is_of_part
    ]
    if wrong:
        raise ConfigError(
            f"{NEEDS}: results of this one depend on sums, places or draws of what one "
            f"device has, {wrong[:3]}"
        )


def _mark(ndim: int, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(_CUT if at - ndim in dims else _OTHER for at in range(ndim))


def _check_state(tx: optax.GradientTransformation, state: Any, params: Any) -> None:
    def fits(leaf: Any, like: Any) -> bool:
        return getattr(leaf, "shape", like.shape) == like.shape

    def is_number(leaf: Any) -> bool:
        # A key would draw for each part what another one draws for the whole.
        drawn = jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jax.dtypes.prng_key)
        return math.prod(getattr(leaf, "shape", (0,))) == 1 and not drawn

    good = optax.tree.map_params(
        tx.init,
        fits,
        state,
        params,
        transform_non_params=is_number,
        is_leaf=shards.is_masked,
    )
    wrong = [path for path, fitting in trees.flatten(good).items() if not fitting]
    if wrong:
        raise ConfigError(
            f"{NEEDS}: the state of this one holds what is neither a number nor like a "
            f"parameter, {wrong[:3]}"
        )


def _follow(
    tx: optax.GradientTransformation, state: Any, params: Any, cut: Any
) -> tuple[list[str], list[bool]]:
    """Returns the paths of updates and state, and whether each is of one part."""

    def update(state: Any, params: Any, grads: Any) -> Any:
        extra = {"value": 1.0, "step": 0, "loss_terms": 1.0}
        wide = optax.with_extra_args_support(tx)
        return wide.update(grads, state, params, cut=cut, **extra)

    traced, results = jax.make_jaxpr(update, axis_env=[(_AXIS, 2)], return_shape=True)(
        state, params, params
    )
    start = [False] * len(traced.jaxpr.invars)
    return list(trees.flatten(results)), _of_parts(traced.jaxpr, start)


def _of_parts(program: Any, given: Sequence[bool]) -> list[bool]:
    """Returns which results of a program depend on what is of one part."""
    known = dict(zip(program.invars, given, strict=True))

    def read(variable: Any) -> bool:
        return not isinstance(variable, Literal) and known.get(variable, False)

    for equation in program.eqns:
        found = _pass_on(equation, [read(variable) for variable in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [read(variable) for variable in program.outvars]


def _pass_on(equation: Any, given: list[bool]) -> list[bool]:
    """Returns which results of an equation are of one part."""
    name, inner = equation.primitive.name, _inner(equation)
    if name in _COLLECTIVES:
        return [False] * len(equation.outvars)
    if name == "cond":
        which, *others = given
        taken = [_of_parts(branch, others) for branch in inner]
        return [which or any(each) for each in zip(*taken, strict=True)]
    if inner and name not in _MIXING:
        return _of_parts(inner[0], given)
    all_of = (*equation.invars, *equation.outvars)
    mixes = name in _MIXING or (name == "reshape" and _rearranges(equation))
    mixed = mixes and any(map(_is_cut, all_of))
    loses = any(map(_is_cut, equation.invars))
    return [
        any(given) or mixed or (loses and not _is_cut(result))
        for result in equation.outvars
    ]


def _rearranges(equation: Any) -> bool:
    """Says whether a reshape does more than add or remove sides of length 1."""
    given, made = (
        [size for size in variable.aval.shape if size != 1]
        for variable in (equation.invars[0], equation.outvars[0])
    )
    return given != made


def _inner(equation: Any) -> list[Any]:
    """Returns the programs that an equation runs."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    found = [equation.params[name] for name in names if name in equation.params]
    found += equation.params.get("branches", ())
    return [getattr(program, "jaxpr", program) for program in found]


def _is_cut(variable: Any) -> bool:
    shape = getattr(variable.aval, "shape", ())
    return any(size and size % _CUT == 0 for size in shape)
