"""Comparing two runs or two configs: keys, results and provenance."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from hpcjax.core import files
from hpcjax.core.errors import ConfigError
from hpcjax.runs import build, directory, discover, results, values
from hpcjax.runs import config as configs
from hpcjax.runs.frames import Frame

if TYPE_CHECKING:
    import xarray as xr

Pairs = Mapping[str, tuple[Any, Any]]
# Keys of the provenance that differ between any two runs, or repeat the config.
_OWN = ("command", "config_digest", "earlier", "parent", "seed", "started")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences of two runs or configs; each pair is (old, new).

    Attributes:
      names: ids of runs, or names of configs.
      config: keys whose values differ; a missing one is `ABSENT`.
      results: for two runs that have ended: steps, last and best (least finite) value
        of each common validation metric, and how their time was spent.
      provenance: commit, versions, devices and settings that differ.
      notes: what could not be compared, and why.
    """

    names: tuple[str, str]
    config: Pairs
    results: Pairs
    provenance: Pairs
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two: its config if the class is known, its folder if it is a run."""

    name: str
    values: Mapping[str, Any]
    config: Any = None
    run: directory.RunDirectory | None = None


def compare_runs(old: str, new: str, *, root: pathlib.Path | None = None) -> Difference:
    """Compares two runs or configs.

    Args:
      old: id of a run or its last six digits, or `paper/config[:variant]`, or the path
        of a `config.json`.
      new: the same.
      root: folder of `runs/` and further configs; default the working directory.

    Raises:
      ConfigError: no such run or config.
      DataFormatError: a run's file cannot be read.

    Examples:
      `runs.compare_runs("0d3aa7", "jorge/digits:sgd").config`
    """
    root = root or pathlib.Path.cwd()
    sides = _side(old, root), _side(new, root)
    notes = [
        f"{side.name}: its class is not what it was, so keys are compared as written"
        for side in sides
        if side.config is None
    ]
    folders = [side.run for side in sides if side.run is not None]
    measured, origins = {}, {}
    if len(folders) == 2:
        origins = _unequal(*map(_origin, folders))
        unfinished = [f"run {f.id} is {f.standing}" for f in folders if not _ended(f)]
        notes += unfinished
        if not unfinished:
            measured = _both(*(figures(build.read_run(folder)) for folder in folders))
    return Difference(
        names=(sides[0].name, sides[1].name),
        config=_keys(*sides),
        results=measured,
        provenance=origins,
        notes=tuple(notes),
    )


def figures(dataset: "xr.Dataset") -> dict[str, float]:
    """Returns the figures of a run that are single numbers.

    Args:
      dataset: the run's result.

    Returns:
      `steps`; `<metric> (last)` and `<metric> (best)`, see `results.least`, of each
      validation metric; and `<what> s` of each part of its time, see
      `results.time_split`, as far as the result has them.
    """
    numbers: dict[str, float] = {}
    if "step" in dataset.coords and dataset["step"].size:
        numbers["steps"] = float(dataset["step"].max())
    for name, variable in dataset.data_vars.items():
        if not str(name).startswith("val_") or variable.dims != ("eval_step",):
            continue
        if variable.size:
            numbers[f"{name} (last)"] = float(variable[-1])
            numbers[f"{name} (best)"] = results.least(variable)
    split = results.time_split(dataset)
    return numbers | {f"{name} s": seconds for name, seconds in split.items()}


def render(difference: Difference) -> RenderableType:
    """Returns the differences as tables for `rich`."""
    tables = {
        "config": config_texts(difference.config),
        "results": [
            (name, number(old), number(new))
            for name, (old, new) in difference.results.items()
        ],
        "provenance": config_texts(difference.provenance),
    }
    parts: list[RenderableType] = [
        Frame("", (title, *difference.names), rows)
        for title, rows in tables.items()
        if rows
    ]
    if not difference.config:
        parts.insert(0, Text("The configs are equal."))
    return Group(*parts, *(Text(f"Note: {note}") for note in difference.notes))


def config_texts(pairs: Pairs) -> list[tuple[str, str, str]]:
    """Returns the lines of a table: key, old and new value in print."""
    return [
        (name, values.show(old), values.show(new)) for name, (old, new) in pairs.items()
    ]


def number(value: float) -> str:
    """Returns a number as text: integers exactly, others with six digits."""
    return str(int(value)) if value.is_integer() else f"{value:.6g}"


def _side(name: str, root: pathlib.Path) -> _Side:
    if "/" in name or name.endswith(".json"):
        loaded = discover.load(name, {}, root)
        return _Side(name=name, config=loaded.config, values=_written(loaded.config))
    run = directory.open_run(root, name)
    data = run.read_config()
    try:
        config = discover.load(run.config_name, {}, root).config
    except ConfigError:
        config = None
    held = data.get(configs.VALUES)
    return _Side(
        name=run.id,
        config=config,
        values=held if isinstance(held, dict) else {},
        run=run,
    )


def _written(config: Any) -> Mapping[str, Any]:
    return configs.to_json(config)[configs.VALUES]


def _keys(old: _Side, new: _Side) -> Pairs:
    if old.config is not None and new.config is not None:
        return configs.diff(old.config, new.config)
    return _unequal(files.flatten_json(old.values), files.flatten_json(new.values))


def _unequal(old: Mapping[str, Any], new: Mapping[str, Any]) -> Pairs:
    return {
        name: (old.get(name, configs.ABSENT), new.get(name, configs.ABSENT))
        for name in dict.fromkeys([*old, *new])
        if old.get(name, configs.ABSENT) != new.get(name, configs.ABSENT)
    }


def _both(old: Mapping[str, float], new: Mapping[str, float]) -> Pairs:
    return {name: (old[name], new[name]) for name in old if name in new}


def _ended(run: directory.RunDirectory) -> bool:
    return run.status in ("done", "diverged")


def _origin(run: directory.RunDirectory) -> dict[str, str]:
    """Returns a run's provenance by key, with the values of all its sessions."""
    sessions = [files.flatten_json(session) for session in run.sessions()]
    names: Iterable[str] = dict.fromkeys(name for each in sessions for name in each)
    merged = {
        name: ", ".join(dict.fromkeys(str(each.get(name)) for each in sessions))
        for name in names
        if name not in _OWN
    }
    return {**merged, "sessions": str(len(sessions))}
