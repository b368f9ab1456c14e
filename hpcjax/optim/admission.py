"""Which transforms may work on parts of parameters: told by what they do."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval

from hpcjax.core import shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.shards import Specs

NEEDS = (
    "parameters that are spread over devices need an optimizer that works on elements "
    "and, by `cut`, on norms, such as sgd, adamw or lamb"
)
SIZED = f"{NEEDS}: this one works by the size of what a device has"
# Sizes of the dimensions of an array that are cut, each time that a transform is looked
# at. Of one array they differ, so that one dimension is not taken for another.
_SIZES = (11, 17, 23, 31, 41, 47), (13, 19, 29, 37, 43, 53), (3, 5, 7, 2, 4, 6)
_AXIS = "part"
_COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "pmax", "pmin", "psum", "psum_invariant"),
}
# What an element becomes by these depends on the elements at its place alone.
_ELEMENTWISE = {
    *(
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
    ),
    *("atanh", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type"),
    *(
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
    ),
    *("exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite"),
    *("le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"),
    *("neg", "nextafter", "not", "or", "pcast", "population_count", "pow", "pvary"),
    *("real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt"),
    *("square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    # These copy it to other places, but to none along a dimension that it has.
    *("broadcast_in_dim", "expand_dims", "squeeze", "transpose"),
}
_REDUCTIONS = {
    *("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"),
    *("reduce_sum", "reduce_xor"),
}
# Programs that are run once, in the place of the equation.
_CALLS = {
    *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2"),
}
_PROGRAMS = {"branches", "body_jaxpr", "call_jaxpr", "cond_jaxpr", "fun_jaxpr", "jaxpr"}
# What of an equation may tell the sizes of what it makes.
_SHAPES = {"aval", "dimensions", "new_sizes", "out_sharding", "shape", "sharding"}

# By variable, the numbers of its dimensions.
Cut = dict[Any, set[int]]


def check_cuttable(
    tx: optax.GradientTransformation, shapes: Any, stepped: Specs
) -> None:
    """Raises ConfigError unless a transform gives parts what it would give the whole.

    Its state must consist of numbers and of arrays like parameters: Adafactor's rows,
    Jorge's and Shampoo's factors are neither. And its update is traced, and followed
    from its arguments to its results, all branches of it. It may work on elements.
    What is summed up, or taken the maximum of, along a dimension that is cut is of a
    part until a collective along the axes that `cut` tells has made one of all parts.
    No result may depend on it, as those of `optax.clip_by_global_norm` do, and what
    else meets a dimension that is cut may move elements, and is refused.

    It is traced for parts of several sizes, and for the whole. The programs must be the
    same but for shapes: a number that is another one was made of a size, as a rate by
    the fan-in is. What has another shape is cut, or made of the size of what is. Rules
    that hold between two of these sizes alone are not found.

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
    told = {path: (_AXIS,) for path, dims in cut.items() if dims}
    programs = []
    for own in (*_SIZES, None):
        likes = {
            path: jax.ShapeDtypeStruct(_mark(leaf.shape, cut[path], own), leaf.dtype)
            for path, leaf in trees.flatten(shapes).items()
        }
        params = trees.unflatten(shapes, likes)
        try:
            state = jax.eval_shape(tx.init, params)
            _check_state(tx, state, params)
            programs.append(_trace(tx, state, params, told))
        except ConfigError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{NEEDS}: this one cannot be looked at: {error}"
            ) from error
    (program, results), *others = programs
    found: Cut = {}
    for other, _ in others:
        _require_same(program, other, found)
    reader = _Reader(found)
    partial = reader.follow(program.jaxpr, [False] * len(program.in_avals))
    wrong = [
        path for path, is_of_part in zip(results, partial, strict=True) if is_of_part
    ]
    if wrong:
        raise ConfigError(
            f"{NEEDS}: results of this one depend on sums, places or draws of what one "
            f"device has, {wrong[:3]}, by {', '.join(sorted(reader.by))}"
        )


