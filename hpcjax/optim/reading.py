"""The program of an update, read: what of its results depends on what."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from hpcjax.optim.comparing import (
    Cut,
    bare,
    inner,
    list_variables,
    place_of,
    single,
)

_COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "pmax", "pmin", "psum", "psum_invariant"),
}
# These leave a number as it is. They copy it to other places, but to none along a
# dimension that it has.
_COPIES = {
    *("broadcast_in_dim", "copy", "copy_p", "expand_dims", "pcast", "pvary"),
    *("squeeze", "stop_gradient", "transpose"),
}
# What an element becomes by these depends on the elements at its place alone: by name,
# the function of NumPy that computes it, or None.
_ELEMENTWISE: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(("add", "add_any"), np.add),
    **{name: getattr(np, name) for name in ("abs", "ceil", "cbrt", "cos", "cosh")},
    **{name: getattr(np, name) for name in ("conj", "exp", "exp2", "expm1", "floor")},
    **{name: getattr(np, name) for name in ("imag", "log", "log1p", "nextafter")},
    **{name: getattr(np, name) for name in ("real", "sign", "sin", "sinh", "sqrt")},
    **{name: getattr(np, name) for name in ("square", "tan", "tanh")},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"not": np.invert, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"max": np.maximum, "min": np.minimum, "neg": np.negative},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "is_finite": np.isfinite},
    **{"pow": lambda x, y: np.power(np.float64(x), y)},
    **{"rsqrt": lambda x: 1 / np.sqrt(x)},
    **{"round": lambda x, even: np.rint(x) if even else np.trunc(x + np.sign(x) / 2)},
    **{"clamp": lambda low, x, high: np.clip(x, low, high)},
    **{"select_n": lambda which, *cases: cases[int(which)]},
    **{"convert_element_type": lambda x: x, "integer_pow": lambda x, y: x**y},
    **dict.fromkeys(("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh")),
    **dict.fromkeys(("complex", "digamma", "erf", "erf_inv", "erfc", "lgamma")),
    **dict.fromkeys(
        ("logistic", "population_count", "reduce_precision", "rem", "shift_left")
    ),
    **dict.fromkeys(("shift_right_arithmetic", "shift_right_logical")),
    # Of a wider or narrower type it adds or takes away a last dimension, never cut.
    "bitcast_convert_type": None,
}
# What the function gets besides, by the name of the parameter.
_FURTHER = {"integer_pow": "y", "round": "rounding_method"}
# XLA may take what is smaller for zero, and NumPy does not.
_TINY = np.finfo(np.float32).tiny
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
            known[variable] = Told(at=single(value))

        def read(variable: Any) -> Told:
            if isinstance(variable, Literal):
                return Told(at=single(variable.val))
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
        if at is not None or out.aval.size != 1:
            return at
        name, how = equation.primitive.name, str(equation.params)
        # A program that is called twice makes two numbers of one variable.
        key = (
            (name, how, *ats) if name in _ELEMENTWISE and None not in ats else object()
        )
        return self.unknown.setdefault(key, Unknown(-1 - len(self.unknown)))

    def _becomes_partial(
        self, equation: Any, given: list[Told], made_by: dict[Any, Any]
    ) -> bool | Unless:
        """Says whether an equation meets a dimension that is cut, and may not."""
        name = equation.primitive.name
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
        """Says whether an equation, or what it runs, is of a part or cannot be read."""
        # These tell the number of a part, or call what may know a size.
        if {"axis_name", "callback"} & equation.params.keys():
            return True
        if any(map(self.find_cut, list_variables(equation))):
            return True
        bodies = (bare(program).jaxpr for program in inner(equation))
        return any(self._meets_cut(each) for body in bodies for each in body.eqns)

    def find_cut(self, variable: Any) -> set[int]:
        """Returns which dimensions of a variable are cut."""
        return set() if isinstance(variable, Literal) else self.cut[variable]


def _rearranges(equation: Any) -> bool:
    """Says whether a reshape does more than add or remove sides of length 1."""
    given, made = (
        [size for size in variable.aval.shape if size != 1]
        for variable in (equation.invars[0], equation.outvars[0])
    )
    return given != made


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
        return Unless(at.by, good[0]) if len(good) == 1 else len(good) < len(at.cases)
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
    moves = name in ("broadcast_in_dim", "transpose") or name in _REDUCTIONS
    if moves and equation.invars[0].aval.size != 1 and not _is_known(ats[0]):
        return None  # it may be another number at each place
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
    more = [equation.params[_FURTHER[name]]] if name in _FURTHER else []
    with np.errstate(all="ignore"):
        if any(0 < abs(at) < _TINY for at in ats):
            return None
        found = np.asarray(function(*ats, *more))
        made = found.astype(equation.outvars[0].aval.dtype)
        # What no integer can be, NumPy and XLA make different ones of.
        lost = found.dtype.kind == "f" and made.dtype.kind in "iu"
        return None if lost and made != np.trunc(found) else made[()]


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
