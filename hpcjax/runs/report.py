"""A self-contained HTML page about tables, sweeps and runs, with their provenance.

The page needs no script, no other file and no network. A run that is in several tables
is described once.
"""

import contextlib
import datetime
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import xarray as xr

from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.core.files import write_atomic
from hpcjax.runs import (
    build,
    curves,
    directory,
    discover,
    drawing,
    facts,
    pictures,
    render,
    results,
)
from hpcjax.runs.tables import TableResult

# Points of a curve; more cannot be distinguished.
_POINTS = 250
# Trials of a sweep that are described in full.
_BEST = 10
_METRICS = ("val_error", "val_loss")


def write_report(
    ids: Sequence[str] = (),
    *,
    root: pathlib.Path | None = None,
    path: pathlib.Path | None = None,
    tier: str | None = None,
) -> pathlib.Path:
    """Writes a page about tables, sweeps and runs, and their curves as PNG beside it.

    Args:
      ids: tables (`jorge/steps`), sweeps (names below `sweeps/`) and runs (names below
        `runs/`); by default all that has finished under `root`, newest first: tables,
        sweeps, and the runs that are in none of these.
      root: folder that holds `runs/`; default the working directory.
      path: the page; default `<root>/runs/report.html`.
      tier: of the tables; default the only one of each, or `cpu`.

    Returns:
      The page's path.

    Raises:
      ConfigError: nothing to report, an id that is neither table nor sweep nor run, a
        sweep or run that has not finished, or a path that is a folder.
    """
    root = root or pathlib.Path.cwd()
    path = path or root / "runs" / "report.html"
    if path.is_dir():
        raise ConfigError(f"path must name a file: {path} is a folder")
    page = _Page(root, path, tier)
    for name in ids:
        page.add(name)
    if not ids:
        page.add_finished()
    page.write()
    return page.path


