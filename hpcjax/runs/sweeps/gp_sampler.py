"""The sampler `gp`: constrained expected improvement of a Gaussian process."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna import Study, distributions, samplers, trial
from scipy.stats import qmc

from hpcjax import bo
from hpcjax.runs.sweeps.axes import Axis, Constraint, Value

_DESIGN = 5  # finished trials before a surrogate is asked
_MOST_LISTED, _DRAWN, _NEAR, _STEP = 4096, 2048, 512, 0.05
Space = Mapping[str, distributions.BaseDistribution]


class GpSampler(samplers.BaseSampler):
    """Chooses the next point of a sweep; draws nothing but a design and candidates.

    Ranges are compared by their place between the ends, in the logarithm if the axis
    is; lists of numbers by the order of these, other lists by whether they are equal.
    Candidates are all points if these are few; otherwise Sobol points, and points
    around the best. Trials that run are taken to come to the mean of the others
    (Ginsbourger et al., 2010, constant liar), those that have diverged to the worst.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        space: Space,
        subject_to: Constraint | None,
        *,
        seed: int,
        drawn: int,
    ) -> None:
        """Makes a sampler of one trial.

        Args:
          axes: what is varied.
          space: the same as optuna's distributions.
          subject_to: kept by the trials' attribute `constraint`.
          seed: of the design.
          drawn: seed of the candidates.
        """
        self._axes, self._space, self._subject_to = axes, space, subject_to
        self._seed, self._drawn = seed, drawn

    def infer_relative_search_space(
        self, study: Study, trial: trial.FrozenTrial
    ) -> dict[str, distributions.BaseDistribution]:
        """Returns all axes: they are chosen together."""
        del study, trial
        return dict(self._space)

    def sample_relative(
        self,
        study: Study,
        trial: trial.FrozenTrial,
        search_space: dict[str, distributions.BaseDistribution],
    ) -> dict[str, Any]:
        """Returns the point with the largest acquisition, none of a trial's."""
        del search_space
        if "fixed_params" in trial.system_attrs:  # a point that is tried again
            return {}
        others = [
            each
            for each in study.get_trials(deepcopy=False)
            if each.number != trial.number and len(each.params) == len(self._axes)
        ]
        taken = {self._key(each.params) for each in others}
        ended = [each for each in others if each.value is not None]
        finite = any(math.isfinite(each.value or 0.0) for each in ended)
        if len(ended) < _DESIGN or not finite:
            points = self._points(self._sobol(128, self._seed))
            return next(p for p in [*points, *self._all(None)] if self._free(p, taken))
        running = [t for t in others if t.state.name == "RUNNING"]
        seen = self._observe(ended, running)
        best = np.where(seen.feasible, seen.value, np.inf)[: len(ended)].argmin()
        points = [p for p in self._all(ended[best].params) if self._free(p, taken)]
        worth = bo.constrained_improvement(seen, self._place(points))
        return points[int(np.argmax(worth))]

    def sample_independent(self, *arguments: Any, **named: Any) -> Any:
        """Is not asked: all axes are in the relative search space."""
        raise NotImplementedError(f"a parameter that is no axis: {arguments} {named}")

    def _observe(self, ended: list[Any], running: list[Any]) -> bo.Observations:
        x = self._place([each.params for each in (*ended, *running)])
        value, _ = _column([t.value for t in ended], len(running))
        if self._subject_to is None:
            return bo.Observations(x, value, {}, {})
        name, limit = self._subject_to.name, self._subject_to.bound
        told = [t.user_attrs.get("constraint", math.inf) for t in ended]
        column, bound = _column(told, len(running), limit)
        return bo.Observations(x, value, {name: column}, {name: bound})

    def _all(self, best: Mapping[str, Value] | None) -> list[dict[str, Value]]:
        """Returns all candidates."""
        listed = math.prod(axis.count for axis in self._axes)
        if listed <= _MOST_LISTED:
            each = [
                axis.values or range(int(axis.low), int(axis.high) + 1)
                for axis in self._axes
            ]
            keys = [axis.key for axis in self._axes]
            return [dict(zip(keys, p, strict=True)) for p in itertools.product(*each)]
        shares = self._sobol(_DRAWN, self._drawn)
        if best is not None:
            middle = [axis.share(best[axis.key]) for axis in self._axes]
            rng = np.random.default_rng(self._drawn)
            near = middle + _STEP * rng.standard_normal((_NEAR, len(middle)))
            shares = np.vstack([shares, near.clip(0, math.nextafter(1.0, 0.0))])
        return self._points(shares)

    def _sobol(self, count: int, seed: int) -> np.ndarray:
        sobol = qmc.Sobol(len(self._axes), rng=np.random.default_rng(seed))
        return sobol.random(count)

    def _points(self, shares: np.ndarray) -> list[dict[str, Value]]:
        return [
            {a.key: a.at(float(s)) for a, s in zip(self._axes, row, strict=True)}
            for row in shares
        ]

    def _key(self, point: Mapping[str, Value]) -> tuple[Value, ...]:
        return tuple(point[axis.key] for axis in self._axes)

    def _free(self, point: Mapping[str, Value], taken: set[tuple[Value, ...]]) -> bool:
        return self._key(point) not in taken

    def _place(self, points: Sequence[Mapping[str, Value]]) -> np.ndarray:
        """Returns places in [0, 1], `[points, d]`."""
        columns = [_features(a, [p[a.key] for p in points]) for a in self._axes]
        return np.hstack(columns)


def _features(axis: Axis, values: Sequence[Value]) -> np.ndarray:
    """Returns one column, or for a list of words one for each word."""
    if not axis.values:
        return np.array([[axis.share(value)] for value in values])
    try:
        order = np.argsort(np.argsort([float(text) for text in axis.values]))
    except ValueError:
        return np.array([[float(v == text) for text in axis.values] for v in values])
    spread = max(len(order) - 1, 1)
    return np.array([[order[axis.values.index(str(v))] / spread] for v in values])


def _column(
    told: Sequence[float], running: int, bound: float = 1.0
) -> tuple[np.ndarray, float]:
    """Returns a column for a surrogate, and its bound; in logarithms if all are > 0."""
    column = np.array(told, float)
    known = column[np.isfinite(column)]
    column = np.where(np.isfinite(column), column, known.max(initial=bound))
    if column.min() > 0 and bound > 0:
        column, bound = np.log(column), math.log(bound)
    return np.append(column, np.full(running, column.mean())), bound
