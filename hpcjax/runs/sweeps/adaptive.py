"""The samplers that look at results: `tpe`, and `gp`.

Both are asked for one point, of the trials so far and a seed of the point's number, and
keep no state: any worker chooses what any other would.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs.sweeps.axes import Axis, Value
from hpcjax.runs.sweeps.sweep import Sweep, Trial

if TYPE_CHECKING:
    import optuna

    from hpcjax import bo

_DESIGN = 5  # finished trials before a surrogate is asked
_MOST_LISTED, _DRAWN, _NEAR, _STEP = 4096, 2048, 512, 0.05
Point = Mapping[str, Value]


def choose(sweep: Sweep, cell: int, trials: Sequence[Trial]) -> Point:
    """Returns the point of trial number `cell`.

    Args:
      sweep: with the sampler `tpe` or `gp`.
      cell: number of the point.
      trials: all that have been taken.
    """
    drawn = int(np.random.SeedSequence([sweep.seed, cell]).generate_state(1)[0])
    if sweep.sampler == "tpe":
        return _ask_tpe(sweep, trials, drawn)
    return _ask_gp(sweep, trials, drawn)


def _ask_tpe(sweep: Sweep, trials: Sequence[Trial], drawn: int) -> Point:
    """Returns a point of Optuna's tree of Parzen estimators.

    It is told all trials each time. Those that run count as bad ones (constant liar),
    so that workers do not ask for the same.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=drawn, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    space = {axis.key: _distribution(axis) for axis in sweep.axes}
    state = optuna.trial.TrialState
    for trial in trials:
        if trial.status != "failed":
            told = state.RUNNING if trial.value is None else state.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(
                    state=told,
                    value=trial.value,
                    params=dict(trial.point),
                    distributions=space,
                )
            )
    return study.ask(space).params


def _distribution(axis: Axis) -> "optuna.distributions.BaseDistribution":
    from optuna import distributions

    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if axis.whole:
        low, high = int(axis.low), int(axis.high)
        return distributions.IntDistribution(low, high, log=axis.log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _ask_gp(sweep: Sweep, trials: Sequence[Trial], drawn: int) -> Point:
    """Returns the point with the largest constrained expected improvement, none twice.

    Ranges are compared by their place between the ends, in the logarithm if the axis
    is; lists of numbers by the order of these, other lists by whether they are equal.
    Candidates are all points if these are few; otherwise Sobol points, and points
    around the best. Trials that run are taken to come to the mean of the others
    (Ginsbourger et al., 2010, constant liar), those that have diverged to the worst.
    """
    axes, taken = sweep.axes, {_key(trial.point) for trial in trials}
    ended = [trial for trial in trials if trial.value is not None]
    if len(ended) < _DESIGN or not any(math.isfinite(t.value or 0.0) for t in ended):
        points = _points(axes, _sobol(axes, 128, sweep.seed))
        return next(
            point
            for point in itertools.chain(points, _candidates(axes, drawn, None))
            if _key(point) not in taken
        )
    from hpcjax import bo

    running = [t for t in trials if not t.has_ended]
    seen = _observe(sweep, ended, running)
    best = np.where(seen.feasible, seen.value, np.inf)[: len(ended)].argmin()
    points = _candidates(axes, drawn, ended[best].point)
    free = [point for point in points if _key(point) not in taken]
    return free[int(np.argmax(bo.constrained_improvement(seen, _place(axes, free))))]


def _observe(
    sweep: Sweep, ended: Sequence[Trial], running: Sequence[Trial]
) -> "bo.Observations":
    from hpcjax import bo

    x = _place(sweep.axes, [trial.point for trial in (*ended, *running)])
    value, _ = _column([t.value for t in ended], len(running))
    if sweep.subject_to is None:
        return bo.Observations(x, value, {}, {})
    name, limit = sweep.subject_to.name, sweep.subject_to.bound
    told = [math.inf if t.constraint is None else t.constraint for t in ended]
    column, bound = _column(told, len(running), limit)
    return bo.Observations(x, value, {name: column}, {name: bound})


def _candidates(axes: Sequence[Axis], drawn: int, best: Point | None) -> list[Point]:
    """Returns all points, or if these are many some, also such that are near `best`."""
    if math.prod(axis.count for axis in axes) <= _MOST_LISTED:
        each = [a.values or range(int(a.low), int(a.high) + 1) for a in axes]
        keys = [axis.key for axis in axes]
        return [dict(zip(keys, p, strict=True)) for p in itertools.product(*each)]
    shares = _sobol(axes, _DRAWN, drawn)
    if best is not None:
        middle = [axis.share(best[axis.key]) for axis in axes]
        rng = np.random.default_rng(drawn)
        near = middle + _STEP * rng.standard_normal((_NEAR, len(middle)))
        shares = np.vstack([shares, near.clip(0, math.nextafter(1.0, 0.0))])
    return _points(axes, shares)


def _sobol(axes: Sequence[Axis], count: int, seed: int) -> np.ndarray:
    from scipy.stats import qmc

    return qmc.Sobol(len(axes), rng=np.random.default_rng(seed)).random(count)


def _points(axes: Sequence[Axis], shares: np.ndarray) -> list[Point]:
    return [
        {axis.key: axis.at(float(share)) for axis, share in zip(axes, row, strict=True)}
        for row in shares
    ]


def _key(point: Point) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(point.items()))


def _place(axes: Sequence[Axis], points: Sequence[Point]) -> np.ndarray:
    """Returns places in [0, 1], `[points, d]`."""
    return np.hstack([_features(axis, [p[axis.key] for p in points]) for axis in axes])


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
    told: Sequence[float | None], running: int, bound: float | None = None
) -> tuple[np.ndarray, float]:
    """Returns a column for a surrogate, and its bound; in logarithms if all are > 0.

    A value that is not finite is the worst of the others; a constraint is, too, but is
    broken at least by as much as the best one keeps it.
    """
    column = np.array(told, float)
    known = column[np.isfinite(column)]
    if bound is None:
        worst, bound = known.max(), 1.0
    else:
        margin = max(bound - known.min(initial=math.inf), 0.1 * abs(bound), 1e-9)
        worst = known.max(initial=bound + margin)
    column = np.where(np.isfinite(column), column, worst)
    if column.min() > 0 and bound > 0:
        column, bound = np.log(column), math.log(bound)
    return np.append(column, np.full(running, column.mean())), bound