class _Page:
    """The sections of a page, in order."""

    def __init__(
        self, root: pathlib.Path, path: pathlib.Path, tier: str | None
    ) -> None:
        self.root, self.path, self.tier = root, path, tier
        self.known = discover.find_tables(root)
        self.tables: list[dict[str, Any]] = []
        self.sweeps: list[dict[str, Any]] = []
        self.singles: list[dict[str, Any]] = []
        self.missing: list[dict[str, str]] = []
        self.runs: dict[str, facts.Facts] = {}
        self.owners: dict[str, str] = {}  # of runs: the table or sweep they are of

    def add(self, name: str) -> None:
        """Adds a table, a sweep or a run."""
        if name in self.known:
            result = build.build_table(name, root=self.root, tier=self.tier)
            self.tables.append(self.table(result))
        elif "/" not in name and (self.root / "sweeps" / name).is_dir():
            self.sweeps.append(self.sweep(name))
        else:
            self.singles.append(self.single(directory.open_run(self.root, name)))

    def add_finished(self) -> None:
        """Adds all that has finished, newest first; lists what has only begun."""
        kept = directory.list_runs(self.root)
        ages = {run.id: age for age, run in enumerate(reversed(kept))}
        files = {_config_file(run) for run in kept}
        begun = [
            name
            for name, table in self.known.items()
            for tiers in [table.tiers.values()]
            if files & {_file(runs.config) for t in tiers for runs in t.runs.values()}
        ]
        made = [self.finished(name) for name in begun]
        found = [each for each in made if each is not None]
        found.sort(key=lambda it: min(ages[run["id"]] for run in it.runs))
        self.tables = [self.table(each) for each in found]
        for folder in sorted((self.root / "sweeps").glob("*/"), key=_age, reverse=True):
            try:
                self.sweeps.append(self.sweep(folder.name))
            except HpcjaxError as error:
                self.miss(folder.name, f"hpcjax sweep {folder.name}", error)
        for run in reversed(kept):
            if run.id not in self.owners and run.status in ("done", "diverged"):
                self.singles.append(self.single(run))

    def finished(self, name: str) -> TableResult | None:
        """Returns a table if all its runs have finished; None, and says why, if not."""
        options = {"root": self.root, "tier": self.tier, "run_missing": False}
        try:
            return build.build_table(name, **options)
        except HpcjaxError as error:
            self.miss(name, self.known[name].commands()[0], error)
            return None

    def miss(self, name: str, command: str, error: HpcjaxError) -> None:
        """Lists what is not on the page, with the reason."""
        self.missing.append({"name": name, "command": command, "why": str(error)})

    def write(self) -> None:
        """Writes the page."""
        if not (self.tables or self.sweeps or self.singles):
            raise ConfigError("nothing to report yet: run a config or a table first")
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("hpcjax.runs", "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["number_columns"] = render.number_columns
        now = datetime.datetime.now(datetime.UTC)
        text = environment.get_template("report.html.jinja").render(
            papers=self.papers(),
            sweeps=self.sweeps,
            singles=self.singles,
            missing=self.missing,
            runs=list(self.runs.values()),
            owned=self.group_runs(),
            written=now.strftime("%Y-%m-%d %H:%M UTC"),
        )
        write_atomic(self.path, text)

    def group_runs(self) -> dict[str, list[facts.Facts]]:
        """Returns the runs by the table or sweep they are of; "" for those of none."""
        found: dict[str, list[facts.Facts]] = {}
        for run_id, fact in self.runs.items():
            found.setdefault(self.owners.get(run_id, ""), []).append(fact)
        return found

    def papers(self) -> list[dict[str, Any]]:
        """Returns each paper with its tables."""
        names = dict.fromkeys(table["name"].split("/")[0] for table in self.tables)
        return [
            {
                "name": name,
                "title": _title(name, self.root),
                "tables": [t for t in self.tables if t["name"].split("/")[0] == name],
            }
            for name in names
        ]

    def fact(self, run_id: str) -> facts.Facts:
        """Returns the facts of a run, and puts the run on the page."""
        if run_id not in self.runs:
            run = directory.open_run(self.root, run_id)
            self.runs[run_id] = facts.collect(run, self.root)
        return self.runs[run_id]

    def table(self, result: TableResult) -> dict[str, Any]:
        """Returns the section on a table."""
        table = result.table
        self.owners = {run["id"]: table.id for run in result.runs} | self.owners
        reported = [run for run in result.runs if not run["tuning"]]
        return {
            "name": table.id,
            "title": table.title,
            "command": f"hpcjax table {table.id} --tier {result.tier}",
            "tier": result.tier,
            "source": result.source,
            "paper": table.paper,
            "caption": table.caption,
            "trivial": render.describe_trivial(result),
            "drifts": render.describe_drifts(result),
            "values": render.texts(render.values(result)),
            "verdicts": render.texts(render.verdicts(result.verdicts)),
            "held": sum(verdict.holds for verdict in result.verdicts),
            "claims": len(result.verdicts),
            "picture": _picture(result),
            "shows": table.shows,
            "figures": self.figures(
                result.rows, table.id, [run["id"] for run in reported]
            ),
            "runs": [(run["row"], self.fact(run["id"])) for run in reported],
            "tuned": {row: _pairs(found) for row, found in result.tuned.items()},
            "trials": _trials(run for run in result.runs if run["tuning"]),
        }

    def single(self, run: directory.RunDirectory) -> dict[str, Any]:
        """Returns the section on a run that was asked for by itself."""
        fact = self.fact(run.id)
        seeds = results.over_seeds({0: build.read_run(run)})
        return {
            "name": run.id,
            "fact": fact,
            "source": fact.source,
            "figures": self.figures({run.id: seeds}, run.id, [run.id]),
        }

    def sweep(self, name: str) -> dict[str, Any]:
        """Returns the section on a sweep."""
        from hpcjax.runs import sweeps

        study = sweeps.open_study(name, self.root)
        dataset = sweeps.gather(study, self.root)
        ranking = sweeps.ranking(dataset)
        open_ = int(ranking["status"].isin(["waiting", "running"]).sum())
        if open_ or len(ranking) < study.sweep.total:
            raise ConfigError(
                f"sweep {name} has not finished; `hpcjax sweep {name}` goes on with it"
            )
        self.owners |= dict.fromkeys(ranking["run"], name)
        axes = dataset.attrs["axes"].split()
        shown = ranking[[*axes, "value", "status", "run", "error"]]
        judged = ranking[ranking["value"].notna() & (ranking["run"] != "")]
        kept = {run.id for run in directory.list_runs(self.root)}
        figure = sweeps.draw(dataset)
        curves.save(figure, self.path.with_name(f"sweep-{name}.png"))
        return {
            "name": name,
            "command": f"hpcjax sweep {name}",
            "origin": _origin(study.folder / "result.nc"),
            "config": study.sweep.config,
            "overrides": _pairs(study.sweep.overrides),
            "sampler": study.sweep.sampler,
            "seed": study.sweep.seed,
            "by": study.sweep.by,
            "source": dataset.attrs["source"],
            "axes": axes,
            "picture": curves.inline(figure, f"sweep-{name}"),
            "best": [
                {
                    "cells": [render.cell(row[name]) for name in [*axes, "value"]],
                    "run": row["run"],
                    "fact": self.fact(row["run"]) if row["run"] in kept else None,
                }
                for _, row in judged.head(_BEST).iterrows()
            ],
            "trials": render.texts(shown.map(render.cell)),
        }

    def figures(
        self, rows: Mapping[str, xr.Dataset], name: str, of: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Draws rows that are trainings, those of one task (`task/method`) together.

        Writes a PNG for each picture, which tells the runs `of` which it is made, and
        returns its panels as SVG.
        """
        groups: dict[str, dict[str, xr.Dataset]] = {}
        for row, dataset in rows.items():
            groups.setdefault(row.rpartition("/")[0], {})[row] = _thin(dataset)
        drawn = []
        for group, members in groups.items():
            held = [m for m in _METRICS if curves.select_rows(members, m)]
            if not held:
                continue
            title = f"{name}/{group}" if group else name
            stem = title.replace("/", "-")
            picture = curves.draw(members, held[0])
            curves.save(picture, self.path.with_name(f"{stem}.png"), of)
            panels = [
                curves.inline(curves.draw(members, held[0], (what,)), f"{stem}-{what}")
                for what in ("steps", "seconds")
            ]
            drawn.append({"title": title, "panels": panels})
        return drawn


def _picture(result: TableResult) -> str:
    """Returns a table's picture as SVG; empty if there is none."""
    figure, name = drawing.draw(result), f"table-{result.table.id}"
    return (
        "" if figure is None else curves.inline(figure, name, pictures.describe(result))
    )


def _thin(row: xr.Dataset) -> xr.Dataset:
    """Returns a history with at most as many validations as a picture can show."""
    size = row.sizes.get("eval_step", 0)
    if size <= _POINTS:
        return row
    return row.isel(eval_step=np.linspace(0, size - 1, _POINTS).astype(int))


def _age(path: pathlib.Path) -> float:
    return path.stat().st_mtime


def _config_file(run: directory.RunDirectory) -> str:
    """Returns which file's config a run is of; "" if that cannot be read."""
    with contextlib.suppress(HpcjaxError):
        return _file(str(run.read_config().get("name")))
    return ""


def _file(config: str) -> str:
    return config.partition(":")[0]


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _trials(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the runs of a tuning with the overrides of each."""
    return [
        {
            **run,
            "seed": run["overrides"].get("seed", ""),
            "set": _pairs({k: v for k, v in run["overrides"].items() if k != "seed"}),
        }
        for run in runs
    ]


def _origin(path: pathlib.Path) -> dict[str, Any]:
    """Returns the command and the commit that gathered a sweep's result."""
    if not path.exists():
        return {}
    held = json.loads(results.read(path).attrs.get("provenance", "{}"))
    return {**held, "commit": facts.commit(held)}


def _title(paper: str, root: pathlib.Path) -> str:
    """Returns the heading of a paper's README, or its name."""
    readme = discover.experiment_folder(paper, root) / "README.md"
    lines = readme.read_text().splitlines() if readme.exists() else []
    heading = next((line for line in lines if line.startswith("# ")), f"# {paper}")
    return heading.removeprefix("# ")
