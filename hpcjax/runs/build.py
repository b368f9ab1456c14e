"""Making a table: running what is missing, assembling, judging, comparing."""

import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core import provenance
from hpcjax.core.errors import ConfigError, Diverged, HpcjaxError, nearest
from hpcjax.core.files import read_json, write_json
from hpcjax.runs import config as configs
from hpcjax.runs import directory, discover, execute, results, words
from hpcjax.runs.tables import Runs, Table, TableResult, Tier, judge

log = logging.getLogger(__name__)

# Times measured twice on a machine shared with others may differ by this factor.
_SLACK = 2


class RunMissing(HpcjaxError):
    """A table needs a run that has not finished."""


def build_table(
    table_id: str,
    *,
    root: pathlib.Path | None = None,
    tier: str = "cpu",
    check: bool = False,
    record: bool = False,
    fresh: bool = False,
    progress: bool = True,
    run_missing: bool = True,
) -> TableResult:
    """Makes one table on one tier.

    A finished run under `root` with the same config is used again. A run that diverges
    counts as finished; its row shows what it reached before.

    Args:
      table_id: `<paper>/<table>`.
      root: folder that holds `runs/`; default the working directory.
      tier: `cpu`, `gpu` or `model`.
      check: compare with the committed result of this table and tier.
      record: write the result beside the table's definition, to be committed.
      fresh: run everything again.
      progress: show the runs' progress.
      run_missing: False raises RunMissing instead of running what has not finished.

    Returns:
      The table with its verdicts.

    Raises:
      ConfigError: no such table or tier.
      RunMissing: with `run_missing=False`.
      Diverged: all trials of a row's tuning did, or all runs of the baseline.
    """
    root = root or pathlib.Path.cwd()
    tables = discover.find_tables(root)
    if table_id not in tables:
        raise ConfigError(f"unknown table {table_id!r}{nearest(table_id, tables)}")
    table = tables[table_id]
    maker = _Maker(root, table.tier(tier), fresh, progress, run_missing)
    committed = committed_path(table, tier, root)
    old = committed_cells(table, tier, root) if check else None
    rows = {row: maker.row(row) for row in maker.tier.runs}
    dataset = table.reduce(rows)
    result = TableResult(
        table=table,
        tier=tier,
        dataset=dataset,
        verdicts=judge(maker.tier, dataset),
        runs=tuple(maker.made),
        tuned=maker.tuned,
        rows=rows,
        differences=None if old is None else compare(dataset, old, table),
    )
    if record:
        write_json(committed, to_json(result))
    return result


def committed_path(table: Table, tier: str, root: pathlib.Path) -> pathlib.Path:
    """Returns the path of a table's committed result, which may not exist."""
    paper, name = table.id.split("/")
    folder = discover.experiment_folder(paper, root)
    return folder / "results" / f"{name}.{tier}.json"


def to_json(result: TableResult) -> dict[str, Any]:
    """Returns a table's cells, verdicts, runs and provenance, to be committed."""
    return {
        "table": result.table.id,
        "tier": result.tier,
        "source": result.source,
        "cells": _cells(result.dataset),
        "claims": {
            v.name: {"ours": words.plain(v.ours), "bound": v.bound, "holds": v.holds}
            for v in result.verdicts
        },
        "tuned": {row: dict(values) for row, values in result.tuned.items()},
        "runs": [dict(run) for run in result.runs],
        "provenance": provenance.collect(devices=True),
    }


def committed_cells(table: Table, tier: str, root: pathlib.Path) -> Mapping[str, Any]:
    """Returns the cells of a table's committed result, to compare with.

    Raises:
      ConfigError: nothing was committed, or the times of a benchmark are of another
        kind of machine.
    """
    path = committed_path(table, tier, root)
    if not path.exists():
        raise ConfigError(f"no committed result to compare with: {path}")
    content = read_json(path)
    if table.benchmark:
        gpu = tier == "gpu"
        here, there = provenance.collect(devices=gpu), content["provenance"]
        kind = ("devices",) if gpu else ("cpu", "cpu_count")
        ours, theirs = ({key: each.get(key) for key in kind} for each in (here, there))
        if ours != theirs:
            raise ConfigError(
                f"{table.id} measures time, and its committed result is of another "
                f"machine, {theirs}: this one is {ours}; leave out --check"
            )
    return content["cells"]


def compare(
    dataset: xr.Dataset, old: Mapping[str, Any], table: Table
) -> tuple[str, ...]:
    """Returns how a table differs from its committed result.

    A cell with a committed interval must lie within it; others must be equal to six
    digits. Columns whose names end in `seconds` and that have no interval are not
    compared, as no two runs take the same time.

    Of benchmarks only the times are compared, see `Table.times`. They must be within a
    factor of 2 of the committed values or intervals. Other columns are left to claims.

    Args:
      dataset: the table that was made.
      old: the `cells` of the committed one.
      table: the definition of both.
    """
    new = _cells(dataset)
    differences = [
        f"{cell}: only in one of both" for cell in sorted(set(old) ^ set(new))
    ]
    for cell in sorted(set(old) & set(new)):
        row, column = cell.rsplit(".", 1)
        if column.endswith(("_low", "_high")):
            continue
        before, now = old[cell], new[cell]
        low, high = old.get(f"{row}.{column}_low"), old.get(f"{row}.{column}_high")
        interval = isinstance(low, float) and isinstance(high, float)
        if table.benchmark:
            bounds = (low, high) if interval else (before, before)
            if column in table.times and _far(now, *bounds):
                differences.append(f"{cell}: {now} beside {before} or so")
        elif interval and isinstance(now, float):
            if not low <= now <= high:
                differences.append(f"{cell}: {now:.6g} outside [{low:.6g}, {high:.6g}]")
        elif not _same(before, now) and not column.endswith("seconds"):
            differences.append(f"{cell}: {now} instead of {before}")
    return tuple(differences)


