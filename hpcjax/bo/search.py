"""Ask for a point, tell what was measured there: the least value within bounds."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np

from hpcjax.bo.acquisition import (
    Acquisition,
    Observations,
    constrained_improvement,
)
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest

Point = Mapping[str, float]
DESIGN = 5  # points before a surrogate is asked
_STOP, _LEAST_TRIALS = 0.005, 10


class Grid:
    """All combinations of some values.

    Attributes:
      values: ascending, by name.

    Examples:
      >>> grid = Grid(gpu_mhz=[100, 200, 400], batch=[1, 2, 4, 8], log=["batch"])
      >>> len(grid), grid.point(5), grid.place({"gpu_mhz": 200, "batch": 2})
      (12, {'gpu_mhz': 200, 'batch': 2}, 5)
    """

    def __init__(self, *, log: Collection[str] = (), **values: Sequence[float]) -> None:
        """Makes a grid.

        Args:
          log: names whose values are compared by their logarithms.
          **values: of each knob, positive where it is in `log`.

        Raises:
          ConfigError: no knob, no values or equal ones, or a name in `log` without.
        """
        checks.require(bool(values), "a grid needs values", values=values)
        for name, own in values.items():
            good = len(own) > 0 and len(set(own)) == len(own)
            rule = f"{name} must have different finite values, positive if in log"
            good = good and all(map(math.isfinite, own))
            good = good and (name not in log or min(own) > 0)
            checks.require(good, rule, **{name: list(own)})
        for name in log:
            checks.require_choice("log", name, tuple(values))
        self.values = {
            name: tuple(
                sorted(n.item() if isinstance(n, np.generic) else n for n in own)
            )
            for name, own in values.items()
        }
        self.log = tuple(log)
        axes = [self._scale(name) for name in values]
        self.x = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))

    def __len__(self) -> int:
        return len(self.x)

    def point(self, place: int) -> dict[str, float]:
        """Returns the point at a place in the order of `itertools.product`."""
        sizes = [len(own) for own in self.values.values()]
        indices = np.unravel_index(place, sizes)
        pairs = zip(self.values.items(), indices, strict=True)
        return {name: own[index] for (name, own), index in pairs}

    def place(self, point: Point) -> int:
        """Returns the place of a point.

        Raises:
          ConfigError: another set of names, or a value off the grid, with the nearest
            two.
        """
        rule = f"a point must have {sorted(self.values)}"
        checks.require(set(point) == set(self.values), rule, point=dict(point))
        for name, own in self.values.items():
            checks.require_on_grid(name, point[name], own)
        indices = [own.index(point[name]) for name, own in self.values.items()]
        sizes = [len(own) for own in self.values.values()]
        return int(np.ravel_multi_index(indices, sizes))

    def _scale(self, name: str) -> np.ndarray:
        """Returns the values of a knob in [0, 1]."""
        own = np.array(self.values[name], float)
        own = np.log2(own) if name in self.log else own
        return (own - own[0]) / max(own[-1] - own[0], 1e-300)


class ConstrainedSearch:
    """Finds the least value within bounds on a grid, in 10 to 20 measurements.

    Values and what is bounded must be positive: their logarithms have Gaussian
    processes of their own. The first five points are the start and scrambled Sobol
    points snapped to the grid; then the one with the largest acquisition of the whole
    grid.

    Attributes:
      grid: what may be asked.
      points: that have been told, in order.
    """

    def __init__(
        self,
        grid: Grid,
        subject_to: Mapping[str, float],
        seed: int = 0,
        *,
        start: Point | None = None,
        acquisition: Acquisition = constrained_improvement,
    ) -> None:
        """Makes a search.

        Args:
          grid: what may be asked.
          subject_to: the largest allowed value of each constraint, positive.
          seed: of the design.
          start: the first point, which should keep the constraints if any does; None
            for the greatest of all knobs.
          acquisition: what a measurement is worth.

        Raises:
          ConfigError: a bound that is not positive, or a name that `tell` has itself.
        """
        bounds = {name: float(bound) for name, bound in subject_to.items()}
        checks.require_positive(**bounds)
        rule = "constraints must not be called value or point"
        checks.require(not {"value", "point"} & {*bounds}, rule, subject_to=bounds)
        self.grid, self.subject_to, self.seed = grid, bounds, seed
        self._acquisition = acquisition
        self._places: list[int] = []
        self._told: list[dict[str, float]] = []
        self._worth: list[float] = []
        first = len(grid) - 1 if start is None else grid.place(start)
        self._design = _design(grid, first, seed)

    @property
    def points(self) -> list[dict[str, float]]:
        """The points that have been told, in order."""
        return [self.grid.point(place) for place in self._places]

    @property
    def stopped(self) -> bool:
        """Whether more measurements are not worth their while.

        After 10 trials, with a feasible one, once the expected gain times its
        probability was below 0.5 % twice in a row; in logarithms of the value, so that
        its unit does not matter.
        """
        if len(self._places) == len(self.grid):
            return True
        ready = len(self._places) >= _LEAST_TRIALS and self.best_feasible() is not None
        last = self._worth[-2:]
        return ready and len(last) == 2 and max(last) < _STOP

    def ask(self) -> dict[str, float]:
        """Returns the next point to measure, one that has not been told.

        Raises:
          ConfigError: all points of the grid have been told.
        """
        taken = set(self._places)
        if len(taken) == len(self.grid):
            raise ConfigError(f"all {len(self.grid)} points of the grid are measured")
        if len(taken) < len(self._design):
            return self.grid.point(next(p for p in self._design if p not in taken))
        worth = self._acquisition(self.observations(), self.grid.x)
        worth[self._places] = -np.inf
        place = int(np.argmax(worth))
        # Asking again without telling replaces what the stopping rule looks at; what
        # was told without asking had no known worth.
        asked = len(self._places) - len(self._design)
        unknown = [math.inf] * (asked - len(self._worth))
        self._worth[asked:] = [*unknown, float(worth[place])]
        return self.grid.point(place)

    def tell(self, point: Point, value: float, **constraints: float) -> None:
        """Records a measurement.

        Args:
          point: of the grid, asked for or not.
          value: what is to be least, positive.
          **constraints: what was measured of each constraint, positive.

        Raises:
          ConfigError: off the grid, measured before, a number that is not finite and
            positive, or other constraints than the search has.
        """
        place = self.grid.place(point)
        checks.require(place not in self._places, "measured before", point=dict(point))
        # Checked and kept as numbers of Python: not all scalars of arrays are floats.
        told = {name: float(v) for name, v in {"value": value, **constraints}.items()}
        checks.require_positive(**told)
        for name in {*constraints} ^ {*self.subject_to}:
            hint = nearest(name, self.subject_to)
            raise ConfigError(
                f"a measurement needs {[*self.subject_to]}: got {[*constraints]}{hint}"
            )
        self._places.append(place)
        self._told.append(told)

    def observations(self) -> Observations:
        """Returns what has been told, in logarithms."""
        column = {
            name: np.log([told[name] for told in self._told])
            for name in ("value", *self.subject_to)
        }
        bounds = {name: math.log(bound) for name, bound in self.subject_to.items()}
        x = self.grid.x[self._places]
        return Observations(x, column.pop("value"), column, bounds)

    def best_feasible(self) -> dict[str, float] | None:
        """Returns the point of the least value that was measured within all bounds."""
        ranked = self.rank_feasible()
        return ranked[0] if ranked else None

    def rank_feasible(self) -> list[dict[str, float]]:
        """Returns the points that were measured within all bounds, best first."""
        seen = self.observations()
        order = [n for n in np.argsort(seen.value, kind="stable") if seen.feasible[n]]
        return [self.points[n] for n in order]

    def to_json(self) -> str:
        """Returns the search as text, from which `from_json` goes on."""
        state = {
            "values": self.grid.values,
            "log": self.grid.log,
            "subject_to": self.subject_to,
            "seed": self.seed,
            "start": self.grid.point(self._design[0]),
            "places": self._places,
            "told": self._told,
            "worth": self._worth,
        }
        return json.dumps(state)

    @classmethod
    def from_json(
        cls, text: str, *, acquisition: Acquisition = constrained_improvement
    ) -> Self:
        """Returns the search that `to_json` wrote; its next points are the same."""
        state: dict[str, Any] = json.loads(text)
        grid = Grid(log=state["log"], **state["values"])
        options = {"start": state["start"], "acquisition": acquisition}
        made = cls(grid, state["subject_to"], state["seed"], **options)
        made._places, made._told = state["places"], state["told"]
        made._worth = state["worth"]
        return made


def _design(grid: Grid, first: int, seed: int) -> list[int]:
    """Returns the places to begin with: the first one, then Sobol points."""
    from scipy.stats import qmc

    count = min(DESIGN, len(grid))
    places = [first]
    dims = grid.x.shape[1]
    drawn = qmc.Sobol(dims, rng=np.random.default_rng(seed)).random_base2(3)
    for row in drawn[: count - 1]:
        far = ((grid.x - row) ** 2).sum(1)
        far[places] = np.inf
        places.append(int(np.argmin(far)))
    return places