def _mark(
    shape: tuple[int, ...], dims: Sequence[int], sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Returns a shape in which each dimension that is cut has a size of its own."""
    if sizes is None:
        return shape
    ndim = len(shape)
    return tuple(sizes[at] if at - ndim in dims else shape[at] for at in range(ndim))


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


def _trace(
    tx: optax.GradientTransformation, state: Any, params: Any, cut: Any
) -> tuple[Any, list[str]]:
    """Returns the program of an update, and the paths of updates and state."""

    def update(state: Any, params: Any, grads: Any) -> Any:
        extra = {"value": 1.0, "step": 0, "loss_terms": 1.0}
        wide = optax.with_extra_args_support(tx)
        return wide.update(grads, state, params, cut=cut, **extra)

    traced, results = jax.make_jaxpr(update, axis_env=[(_AXIS, 2)], return_shape=True)(
        state, params, params
    )
    outputs = [True] * len(traced.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, outputs, instantiate=True)
    return traced.replace(jaxpr=needed), list(trees.flatten(results))


def _require_same(left: Any, right: Any, cut: Cut) -> None:
    """Raises ConfigError if two programs differ in more than shapes.

    Adds to `cut` the dimensions of each variable whose sizes differ: those are cut, or
    made of the size of one that is.
    """
    left, right, same = _bare(left), _bare(right), True
    for one, other in zip(left.consts, right.consts, strict=False):
        same &= np.array_equal(np.asarray(one), np.asarray(other))
    if not same:
        raise ConfigError(f"{SIZED}: it holds another array for another size")
    _compare_shapes(left.jaxpr, right.jaxpr, cut)
    names = [[each.primitive.name for each in half.eqns] for half in (left, right)]
    if names[0] != names[1]:
        raise ConfigError(f"{SIZED}: for another size it is another program")
    for name, one, other in zip(names[0], left.eqns, right.eqns, strict=True):
        _compare_shapes(one, other, cut)
        numbers = [
            [str(v.val) for v in each.invars if isinstance(v, Literal)]
            for each in (one, other)
        ]
        plain = one.params.keys() - _SHAPES - _PROGRAMS
        if numbers[0] != numbers[1] or any(
            _differ(one.params[key], other.params[key]) for key in plain
        ):
            raise ConfigError(
                f"{SIZED}: {name} has {numbers[0]}, and of another size {numbers[1]}"
            )
        for mine, theirs in zip(_inner(one), _inner(other), strict=True):
            _require_same(mine, theirs, cut)


def _bare(program: Any) -> Any:
    """Returns a program with its constants; one that is open has none."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def _compare_shapes(one: Any, other: Any, cut: Cut) -> None:
    """Adds the dimensions in which variables of programs, or equations, differ."""
    for mine, theirs in zip(_variables(one), _variables(other), strict=True):
        sizes = [getattr(each.aval, "shape", ()) for each in (mine, theirs)]
        if len(sizes[0]) != len(sizes[1]):
            raise ConfigError(f"{SIZED}: for another size it has another dimension")
        # A program that is called twice is one: what is cut once counts as cut.
        if not isinstance(mine, Literal):
            pairs = enumerate(zip(*sizes, strict=True))
            cut.setdefault(mine, set()).update(at for at, (a, b) in pairs if a != b)


def _variables(whole: Any) -> list[Any]:
    """Returns the variables that a program or equation gets, holds and makes."""
    return [*whole.invars, *getattr(whole, "constvars", ()), *whole.outvars]


def _differ(one: Any, other: Any) -> bool:
    """Says whether parameters that are numbers, or several of them, differ."""
    kinds = (bool, int, float, str, tuple)
    return isinstance(one, kinds) and one != other


class _Reader:
    """Follows what is of one part through a program.

    Args:
      cut: the dimensions of variables that are cut, or made of the size of such a one.

    Attributes:
      by: names of the primitives by which something became so.
    """

    def __init__(self, cut: Cut) -> None:
        self.cut, self.by = cut, set()

    def follow(self, program: Any, given: Sequence[bool]) -> list[bool]:
        """Returns which results of a program depend on what is of one part."""
        known = dict(zip(program.invars, given, strict=True))

        def read(variable: Any) -> bool:
            return not isinstance(variable, Literal) and known.get(variable, False)

        for equation in program.eqns:
            found = self._pass_on(equation, [read(each) for each in equation.invars])
            known.update(zip(equation.outvars, found, strict=True))
        return [read(variable) for variable in program.outvars]

    def _pass_on(self, equation: Any, given: list[bool]) -> list[bool]:
        """Returns which results of an equation are of one part."""
        name, inner = equation.primitive.name, _inner(equation)
        if name in _COLLECTIVES:
            return [False] * len(equation.outvars)
        if name == "cond":
            which, *others = given
            taken = [self.follow(_bare(branch).jaxpr, others) for branch in inner]
            # Where it is chosen by a part's number, parts go different ways.
            return [which or any(each) for each in zip(*taken, strict=True)]
        if name in _CALLS and inner:
            return self.follow(_bare(inner[0]).jaxpr, given)
        if self._becomes_partial(equation):
            self.by.add(name)
            return [True] * len(equation.outvars)
        return [any(given)] * len(equation.outvars)

    def _becomes_partial(self, equation: Any) -> bool:
        """Says whether an equation meets a dimension that is cut, and may not."""
        name = equation.primitive.name
        if name == "axis_index":
            return True
        if name in _ELEMENTWISE:
            return False
        if name in _REDUCTIONS:
            return bool(self._find_cut(equation.invars[0]) & {*equation.params["axes"]})
        if name == "reshape" and not _rearranges(equation):
            return False
        return self._meets_cut(equation)

    def _meets_cut(self, equation: Any) -> bool:
        """Says whether a dimension that is cut is in an equation or in what it runs."""
        if any(map(self._find_cut, _variables(equation))):
            return True
        bodies = (_bare(program).jaxpr for program in _inner(equation))
        return any(self._meets_cut(each) for body in bodies for each in body.eqns)

    def _find_cut(self, variable: Any) -> set[int]:
        return set() if isinstance(variable, Literal) else self.cut[variable]


def list_integers(program: Any) -> list[int]:
    """Returns the integers that stand in a program and in those that it runs."""
    found = []
    for equation in program.eqns:
        literals = (each.val for each in equation.invars if isinstance(each, Literal))
        found += [
            int(each)
            for each in literals
            if jnp.issubdtype(jnp.result_type(each), jnp.integer)
        ]
        for inner in _inner(equation):
            found += list_integers(_bare(inner).jaxpr)
    return found


def _rearranges(equation: Any) -> bool:
    """Says whether a reshape does more than add or remove sides of length 1."""
    given, made = (
        [size for size in variable.aval.shape if size != 1]
        for variable in (equation.invars[0], equation.outvars[0])
    )
    return given != made


def _inner(equation: Any) -> list[Any]:
    """Returns the programs that an equation runs, with their constants if closed."""
    names = sorted(_PROGRAMS - {"branches"})
    found = [equation.params[name] for name in names if name in equation.params]
    return [*found, *equation.params.get("branches", ())]
