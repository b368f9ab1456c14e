"""A sweep on disk: its definition, and the state and owner of each trial.

`sweeps/<name>/` contains `sweep.json`, in which only the number of trials may grow, and
`journal.log`, to which Optuna appends every change, so that any number of processes on
a shared disk may work on it, and be killed. A trial is taken under a lock. If its owner
dies, its point is entered again as a new trial; the last trial of a point is the one
that counts. Runs are in `runs/`: a trial that is taken again resumes the run that was
interrupted (`execute.ensure`).
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, nearest
from hpcjax.runs import discover, lock, values
from hpcjax.runs.sweeps import axes as swept
from hpcjax.runs.sweeps import journal
from hpcjax.runs.sweeps.axes import Axis, Constraint, Sampler, Value
from hpcjax.runs.sweeps.journal import CELL

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

ATTEMPTS = 3
_DIED = f"its process died {ATTEMPTS} times"
_OWNER, _ATTEMPT, _SIGN = "owner", "attempt", "sign"
CONSTRAINT = "constraint"
_TAKEN = ("value", "status", "run", "error", "trial", "feasible")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The definition of a sweep.

    Attributes:
      config: `paper/config[:variant]`.
      axes: what is varied.
      overrides: what is set for all trials.
      sampler: how points are chosen.
      trials: number of trials; None for a grid.
      seed: of the sampler.
      by: the variable whose least finite value is that of a trial.
      subject_to: what a trial must keep to be the best; the sampler `gp` looks for
        points that do.
    """

    config: str
    axes: tuple[Axis, ...]
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sampler: Sampler = "grid"
    trials: int | None = None
    seed: int = 0
    by: str = "val_loss"
    subject_to: Constraint | None = None

    @property
    def default_name(self) -> str:
        """The default name, which is the same for equal sweeps."""
        told = values.encode(self, Sweep)
        if self.subject_to is None:  # names are those from before there was one
            del told["subject_to"]
        text = json.dumps(told, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        return f"{self.config.replace('/', '-').replace(':', '-')}-{digest}"

    @property
    def points(self) -> list[dict[str, Value]]:
        """The points to visit; none if they depend on results."""
        return swept.points(self.axes, self.sampler, self.trials, self.seed)

    @property
    def total(self) -> int:
        """Number of trials."""
        return self.trials or len(self.points)

    def texts(self, point: Mapping[str, Value]) -> dict[str, str]:
        """Returns the overrides of one trial."""
        own = {axis.key: axis.text(point[axis.key]) for axis in self.axes}
        return {**self.overrides, **own}

    def check(self, root: pathlib.Path) -> None:
        """Raises ConfigError unless the ends of every axis are values of the config.

        And if `by` is a metric of its data set of which less is not better.
        """
        swept.check_sampler(self.axes, self.sampler, self.trials)
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0: got {self.seed}")
        for axis in self.axes:
            if axis.key in _TAKEN:
                raise ConfigError(
                    f"{axis.key} cannot be varied: a sweep's result has {_TAKEN}"
                )
        first = {axis.key: axis.ends[0] for axis in self.axes}
        for axis in self.axes:
            for text in axis.ends:
                changed = {**self.overrides, **first, axis.key: text}
                loaded = discover.load(self.config, changed, root)
                asked = getattr(loaded.config, "dataset", None)
                if hasattr(asked, "objective"):
                    asked.objective.require_low(self.by)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of a sweep as a worker takes it.

    Attributes:
      point: the value on each axis.
      held: the record in the journal.
    """

    point: Mapping[str, Value]
    held: "optuna.Trial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of one point.

    Attributes:
      cell: number of the point, in the order in which they were chosen.
      point: the value on each axis.
      status: `done`, `diverged`, `failed`, `running` or `waiting`.
      value: its value; None before there is one, infinite if it diverged.
      run: id of its run, if it has one.
      error: why it failed.
      constraint: what the constraint's variable came to, if there is one.
    """

    cell: int
    point: Mapping[str, Value]
    status: str
    value: float | None = None
    run: str = ""
    error: str = ""
    constraint: float | None = None


class Study:
    """A sweep's folder.

    Attributes:
      folder: `sweeps/<name>`.
      sweep: what it is.
    """

    def __init__(self, folder: pathlib.Path, sweep: Sweep) -> None:
        self.folder, self.sweep = folder, sweep
        name = f"{socket.gethostname()}-{os.getpid()}.alive"
        self._sign = folder / "workers" / name
        self._optuna = journal.open_journal(folder)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    def take(self) -> Trial | None:
        """Takes a trial for this process; None if none is left.

        Trials of owners that have died are put back first, at most twice each.
        """
        with self._lock():
            self._fill()
            self._put_back_lost()
            trials = self._trials()
            waiting = any(trial.state.name == "WAITING" for trial in trials)
            missing = self._missing(self.sweep.total)
            if not waiting and not missing:
                return None
            cell = next(iter(missing), self.sweep.total)
            self._optuna.sampler = _sampler(self.sweep, cell)
            trial = self._optuna.ask(
                {axis.key: _distribution(axis) for axis in self.sweep.axes}
            )
            # An enqueued trial has its number; one that the sampler chose needs one.
            if CELL not in trial.user_attrs:
                trial.set_user_attr(CELL, cell)
            trial.set_user_attr(_OWNER, {**lock.me(), _SIGN: self._sign.name})
            return Trial(point=trial.params, held=trial)

    def tell(
        self,
        trial: Trial,
        value: float,
        run: str,
        status: str = "done",
        constraint: float | None = None,
    ) -> None:
        """Records the value of a trial, and what its constraint's variable came to."""
        if constraint is not None:
            trial.held.set_user_attr(CONSTRAINT, constraint)
        trial.held.set_user_attr("run", run)
        trial.held.set_user_attr("status", status)
        self._optuna.tell(trial.held, value)

    def fail(self, trial: Trial, error: str) -> None:
        """Records why a trial has no value."""
        # The text may contain anything, such as a path that is not UTF-8.
        clean = error.encode("utf-8", "backslashreplace").decode().replace("\0", "")
        trial.held.set_user_attr("error", clean)
        self._optuna.tell(trial.held, state=_states().FAIL)

    def put_back(self, trial: Trial) -> None:
        """Returns a trial that this process cannot finish to those that wait."""
        with self._lock():
            self._again(self._trials()[trial.held.number], more=0)

    def outcomes(self) -> list[Outcome]:
        """Returns the state of all points so far, in order."""
        cells = self._cells(self._trials())
        outcomes = [_outcome(cell, trial) for cell, trial in sorted(cells.items())]
        if not outcomes:
            return [
                Outcome(cell=cell, point=point, status="waiting")
                for cell, point in enumerate(self.sweep.points)
            ]
        return outcomes

    def _fill(self) -> None:
        """Enters the points that are known beforehand, once."""
        points = self.sweep.points
        for cell in self._missing(len(points)):
            self._optuna.enqueue_trial(points[cell], user_attrs={CELL: cell})

    def _missing(self, total: int) -> list[int]:
        """Returns which points have no trial, in order."""
        there = self._cells(self._trials())
        return [cell for cell in range(total) if cell not in there]

    def retry_failed(self) -> None:
        """Enters the points of failed trials again; those stay in the journal."""
        with self._lock():
            for cell, trial in self._cells(self._trials()).items():
                if trial.state.name == "FAIL":
                    self._optuna.enqueue_trial(_point(trial), user_attrs={CELL: cell})

    def has_lost(self) -> bool:
        """Returns whether there is a trial whose process has died."""
        return any(True for _ in self._lost())

    def _put_back_lost(self) -> None:
        for trial in list(self._lost()):
            log.warning("the process of trial %d died", trial.number)
            self._again(trial, more=1)

    def _lost(self) -> "Iterator[optuna.trial.FrozenTrial]":
        return (trial for trial, host in self._running() if not host)

    def _running(self) -> "Iterator[tuple[optuna.trial.FrozenTrial, str]]":
        """Yields (running trial, host of its process), with "" if that has died."""
        for trial in self._trials():
            if trial.state.name == "RUNNING":
                # Without an owner, its process was killed while taking it.
                owner = trial.user_attrs.get(_OWNER, {})
                sign = self._sign.with_name(owner.get(_SIGN, "none"))
                lives = bool(owner) and lock.is_alive(owner, sign)
                yield trial, owner["host"] if lives else ""

    @contextlib.contextmanager
    def show_alive(self) -> Iterator[None]:
        """Shows other hosts that this process is alive, for the time of the block."""
        self._sign.parent.mkdir(exist_ok=True)
        self._sign.touch()
        try:
            with lock.keep_touching(self._sign):
                yield
        finally:
            self._sign.unlink(missing_ok=True)

    def held_by(self) -> list[str]:
        """Returns the hosts of living processes that hold trials."""
        return sorted(host for _, host in self._running() if host)

    def _again(self, trial: "optuna.trial.FrozenTrial", more: int) -> None:
        """Enters a trial's point again, if it may be, then closes the trial.

        In the other order a kill in between would lose the point. In this order it
        leaves a trial open that is no longer the last one of its point.
        """
        attempt = trial.user_attrs.get(_ATTEMPT, 1) + more
        standing = {each.number for each in self._cells(self._trials()).values()}
        if trial.number in standing and attempt <= ATTEMPTS:
            kept = {CELL: trial.user_attrs[CELL], _ATTEMPT: attempt}
            self._optuna.enqueue_trial(_point(trial), user_attrs=kept)
        self._optuna.tell(trial.number, state=_states().FAIL)

    def _trials(self) -> "list[optuna.trial.FrozenTrial]":
        return self._optuna.get_trials(deepcopy=False)

    def _cells(self, trials: Any) -> "dict[int, optuna.trial.FrozenTrial]":
        """Returns the last trial of each point, which is the one that counts."""
        return {
            trial.user_attrs[CELL]: trial
            for trial in trials
            if CELL in trial.user_attrs
        }

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = self.folder / journal.NAME
        with filelock.FileLock(self.folder / ".lock"), files.disk_errors(path):
            yield


def find(
    config: str,
    pairs: Mapping[str, str],
    root: pathlib.Path,
    *,
    name: str | None = None,
    **options: Any,
) -> tuple[Sweep, str]:
    """Returns the sweep of a command line, and its name.

    Args:
      config: `paper/config[:variant]`, or the name of a sweep that is there.
      pairs: what is varied and what is set for all, see `axes.parse`; without any, the
        sweep that the config file gives.
      root: folder that holds `sweeps/` and further configs.
      name: of the sweep; default `Sweep.default_name`.
      options: further attributes of `Sweep`; of a sweep that is there `trials` may grow
        and nothing else may change.

    Raises:
      ConfigError: no such config or sweep, nothing is varied, or an option that the
        sweep that is there does not have.
    """
    exists = (root / "sweeps" / config / "sweep.json").exists
    if "/" not in config and (not pairs or exists()):
        old = open_study(config, root).sweep
        more = [f"{key}={text}" for key, text in pairs.items()]
        more += [f"--name {name}"] if name not in (None, config) else []
        if more:
            raise ConfigError(
                f"sweep {config} has its axes and its name: leave out {' '.join(more)}"
            )
        return dataclasses.replace(old, **options), config
    varied, fixed = swept.parse(pairs)
    if not varied:
        entry, variant = discover.find(config, root)
        varied = swept.from_mapping(entry.sweep, entry.variants[variant], fixed)
    sweep = Sweep(config=config, axes=tuple(varied), overrides=fixed, **options)
    return sweep, name or sweep.default_name


def open_study(name: str, root: pathlib.Path) -> Study:
    """Returns an existing sweep.

    Raises:
      ConfigError: there is none of that name; names the nearest.
      DataFormatError: its `sweep.json` cannot be read.
    """
    folder = files.inside(root, "sweeps", name)
    if not (folder / "sweep.json").exists():
        known = [path.parent.name for path in (root / "sweeps").glob("*/sweep.json")]
        raise ConfigError(f"no sweep {name!r}{nearest(name, known)}")
    return Study(folder, _read(folder))


def create_study(name: str, sweep: Sweep, root: pathlib.Path) -> Study:
    """Returns the sweep of that name, made now unless it is there already.

    Raises:
      ConfigError: one of that name is there and is another sweep; more trials of the
        same are allowed.
    """
    folder = files.inside(root, "sweeps", name)
    files.make_folder(folder)
    with filelock.FileLock(folder / ".lock"):
        if (folder / "sweep.json").exists():
            _check_same(name, _read(folder), sweep)
        files.write_json(folder / "sweep.json", values.encode(sweep, Sweep))
    return Study(folder, sweep)


def _check_same(name: str, old: Sweep, new: Sweep) -> None:
    before, after = values.encode(old, Sweep), values.encode(new, Sweep)
    if before.pop("trials") != after.pop("trials") and old.total > new.total:
        raise ConfigError(f"sweep {name} has {old.total} trials: got {new.total}")
    differing = [key for key, value in before.items() if after[key] != value]
    if differing:
        told = "; ".join(f"{key}: {before[key]} -> {after[key]}" for key in differing)
        raise ConfigError(f"sweep {name} is another one: {told}; give a new name")


def _read(folder: pathlib.Path) -> Sweep:
    path = folder / "sweep.json"
    try:
        return values.decode(files.read_json(path), Sweep)
    except (OSError, ValueError) as error:
        raise DataFormatError(f"{path} cannot be read: {error}") from error


def _sampler(sweep: Sweep, cell: int) -> "optuna.samplers.BaseSampler":
    """Returns a sampler for one point, seeded by the point's number, not the worker."""
    drawn = np.random.SeedSequence([sweep.seed, cell]).generate_state(1)[0]
    if sweep.sampler == "gp":
        from hpcjax.runs.sweeps.gp_sampler import GpSampler

        space = {axis.key: _distribution(axis) for axis in sweep.axes}
        return GpSampler(
            sweep.axes, space, sweep.subject_to, seed=sweep.seed, drawn=int(drawn)
        )
    import optuna

    return optuna.samplers.TPESampler(seed=int(drawn), constant_liar=True)


def _states() -> "type[optuna.trial.TrialState]":
    import optuna

    return optuna.trial.TrialState


def _distribution(axis: Axis) -> "optuna.distributions.BaseDistribution":
    from optuna import distributions

    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if axis.whole:
        low, high = int(axis.low), int(axis.high)
        return distributions.IntDistribution(low, high, log=axis.log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _point(trial: "optuna.trial.FrozenTrial") -> dict[str, Value]:
    """Returns a trial's point, also if a kill left only part of its parameters."""
    return trial.system_attrs.get("fixed_params", trial.params)


def _outcome(cell: int, trial: "optuna.trial.FrozenTrial") -> Outcome:
    words = {"FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
    kept = trial.user_attrs
    return Outcome(
        cell=cell,
        point=_point(trial),
        status=words.get(trial.state.name) or kept.get("status", "done"),
        value=trial.value,
        run=kept.get("run", ""),
        error=kept.get("error", _DIED if trial.state.name == "FAIL" else ""),
        constraint=kept.get(CONSTRAINT),
    )