def _far(now: Any, low: Any, high: Any) -> bool:
    """Returns whether a time is not within a factor `_SLACK` of an interval."""
    now, low, high = (words.number(each) for each in (now, low, high))
    if not all(math.isfinite(each) for each in (now, low, high)):
        return words.plain(now) != words.plain(low)
    return not low / _SLACK <= now <= high * _SLACK


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)
    return left == right


def _cells(dataset: xr.Dataset) -> dict[str, Any]:
    """Returns `{"row.column": value}`, labels of further dimensions joined by `|`."""
    cells = {}
    for column, values in dataset.data_vars.items():
        stacked = (
            values.stack(cell=values.dims)
            if values.dims
            else values.expand_dims("cell")
        )
        for place, value in zip(stacked["cell"].values, stacked.values, strict=True):
            names = place if isinstance(place, tuple) else (place,)
            # Texts are Python's own, numbers NumPy's.
            plain = value.item() if isinstance(value, np.generic) else value
            cells["|".join(map(str, names)) + f".{column}"] = words.plain(plain)
    return cells


def read_run(run: directory.RunDirectory) -> xr.Dataset:
    """Returns a run's result; if it diverged, its history until then.

    Raises:
      ConfigError: the run has not ended.
      DataFormatError: its files cannot be read.
    """
    if run.status == "diverged":
        return results.history(run.records())
    return execute.read_result(run)


class _Maker:
    """Makes the rows of a tier, and collects the runs and tuned values it used."""

    def __init__(
        self,
        root: pathlib.Path,
        tier: Tier,
        fresh: bool,
        progress: bool,
        run_missing: bool,
    ) -> None:
        self.root, self.tier, self.fresh, self.progress = root, tier, fresh, progress
        self.run_missing = run_missing
        self.made: list[Mapping[str, Any]] = []
        self.tuned: dict[str, dict[str, str]] = {}

    def row(self, name: str) -> xr.Dataset:
        """Returns the runs of one row, joined along `seed`."""
        runs = self.tier.runs[name]
        chosen = self.tune(name)
        by_seed = {
            seed: self.once(name, runs, {**chosen, "seed": str(seed)})
            for seed in runs.seeds
        }
        return results.over_seeds(
            {seed: read_run(run) for seed, run in by_seed.items()}
        )

    def tune(self, name: str) -> dict[str, str]:
        """Returns the tuned values of a row, or of the row whose values it uses."""
        runs = self.tier.runs[name]
        if runs.like is not None:
            tuned = self.tune(runs.like)
            return {key: tuned[key] for key in runs.takes}
        if not runs.tune:
            return {}
        if name not in self.tuned:
            trials = runs.trials()
            scores = [self.score(name, runs, trial) for trial in trials]
            if min(scores) == math.inf:
                raise Diverged(f"{name}: each of {len(trials)} trials diverged")
            best = trials[int(np.argmin(scores))]
            log.info("%s: %s is best of %d trials", name, best, len(trials))
            self.tuned[name] = best
        return self.tuned[name]

    def score(self, name: str, runs: Runs, trial: Mapping[str, str]) -> float:
        """Returns a trial's best validation, median over the tuning seeds.

        A seed under which it diverges counts as infinite.
        """
        best = []
        for seed in runs.tune_seeds:
            run = self.once(name, runs, {**trial, "seed": str(seed)}, tuning=True)
            if run.status == "diverged":
                best.append(math.inf)
                continue
            best.append(results.least(read_run(run)[runs.by]))
        return float(np.median(best))

    def once(
        self,
        name: str,
        runs: Runs,
        overrides: Mapping[str, str],
        *,
        tuning: bool = False,
    ) -> directory.RunDirectory:
        """Returns a run that has finished or diverged, an existing one if possible."""
        merged = {**runs.overrides, **overrides}
        digest = configs.digest(discover.load(runs.config, merged, self.root).config)
        if not self.run_missing and not self.has_ended(digest):
            raise RunMissing(f"{runs.config} with {merged} has not been run")
        run = execute.ensure(
            runs.config,
            merged,
            root=self.root,
            devices=self.tier.devices,
            fresh=self.fresh,
            quiet=not self.progress,
        )
        self.made.append(
            {
                "row": name,
                "tuning": tuning,
                "config": runs.config,
                "overrides": merged,
                "id": run.id,
                "config_digest": digest,
                "commit": run.sessions()[-1].get("git_commit"),
                "diverged": run.status == "diverged",
            }
        )
        return run

    def has_ended(self, digest: str) -> bool:
        """Returns whether there is a run of a config that has finished or diverged."""
        ends = ("done", "diverged")
        devices = self.tier.devices
        return directory.find_run(self.root, digest, ends, devices=devices) is not None
