"""The program of an update, read: what of its results depends on what."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from hpcjax.core.errors import ConfigError

_COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "pmax", "pmin", "psum", "psum_invariant"),
}
# These leave a number as it is. They copy it to other places, but to none along a
# dimension that it has.
_COPIES = {
    *("broadcast_in_dim", "copy", "copy_p", "expand_dims", "pcast", "pvary"),
    *("reduce_precision", "squeeze", "stop_gradient", "transpose"),
}
# What an element becomes by these depends on the elements at its place alone: by name,
# the function of NumPy that computes it, or None.
_ELEMENTWISE: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(("add", "add_any"), np.add),
    **{name: getattr(np, name) for name in ("abs", "ceil", "cbrt", "exp", "exp2")},
    **{name: getattr(np, name) for name in ("expm1", "floor", "imag", "log", "log1p")},
    **{name: getattr(np, name) for name in ("nextafter", "real", "sign", "sin")},
    **{name: getattr(np, name) for name in ("cos", "cosh", "conj", "sinh", "sqrt")},
    **{name: getattr(np, name) for name in ("square", "tan", "tanh")},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"not": np.invert, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"max": np.maximum, "min": np.minimum, "neg": np.negative},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "is_finite": np.isfinite},
    **{"pow": lambda x, y: np.power(np.float64(x), y)},
    **{"rem": np.fmod, "round": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x)},
    **{"clamp": lambda low, x, high: np.clip(x, low, high)},
    **{"select_n": lambda which, *cases: cases[int(which)]},
    **{"convert_element_type": lambda x: x, "integer_pow": lambda x, y: x**y},
    **dict.fromkeys(("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh")),
    **dict.fromkeys(("complex", "digamma", "erf", "erf_inv", "erfc", "lgamma")),
    **dict.fromkeys(("logistic", "population_count", "shift_left")),
    **dict.fromkeys(("shift_right_arithmetic", "shift_right_logical")),
}
# By name, what adds nothing to one.
_REDUCTIONS: dict[str, float | bool | None] = {
    **{"reduce_and": True, "reduce_or": False, "reduce_sum": 0, "reduce_prod": 1},
    **{"reduce_max": 0, "reduce_min": None, "reduce_xor": None},
}
# Nothing that these make is below zero.
_NEVER_NEGATIVE = {"abs", "exp", "sqrt", "square"}
# Programs that are run once, in the place of the equation.
_CALLS = {
    *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2"),
}
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


class Unknown(NamedTuple):
    """A number that is not known; two of one name are the same."""

    name: int


class Chosen(NamedTuple):
    """What is one of several numbers, by a number that is not known."""

    by: Unknown
    cases: tuple[Any, ...]


class Unless(NamedTuple):
    """Of a part, unless that number chooses this case."""

    by: Unknown
    case: int


class Told(NamedTuple):
    """What is known of a value.

    Attributes:
      of_part: whether it depends on sums, places or draws of what one part alone has.
      at: what it is at the places that are looked at: a number, or one that is not
        known or `Chosen`; None if these differ from place to place.
    """

    of_part: bool | Unless = False
    at: Any = None


class Reader:
    """Follows values through a program, from its arguments to its results.

    Args:
      cut: the dimensions of variables that are cut, or made of the size of such a one.
      norms: whether what is summed up over all that is cut is the whole's if each
        number at the places that are looked at adds nothing to it.

    Attributes:
      by: by what something became of a part, with its function and line.
    """

    def __init__(self, cut: Cut, *, norms: bool = False) -> None:
        self.cut, self.norms, self.by = cut, norms, dict[str, None]()
        self.unknown: dict[Any, Unknown] = {}

    def follow(self, program: Any, given: Sequence[Told]) -> list[Told]:
        """Returns what is told of a program's results by what is of its arguments."""
        program = bare(program)
        jaxpr, made_by = program.jaxpr, {}
        known = dict(zip(jaxpr.invars, given, strict=True))
        for variable, value in zip(jaxpr.constvars, program.consts, strict=True):
            known[variable] = Told(at=_single(value))

        def read(variable: Any) -> Told:
            if isinstance(variable, Literal):
                return Told(at=_single(variable.val))
            return known[variable]

        for equation in jaxpr.eqns:
            inputs = [read(each) for each in equation.invars]
            found = self._pass_on(equation, inputs, made_by)
            known.update(zip(equation.outvars, found, strict=True))
            made_by.update(dict.fromkeys(equation.outvars, equation))
        return [read(variable) for variable in jaxpr.outvars]

    def _pass_on(
        self, equation: Any, given: list[Told], made_by: dict[Any, Any]
    ) -> list[Told]:
        """Returns what is told of an equation's results."""
        name, programs = equation.primitive.name, inner(equation)
        if name in _COLLECTIVES:
            return [Told()] * len(equation.outvars)
        if name == "cond":
            which, *others = given
            taken = [self.follow(branch, others) for branch in programs]
            return [_join(which.of_part, each) for each in zip(*taken, strict=True)]
        if name in _CALLS and programs:
            return self.follow(programs[0], given)
        if of_part := self._becomes_partial(equation, given, made_by):
            self.by[f"{name}{place_of(equation)}"] = None
        of_part = of_part or _pass_on_parts(name, given)
        reduced = self.find_cut(equation.invars[0]) if name in _REDUCTIONS else set()
        summed = bool(reduced & {*equation.params.get("axes", ())})
        ats = [each.at for each in given]
        # A sum over all places is no longer what it is at those that are looked at.
        at = None if summed else _value(name, equation, ats)
        named = [self._name(equation, out, at, ats) for out in equation.outvars]
        return [Told(of_part, each) for each in named]

    def _name(self, equation: Any, out: Any, at: Any, ats: list[Any]) -> Any:
        """Returns what a result is; one that is a single number gets a name."""
        if at is not None or self.find_cut(out):
            return at
        known = equation.primitive.name in _ELEMENTWISE and None not in ats
        key = (equation.primitive.name, *ats) if known else out
        return self.unknown.setdefault(key, Unknown(-1 - len(self.unknown)))

    def _becomes_partial(
        self, equation: Any, given: list[Told], made_by: dict[Any, Any]
    ) -> bool | Unless:
        """Says whether an equation meets a dimension that is cut, and may not."""
        name = equation.primitive.name
        if name == "axis_index":
            return True
        if name in _ELEMENTWISE or name in _COPIES:
            return False
        if name in _REDUCTIONS:
            operand, axes = equation.invars[0], {*equation.params["axes"]}
            cut = self.find_cut(operand)
            if self.norms and cut <= axes:
                return bool(cut) and _adds(name, given[0].at, made_by.get(operand))
            # In other orders of the elements a sum along the others is another one.
            return bool(cut) if self.norms else bool(cut & axes)
        if name == "reshape" and not _rearranges(equation):
            return False
        return self._meets_cut(equation)

    def _meets_cut(self, equation: Any) -> bool:
        """Says whether a dimension that is cut is in an equation or in what it runs."""
        if any(map(self.find_cut, _variables(equation))):
            return True
        bodies = (bare(program).jaxpr for program in inner(equation))
        return any(self._meets_cut(each) for body in bodies for each in body.eqns)

    def find_cut(self, variable: Any) -> set[int]:
        """Returns which dimensions of a variable are cut."""
        return set() if isinstance(variable, Literal) else self.cut[variable]


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
    if not all(_hold_same(*map(np.asarray, pair)) for pair in pairs):
        raise Differing("it holds another array for another size")
    _compare_shapes(left.jaxpr, right.jaxpr, cut)
    halves = [_list_equations(each.jaxpr, cut is None) for each in (left, right)]
    names = [[each.primitive.name for each in half] for half in halves]
    if names[0] != names[1]:
        raise Differing("for another size it is another program")
    for name, one, other in zip(names[0], *halves, strict=True):
        _compare_shapes(one, other, cut)
        numbers = [
            [str(v.val) for v in each.invars if isinstance(v, Literal)]
            for each in (one, other)
        ]
        plain = (
            one.params.keys() - _SHAPES - _PROGRAMS - (_RANKS if cut is None else set())
        )
        if numbers[0] != numbers[1] or any(
            _differ(one.params[key], other.params[key]) for key in plain
        ):
            raise Differing(
                f"{name} has {numbers[0]}, and of another size {numbers[1]}"
                f"{place_of(one)}"
            )
        for mine, theirs in zip(inner(one), inner(other), strict=True):
            require_same(mine, theirs, cut)


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
        if not _JAX & {*file.parents} and file != _OWN:
            function = frame.function_name.partition(".<locals>")[0]
            return f" in {function} ({file.name}, line {frame.line_num})"
    return ""


