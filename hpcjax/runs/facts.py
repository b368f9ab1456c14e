"""The facts of a run in a report: how to repeat it, its changes, numbers and time."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from hpcjax.core.errors import ConfigError
from hpcjax.runs import build, difference, directory, discover, results
from hpcjax.runs import config as configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """A run as text for a report.

    Attributes:
      id: its name below `runs/`.
      title: its config's name.
      status: how it ended.
      source: measured, simulated or analytical.
      seed: of parameters, data order and draws; empty without one.
      commit: short; several if sessions differ, with `+` for uncommitted changes.
      again: the command that repeats it.
      made_by: the command that started it.
      devices: number and kind of devices.
      sessions: how often it was started or resumed.
      numbers: name and value of its results.
      split: name, seconds and share of each part of its time.
      goodput: the share of computing; empty if it is not known.
      changes: key, value of the base config, and own value.
      note: why there are no `changes`; empty if there are.
      config: `config.json`.
      provenance: `provenance.json`.
    """

    id: str
    title: str
    status: str
    source: str
    seed: str
    commit: str
    again: str
    made_by: str
    devices: str
    sessions: int
    numbers: Sequence[tuple[str, str]]
    split: Sequence[tuple[str, float, float]]
    goodput: str
    changes: Sequence[tuple[str, str, str]]
    note: str
    config: str
    provenance: str


def collect(run: directory.RunDirectory, root: pathlib.Path) -> Facts:
    """Returns the facts of a run that has ended.

    Args:
      run: its folder.
      root: folder of `runs/` and further configs.

    Raises:
      ConfigError: the run has not ended.
      DataFormatError: its files cannot be read.
    """
    dataset, data = build.read_run(run), run.read_config()
    *earlier, origin = run.sessions()
    split = results.time_split(dataset)
    whole, share = sum(split.values()) or 1.0, results.goodput(split)
    changes, note = _changes(run, root)
    used = origin.get("used_devices", 1)
    again = f"hpcjax run {run.config_name}"
    held = {**origin, "earlier": earlier} if earlier else origin
    return Facts(
        id=run.id,
        title=str(data.get("name", "")),
        status=run.status,
        source=dataset.attrs.get("source", "unknown"),
        seed=str(data.get("values", {}).get("seed", "")),
        commit=", ".join(dict.fromkeys(map(commit, [*earlier, origin]))),
        again=again if used == 1 else f"{again} --devices {used}",
        made_by=str(origin.get("command", "")),
        devices=f"{used} of {_devices(origin)}",
        sessions=len(earlier) + 1,
        numbers=[
            (name, difference.number(value))
            for name, value in difference.figures(dataset).items()
            if not name.endswith(" s")
        ],
        split=[(name, value, value / whole) for name, value in split.items()],
        goodput="" if share != share else f"{share:.1%}",  # noqa: PLR0124 - NaN
        changes=changes,
        note=note,
        config=json.dumps(data, indent=2),
        provenance=json.dumps(held, indent=2, sort_keys=True),
    )


def commit(origin: dict[str, Any]) -> str:
    """Returns the short commit of a provenance, with `+` for uncommitted changes."""
    changed = "+" if origin.get("git_dirty") else ""
    return f"{str(origin.get('git_commit') or 'no commit')[:10]}{changed}"


def _devices(origin: dict[str, Any]) -> str:
    kinds = origin.get("devices") or {}
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "unknown"


def _changes(
    run: directory.RunDirectory, root: pathlib.Path
) -> tuple[list[tuple[str, str, str]], str]:
    try:
        loaded = discover.load(run.config_name, {}, root)
    except ConfigError as error:
        return [], f"cannot be compared with its base: {error}"
    pairs = configs.diff(loaded.base, loaded.config)
    return difference.config_texts(pairs), ""
