"""The layouts of all tensors of a program that take the least time together.

Each operator has configurations: layouts of its tensors, and a time. The layouts are
chosen by an exact mixed-integer program. With x[t, l] = 1 if tensors t have layout l,
those that must be equal being one, and y[o, c] = 1 if operator o has configuration c,

  minimise Σ seconds[o, c] · y[o, c]  with  Σ_l x[t, l] = 1  and
  Σ_{c with layout l of t} y[o, c] = x[t, l]  for all tensors t of all operators o.

References:
  Ivanov et al., Data Movement Is All You Need, MLSys 2021, §6.2, which takes shortest
  paths; see `select_by_paths`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest

# Costs are scaled to at most 1; those closer than this are equal to the solver.
_TOLERANCE = 1e-9


class Configuration(NamedTuple):
    """One way to run an operator.

    Attributes:
      layouts: of the tensors that it reads and writes, such as the order of their axes.
      seconds: that it takes.
      name: what else distinguishes it.
    """

    layouts: Mapping[str, str]
    seconds: float
    name: str = ""


Times = Mapping[str, Sequence[Configuration]]
Pairs = Sequence[tuple[str, str]]


class Binding(NamedTuple):
    """What was selected.

    Attributes:
      layouts: of every tensor.
      configurations: of every operator.
      seconds: of all operators.
      bound: no selection takes less; minus infinity if none was proved.
      fastest: Σ of each operator's fastest configuration, whatever the others have.
    """

    layouts: dict[str, str]
    configurations: dict[str, Configuration]
    seconds: float
    bound: float
    fastest: float

    @property
    def gap(self) -> float:
        """How far the selection may be from the best, as a share of it."""
        return max(0.0, self.seconds - self.bound) / self.seconds


class Problem(NamedTuple):
    """Times with tensors that must be equal as one variable.

    Attributes:
      operators: for each, the fastest configuration of each combination of layouts,
        keyed by the layouts of `variables[operator]`.
      variables: the variables of each operator.
      of: the variable of each tensor, the first of those that are equal.
      fastest: see `Binding`.
    """

    operators: dict[str, dict[tuple[str, ...], Configuration]]
    variables: dict[str, tuple[str, ...]]
    of: dict[str, str]
    fastest: float

    def layouts(self, variable: str) -> list[str]:
        """Returns the layouts of a variable that some configuration has, sorted."""
        found = {
            key[names.index(variable)]
            for operator, names in self.variables.items()
            if variable in names
            for key in self.operators[operator]
        }
        return sorted(found)

    def bind(self, chosen: Mapping[str, str], bound: float) -> Binding:
        """Returns the binding of chosen layouts of variables."""
        configurations = {
            operator: rows[tuple(chosen[name] for name in self.variables[operator])]
            for operator, rows in self.operators.items()
        }
        return Binding(
            layouts={tensor: chosen[name] for tensor, name in sorted(self.of.items())},
            configurations=configurations,
            seconds=math.fsum(each.seconds for each in configurations.values()),
            bound=bound,
            fastest=self.fastest,
        )


def select_layouts(times: Times, same: Pairs = ()) -> Binding:
    """Returns the layouts that take the least time, with a proof.

    Of several, it is the one whose layouts come first in the alphabet, tensors taken by
    name; costs that differ by less than 1e-9 of the largest are equal.

    Args:
      times: configurations of each operator.
      same: pairs of tensors that must have the same layout.

    Raises:
      ConfigError: no operators; one without configurations, or whose configurations
        have not the same tensors, or times that are negative or not finite; an unknown
        tensor in `same`; or no layouts fit together: a smallest set of operators and
        pairs that contradict each other is named.

    Examples:
      >>> either = [Configuration({"x": "ab"}, 1.0), Configuration({"x": "ba"}, 2.0)]
      >>> times = {"first": either, "second": [Configuration({"x": "ba"}, 1.0)]}
      >>> best = select_layouts(times)
      >>> best.layouts, best.seconds, best.gap
      ({'x': 'ba'}, 3.0, 0.0)
    """
    problem = make_problem(times, same)
    program = _Program(problem)
    solved = program.solve({})
    if solved is None:
        _refuse(times, same)
    best, bound = solved
    fixed: dict[str, str] = {}
    chosen, limit = best, problem.bind(best, bound).seconds
    for variable in sorted(program.layouts):
        for layout in program.layouts[variable]:
            if layout == chosen[variable]:
                break
            other = program.solve({**fixed, variable: layout})
            if other and problem.bind(other[0], bound).seconds <= program.same(limit):
                chosen = other[0]
                break
        fixed[variable] = chosen[variable]
    return problem.bind(chosen, bound)


def make_problem(times: Times, same: Pairs = ()) -> Problem:
    """Checks times and joins tensors that must be equal; raises as `select_layouts`."""
    checks.require(bool(times), "layouts need at least one operator", times=times)
    tensors: dict[str, tuple[str, ...]] = {}
    for operator, rows in times.items():
        for row in rows:
            checks.require_finite(0, **{f"seconds of {operator!r}": row.seconds})
        if not rows:
            raise ConfigError(f"no configuration of operator {operator!r} was timed")
        own = {tuple(sorted(row.layouts)) for row in rows}
        if len(own) > 1:
            raise ConfigError(
                f"configurations of {operator!r} have different tensors: {sorted(own)}"
            )
        (tensors[operator],) = own
    of = _join({name for own in tensors.values() for name in own}, same)
    variables = {
        operator: tuple(dict.fromkeys(of[name] for name in own))
        for operator, own in tensors.items()
    }
    return Problem(
        operators={
            operator: _cheapest(rows, variables[operator], of)
            for operator, rows in times.items()
        },
        variables=variables,
        of=of,
        fastest=math.fsum(min(r.seconds for r in rows) for rows in times.values()),
    )


def _join(tensors: Iterable[str], same: Pairs) -> dict[str, str]:
    """Returns the first of the tensors that each one equals."""
    of = {name: name for name in sorted(tensors)}
    for pair in same:
        for name in pair:
            if name not in of:
                raise ConfigError(f"no tensor {name!r}{nearest(name, of)}")
        first, second = sorted(of[name] for name in pair)
        of = {name: first if own == second else own for name, own in of.items()}
    return of


def _cheapest(
    rows: Sequence[Configuration], variables: tuple[str, ...], of: Mapping[str, str]
) -> dict[tuple[str, ...], Configuration]:
    """Returns the fastest row of each combination of layouts without contradiction."""
    found: dict[tuple[str, ...], Configuration] = {}
    for row in rows:
        chosen: dict[str, str] = {}
        for tensor, layout in row.layouts.items():
            chosen.setdefault(of[tensor], layout)
        if any(chosen[of[tensor]] != own for tensor, own in row.layouts.items()):
            continue
        key = tuple(chosen[name] for name in variables)
        if key not in found or row.seconds < found[key].seconds:
            found[key] = row
    return found


class _Program:
    """The mixed-integer program of a problem."""

    def __init__(self, problem: Problem) -> None:
        from scipy import sparse

        names = sorted(set(problem.of.values()))
        self.layouts = {name: problem.layouts(name) for name in names}
        self.places = {
            pair: place
            for place, pair in enumerate(
                (name, own) for name in names for own in self.layouts[name]
            )
        }
        columns = len(self.places) + sum(map(len, problem.operators.values()))
        self.cost = np.zeros(columns)
        entries: list[tuple[int, int, float]] = []
        right: list[float] = []
        for name in names:
            entries += [
                (len(right), self.places[name, own], 1.0) for own in self.layouts[name]
            ]
            right.append(1.0)
        column = len(self.places)
        for operator, rows in problem.operators.items():
            used = problem.variables[operator]
            row_of = {
                (name, own): len(right) + offset
                for offset, (name, own) in enumerate(
                    (name, own) for name in used for own in self.layouts[name]
                )
            }
            entries += [(row, self.places[pair], -1.0) for pair, row in row_of.items()]
            right += [0.0] * len(row_of)
            for key, configuration in rows.items():
                self.cost[column] = configuration.seconds
                pairs = zip(used, key, strict=True)
                entries += [(row_of[pair], column, 1.0) for pair in pairs]
                column += 1
        row, column_of, value = np.array(entries).T
        shape = (len(right), columns)
        place = (row.astype(int), column_of.astype(int))
        self.matrix = sparse.csr_array((value, place), shape=shape)
        self.right = np.array(right)
        # An operator of which no configuration agrees with the equalities.
        self.empty = not all(problem.operators.values())
        self.scale = float(np.max(np.abs(self.cost))) or 1.0

    def same(self, limit: float) -> float:
        """Returns the largest cost that counts as equal to one."""
        return limit + _TOLERANCE * self.scale

    def solve(self, fixed: Mapping[str, str]) -> tuple[dict[str, str], float] | None:
        """Returns layouts of all variables and a lower bound, None if none fit."""
        from scipy import optimize

        if self.empty:
            return None
        lower = np.zeros(len(self.cost))
        for pair in fixed.items():
            lower[self.places[pair]] = 1.0
        found = optimize.milp(
            self.cost / self.scale,
            integrality=np.ones(len(self.cost)),
            bounds=optimize.Bounds(lower, np.ones(len(self.cost))),
            constraints=optimize.LinearConstraint(self.matrix, self.right, self.right),
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        chosen = {
            name: own for (name, own), p in self.places.items() if found.x[p] > 0.5
        }
        return chosen, float(found.mip_dual_bound) * self.scale


def _refuse(times: Times, same: Pairs) -> NoReturn:
    """Raises ConfigError with a smallest set of what contradicts itself."""

    def feasible(operators: Sequence[str], pairs: Pairs) -> bool:
        own = {operator: times[operator] for operator in operators}
        tensors = {name for rows in own.values() for name in rows[0].layouts}
        kept = [pair for pair in pairs if set(pair) <= tensors]
        return not own or _Program(make_problem(own, kept)).solve({}) is not None

    pairs = _shrink(list(same), lambda kept: not feasible(list(times), kept))
    operators = _shrink(list(times), lambda kept: not feasible(kept, pairs))
    raise ConfigError(
        f"no layouts fit operators {sorted(operators)}"
        + (f" with {sorted(pairs)} equal" if pairs else "")
    )


def _shrink(items: list[Any], contradict: Callable[[list[Any]], bool]) -> list[Any]:
    """Returns items none of which can be left out for the others to contradict."""
    kept = items
    for item in items:
        fewer = [other for other in kept if other is not item]
        kept = fewer if contradict(fewer) else kept
    return kept