_OWN = pathlib.Path(__file__)
_JAX = {pathlib.Path(jax.__file__).parent}


def _list_equations(program: Any, across_ranks: bool) -> list[Any]:
    if not across_ranks:
        return program.eqns
    return [each for each in program.eqns if each.primitive.name not in _OF_RANKS]


def _compare_shapes(one: Any, other: Any, cut: Cut | None) -> None:
    """Adds the dimensions in which variables of programs, or equations, differ."""
    if cut is None:
        return
    for mine, theirs in zip(_variables(one), _variables(other), strict=True):
        sizes = [getattr(each.aval, "shape", ()) for each in (mine, theirs)]
        if len(sizes[0]) != len(sizes[1]):
            raise Differing("for another size it has another dimension")
        # A program that is called twice is one: what is cut once counts as cut.
        if not isinstance(mine, Literal):
            pairs = enumerate(zip(*sizes, strict=True))
            cut.setdefault(mine, set()).update(at for at, (a, b) in pairs if a != b)


def _variables(whole: Any) -> list[Any]:
    """Returns the variables that a program or equation gets, holds and makes."""
    return [*whole.invars, *getattr(whole, "constvars", ()), *whole.outvars]


def _hold_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Says whether two arrays are equal, or one number everywhere."""
    number = _single(one)
    return np.array_equal(one, other) or (
        number is not None and number == _single(other)
    )


def _differ(one: Any, other: Any) -> bool:
    """Says whether parameters that are numbers, or several of them, differ."""
    kinds = (bool, int, float, str, tuple)
    return isinstance(one, kinds) and one != other


def _rearranges(equation: Any) -> bool:
    """Says whether a reshape does more than add or remove sides of length 1."""
    given, made = (
        [size for size in variable.aval.shape if size != 1]
        for variable in (equation.invars[0], equation.outvars[0])
    )
    return given != made


def _single(value: Any) -> Any:
    """Returns the number that a literal or constant is everywhere, or None."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        return None
    array = np.asarray(value)
    return array.flat[0] if array.size and (array == array.flat[0]).all() else None


