"""What a sweep is: a config, what is varied and which points are visited; a trial."""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import filelock

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, nearest
from hpcjax.runs import discover, values
from hpcjax.runs.sweeps import axes as swept
from hpcjax.runs.sweeps.axes import Axis, Constraint, Sampler, Value

LOCK = ".lock"  # held while a sweep's files are read and written again
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

    @functools.cached_property
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

        And if `by` is a metric of its data set of which less is not better, or if the
        package of the sampler is not installed.
        """
        swept.check_sampler(self.axes, self.sampler, self.trials)
        if self.sampler == "tpe" and importlib.util.find_spec("optuna") is None:
            raise ConfigError("sampler 'tpe' needs optuna: pip install 'hpcjax[sweep]'")
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
    """One point of a sweep, and what is known of it.

    Attributes:
      cell: number of the point, in the order in which they were chosen.
      point: the value on each axis.
      status: a `diverged` trial has a value, a `failed` one has none.
      value: by which it is judged; None before there is one, infinite if it diverged.
      run: id of its run, if it has one.
      error: why it failed.
      constraint: what the constraint's variable came to, if there is one.
      attempt: which one it is; a process that dies costs one.
    """

    cell: int
    point: Mapping[str, Value]
    status: Literal["waiting", "running", "done", "diverged", "failed"] = "waiting"
    value: float | None = None
    run: str = ""
    error: str = ""
    constraint: float | None = None
    attempt: int = 1

    @property
    def has_ended(self) -> bool:
        """Whether nobody has to run it."""
        return self.status in ("done", "diverged", "failed")


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
        old = read_sweep(config, root)
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


def read_sweep(name: str, root: pathlib.Path) -> Sweep:
    """Returns an existing sweep."""
    path = files.inside(root, "sweeps", name) / "sweep.json"
    if not path.exists():
        known = [found.parent.name for found in (root / "sweeps").glob("*/sweep.json")]
        raise ConfigError(f"no sweep {name!r}{nearest(name, known)}")
    try:
        return values.decode(files.read_json(path), Sweep)
    except (OSError, ValueError) as error:
        raise DataFormatError(f"{path} cannot be read: {error}") from error


def write_sweep(name: str, sweep: Sweep, root: pathlib.Path) -> None:
    """Writes `sweep.json`, unless there is one of another sweep."""
    folder = files.inside(root, "sweeps", name)
    files.make_folder(folder)
    with filelock.FileLock(folder / LOCK):
        if (folder / "sweep.json").exists():
            _check_same(name, read_sweep(name, root), sweep)
        files.write_json(folder / "sweep.json", values.encode(sweep, Sweep))


def _check_same(name: str, old: Sweep, new: Sweep) -> None:
    before, after = values.encode(old, Sweep), values.encode(new, Sweep)
    if before.pop("trials") != after.pop("trials") and old.total > new.total:
        raise ConfigError(f"sweep {name} has {old.total} trials: got {new.total}")
    differing = [key for key, value in before.items() if after[key] != value]
    if differing:
        told = "; ".join(f"{key}: {before[key]} -> {after[key]}" for key in differing)
        raise ConfigError(f"sweep {name} is another one: {told}; give a new name")
