"""Two programs of one update, for two sizes of its arguments, compared."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from hpcjax.core.errors import ConfigError

_PROGRAMS = {"branches", "body_jaxpr", "call_jaxpr", "cond_jaxpr", "fun_jaxpr", "jaxpr"}
# What of an equation may tell the sizes of what it makes.
_SHAPES = {"aval", "dimensions", "new_sizes", "out_sharding", "shape", "sharding"}
# What differs between a matrix and a vector of its elements.
_RANKS = {"axes", "broadcast_dimensions", "permutation"}
_OF_RANKS = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze"}

# By variable, the numbers of its dimensions.
Cut = dict[Any, set[int]]


class Differing(ConfigError):
    """Two programs of one transform, for two sizes, are not the same but for shapes."""


def compare(programs: Sequence[Any]) -> Cut:
    """Returns the dimensions of the first program's variables that have other sizes.

    Raises:
      Differing: the programs differ in more than shapes: a number that is another one
        was made of a size, as a rate by the fan-in is.
    """
    first, *others = programs
    found: Cut = {}
    for other in others:
        require_same(first, other, found)
    return found


def require_same(left: Any, right: Any, cut: Cut | None) -> None:
    """Raises Differing if two programs differ in more than shapes.

    Adds to `cut` the dimensions of each variable whose sizes differ: those are cut, or
    made of the size of one that is. None compares what matrices become with what
    vectors of their elements do: the same, but for ranks.
    """
    left, right = bare(left), bare(right)
    pairs = zip(left.consts, right.consts, strict=False)
    if not all(_hold_same(*map(_as_array, pair)) for pair in pairs):
        raise Differing("it holds another array for another size")
    _compare_shapes(left.jaxpr, right.jaxpr, cut)
    (mine, given), (theirs, other) = (
        _list_equations(each.jaxpr, cut is None) for each in (left, right)
    )
    if [one.primitive for one in mine] != [one.primitive for one in theirs]:
        raise Differing("for another size it is another program")
    for at, (one, another) in enumerate(zip(mine, theirs, strict=True)):
        _compare_shapes(one, another, cut)
        plain = (
            one.params.keys() - _SHAPES - _PROGRAMS - (_RANKS if cut is None else set())
        )
        if given[at] != other[at] or any(
            _differ(one.params[key], another.params[key]) for key in plain
        ):
            numbers = [
                [x for x in own[at] if isinstance(x, str)] for own in (given, other)
            ]
            raise Differing(
                f"{one.primitive} has {numbers[0]}, and of another size {numbers[1]}"
                f"{place_of(one)}"
            )
        programs = inner(one), inner(another)
        if len(programs[0]) != len(programs[1]):
            raise Differing("for another size it has other branches")
        for pair in zip(*programs, strict=True):
            require_same(*pair, cut)
    if given[-1] != other[-1]:
        raise Differing("for another size it returns something else")


def bare(program: Any) -> Any:
    """Returns a program with its constants; one that is open has none."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def inner(equation: Any) -> list[Any]:
    """Returns the programs that an equation runs, with their constants if closed."""
    names = sorted(_PROGRAMS - {"branches"})
    found = [equation.params[name] for name in names if name in equation.params]
    return [*found, *equation.params.get("branches", ())]


def place_of(equation: Any) -> str:
    """Returns " in clip_by_global_norm (_clipping.py, line 97)", or nothing."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():
        file = pathlib.Path(frame.file_name)
        if not _JAX & {*file.parents}:
            function = frame.function_name.partition(".<locals>")[0]
            return f" in {function} ({file.name}, line {frame.line_num})"
    return ""


_JAX = {pathlib.Path(jax.__file__).parent}


def _list_equations(program: Any, across_ranks: bool) -> tuple[list[Any], list[Any]]:
    """Returns equations, and what each gets: literals, and numbers of variables.

    What the program returns comes last.
    """
    fresh = itertools.count()
    known = {each: next(fresh) for each in (*program.invars, *program.constvars)}

    def give(variables: Any) -> list[Any]:
        return [str(v.val) if isinstance(v, Literal) else known[v] for v in variables]

    equations, given = [], []
    for equation in program.eqns:
        if across_ranks and equation.primitive.name in _OF_RANKS:
            known[equation.outvars[0]] = give(equation.invars)[0]
            continue
        equations.append(equation)
        given.append(give(equation.invars))
        known.update((each, next(fresh)) for each in equation.outvars)
    return equations, [*given, give(program.outvars)]


def _compare_shapes(one: Any, other: Any, cut: Cut | None) -> None:
    """Adds the dimensions in which variables of programs, or equations, differ."""
    if cut is None:
        return
    halves = list_variables(one), list_variables(other)
    if len(halves[0]) != len(halves[1]):
        raise Differing("for another size it has more of something")
    for mine, theirs in zip(*halves, strict=True):
        sizes = [getattr(each.aval, "shape", ()) for each in (mine, theirs)]
        if len(sizes[0]) != len(sizes[1]):
            raise Differing("for another size it has another dimension")
        # A program that is called twice is one: what is cut once counts as cut.
        if not isinstance(mine, Literal):
            pairs = enumerate(zip(*sizes, strict=True))
            cut.setdefault(mine, set()).update(at for at, (a, b) in pairs if a != b)


def list_variables(whole: Any) -> list[Any]:
    """Returns the variables that a program or equation gets, holds and makes."""
    return [*whole.invars, *getattr(whole, "constvars", ()), *whole.outvars]


def _hold_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Says whether two arrays are equal, or one number everywhere."""
    number = single(one)
    return np.array_equal(one, other) or (
        number is not None and number == single(other)
    )


def _differ(one: Any, other: Any) -> bool:
    """Says whether parameters that are numbers, or several of them, differ."""
    kinds = (bool, int, float, str, tuple, np.dtype)
    return isinstance(one, kinds) and one != other


def _as_array(value: Any) -> np.ndarray:
    """Returns a constant as an array of NumPy; of a key its numbers."""
    drawn = jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if drawn else value)


def single(value: Any) -> Any:
    """Returns the number that a literal or constant is everywhere, or None."""
    array = _as_array(value)
    return array.flat[0] if array.size and (array == array.flat[0]).all() else None