def _is_known(at: Any) -> bool:
    return at is not None and not isinstance(at, Unknown | Chosen)


def is_number(at: Any, number: float | None) -> bool:
    """Says whether a value is known, and is this number."""
    return _is_known(at) and bool(at == number)


def meet(one: Any, other: Any) -> Any:
    """Returns a value that is the same in two ways, or None."""
    if type(one) is not type(other):
        return None
    nan = _is_known(one) and one != one and other != other  # noqa: PLR0124
    return one if nan or one == other else None


def _join(which: bool | Unless, branches: Sequence[Told]) -> Told:
    """Returns what is told of a result of branches, of which parts may choose one."""
    at = functools.reduce(meet, [each.at for each in branches])
    # Where it is chosen by a part's number, parts go different ways.
    return Told(bool(which) or any(each.of_part for each in branches), at)


def _adds(name: str, at: Any, maker: Any) -> bool | Unless:
    """Says whether numbers at the places that are looked at change a reduction."""
    neutral = _REDUCTIONS[name]
    if name == "reduce_max" and not (
        maker is not None and maker.primitive.name in _NEVER_NEGATIVE
    ):
        return True
    if isinstance(at, Chosen):
        good = [i for i, each in enumerate(at.cases) if is_number(each, neutral)]
        return Unless(at.by, good[0]) if len(good) == 1 else not good
    return neutral is None or not is_number(at, neutral)


def _pass_on_parts(name: str, given: Sequence[Told]) -> bool | Unless:
    """Returns whether what is made of values is of a part."""
    kinds = {each.of_part for each in given}
    if name == "select_n" and isinstance(given[0].at, Unknown):
        which, *cases = given
        never = [Unless(which.at, case) for case in range(len(cases))]
        pairs = zip(cases, never, strict=True)
        kinds = {each.of_part for each, free in pairs if each.of_part != free}
        kinds.add(which.of_part)
    kinds -= {False}
    return kinds.pop() if len(kinds) == 1 else bool(kinds)


def _value(name: str, equation: Any, ats: list[Any]) -> Any:
    """Returns what an equation makes at the places that are looked at, or None."""
    first = next((at for at in ats if isinstance(at, Chosen)), None)
    if first is None:
        return _value_of(name, equation, ats)
    cases = []
    for case in range(len(first.cases)):
        own = [
            at.cases[case] if isinstance(at, Chosen) and at.by == first.by else at
            for at in ats
        ]
        cases.append(_value(name, equation, own))
    same = functools.reduce(meet, cases)
    return Chosen(first.by, tuple(cases)) if same is None else same


def _value_of(name: str, equation: Any, ats: list[Any]) -> Any:
    """Returns the same, where nothing is `Chosen`."""
    if name in _COPIES or name == "reshape":
        return ats[0]
    if name in _REDUCTIONS:
        idle = name in ("reduce_max", "reduce_min") or is_number(ats[0], _idle(name))
        return ats[0] if idle else None
    if name not in _ELEMENTWISE:
        return None
    function = _ELEMENTWISE[name]
    if function is None or not all(map(_is_known, ats)):
        return _absorb(name, ats)
    more = (equation.params["y"],) if name == "integer_pow" else ()
    with np.errstate(all="ignore"):
        found = function(*ats, *more)
    return np.asarray(found).astype(equation.outvars[0].aval.dtype)[()]


def _idle(name: str) -> float:
    """Returns the number that any number of leaves a reduction at this number."""
    neutral = _REDUCTIONS[name]
    return np.nan if neutral is None else float(neutral)


def _absorb(name: str, ats: list[Any]) -> Any:
    """Returns what an operation makes of some values that are not known, or None."""
    if name == "select_n":
        which, *cases = ats
        if _is_known(which):
            return cases[int(which)]
        same = functools.reduce(meet, cases)
        split = isinstance(which, Unknown) and all(map(_is_known, cases))
        return Chosen(which, tuple(cases)) if same is None and split else same
    left, right = (*ats, None)[:2]
    if name in ("mul", "and") and (is_number(left, 0) or is_number(right, 0)):
        return left if is_number(left, 0) else right
    if name == "div" and is_number(left, 0) and not is_number(right, 0):
        return left
    neutral = {"add": 0, "add_any": 0, "sub": 0, "mul": 1, "div": 1}.get(name)
    if neutral is not None and is_number(right, neutral):
        return left
    turned = name in ("add", "add_any", "mul") and is_number(left, neutral)
    return right if turned else None
