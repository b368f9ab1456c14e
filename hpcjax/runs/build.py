"""Making a table: running what is missing, assembling, judging."""

import dataclasses
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core import drift
from hpcjax.core.errors import ConfigError, Diverged, HpcjaxError, nearest
from hpcjax.core.files import write_json
from hpcjax.runs import (
    ahead,
    code,
    directory,
    discover,
    drawn,
    execute,
    pictures,
    record_age,
    results,
    table_records,
)
from hpcjax.runs import config as configs
from hpcjax.runs.tables import Runs, Table, TableResult, judge

log = logging.getLogger(__name__)


class RunMissing(HpcjaxError):
    """A table needs a run that has not finished."""


def build_table(
    table_id: str,
    *,
    root: pathlib.Path | None = None,
    tier: str | None = None,
    check: bool = False,
    record: bool = False,
    fresh: bool = False,
    progress: bool = True,
    run_missing: bool = True,
    parallel: int = 1,
) -> TableResult:
    """Makes one table on one tier.

    A finished run under `root` with the same config is used again. A run that diverges
    counts as finished; its row shows what it reached before.

    Args:
      table_id: `<paper>/<table>`.
      root: folder that holds `runs/`; default the working directory.
      tier: `cpu`, `gpu` or `model`; default the only one there is, or `cpu`.
      check: compare with the committed result of this table and tier.
      record: write the result beside the table's definition, to be committed.
      fresh: run everything again.
      progress: show the runs' progress.
      run_missing: False raises RunMissing instead of running what has not finished.
      parallel: how many runs are made at a time, in processes of their own.

    Returns:
      The table with its verdicts.

    Raises:
      ConfigError: no such table or tier, a benchmark and `parallel` above one, or a
        picture that names what the table lacks.
      CodeChanged: with `record`, the code has changed since the process started.
      RunMissing: with `run_missing=False`.
      Diverged: all trials of a row's tuning did, or all runs of the baseline.
    """
    root = root or pathlib.Path.cwd()
    tables = discover.find_tables(root)
    if table_id not in tables:
        raise ConfigError(f"unknown table {table_id!r}{nearest(table_id, tables)}")
    table = tables[table_id]
    tier = table.choose_tier(tier)
    maker = _Maker(root, table, tier, fresh, progress, run_missing)
    old = table_records.read_record(table, tier, root) if check else None
    if old is not None:
        table_records.require_comparable(old)
    ahead.check_parallel(parallel, table.benchmark, table_id)
    known = not run_missing or drawn.try_table(table, tier, root) is not None
    if parallel > 1 and run_missing:
        maker.make_ahead(parallel)
    rows = {row: maker.row(row) for row in maker.tier.runs}
    dataset = drawn.reduce_rows(table, rows)
    if not known:
        drawn.check_names(table, tier, dataset)
    pictures.check(table.picture, dataset)
    result = TableResult(
        table=table,
        tier=tier,
        dataset=dataset,
        verdicts=judge(maker.tier, dataset),
        runs=tuple(maker.made),
        tuned=maker.tuned,
        at_edge=maker.at_edge(),
        drifts=maker.drifts(),
        rows=rows,
    )
    if old is not None:
        cells = old.content["cells"]
        result = dataclasses.replace(
            result,
            differences=(
                *table_records.compare(dataset, cells, table),
                *table_records.find_false_claims(old),
            ),
            recorded=record_age.find_age(old, root).age,
        )
    if record:
        maker.require_unchanged()
        path = table_records.record_path(table, tier, root)
        write_json(path, table_records.to_json(result))
    return result


def read_run(run: directory.RunDirectory) -> xr.Dataset:
    """Returns a run's result; if it diverged, its history until then."""
    if run.status == "diverged":
        return results.history(run.records(), None)
    return execute.read_result(run)


class _Maker:
    """Makes the rows of a tier, and collects the runs and tuned values it used."""

    def __init__(
        self,
        root: pathlib.Path,
        table: Table,
        tier: str,
        fresh: bool,
        progress: bool,
        run_missing: bool,
    ) -> None:
        self.root, self.tier, self.timed = root, table.tier(tier), table.benchmark
        self.fresh, self.progress = fresh, progress
        self.run_missing = run_missing
        self.began = time.monotonic()
        self.made: list[Mapping[str, Any]] = []
        self.configs: list[tuple[Any, str]] = []
        self.tuned: dict[str, dict[str, str]] = {}
        self.made_now: set[str] = set()
        self.datasets: dict[str, xr.Dataset] = {}
        self.reported: dict[tuple[str, int], directory.RunDirectory] = {}

    def make_ahead(self, parallel: int) -> None:
        """Makes what is missing in several processes: trials, then what they choose."""
        fresh, self.fresh = self.fresh, False
        options = {
            "root": self.root,
            "devices": self.tier.devices,
            "fresh": fresh,
            "quiet": not self.progress,
        }
        for tuning in (True, False):
            rows = [self.wanted(name, tuning) for name in self.tier.runs]
            missing = []
            for each in itertools.chain(*rows):
                config = discover.load(each.config, each.overrides, self.root).config
                digest = configs.digest(config)
                ended = not fresh and self.has_ended(digest, code.of_run(config))
                if not (ended or digest in self.made_now):
                    self.made_now.add(digest)
                    missing.append(each)
            ahead.make_runs(missing, parallel, **options)

    def wanted(self, name: str, tuning: bool) -> list[ahead.Wanted]:
        """Returns a row's trials, or the runs that are reported."""
        runs = self.tier.runs[name]
        if runs.after:  # it has nothing to start from before the other has ended
            return []
        trials = runs.trials() if tuning and runs.tune else []
        chosen, seeds = (
            (trials, runs.tune_seeds) if tuning else ([self.tune(name)], runs.seeds)
        )
        return [
            ahead.Wanted(runs.config, {**runs.overrides, **each, "seed": str(seed)})
            for each in chosen
            for seed in seeds
        ]

    def row(self, name: str) -> xr.Dataset:
        """Returns the runs of one row, joined along `seed`."""
        seeds = self.tier.runs[name].seeds
        return results.over_seeds(
            {seed: self.read(self.report(name, seed)) for seed in seeds}
        )

    def report(self, name: str, seed: int) -> directory.RunDirectory:
        """Returns the run of a row that is reported, after that which it starts from.

        Raises:
          Diverged: that one did.
        """
        if (name, seed) not in self.reported:
            runs, before = self.tier.runs[name], None
            if runs.after:
                before = self.report(runs.after, seed)
                if before.status == "diverged":
                    raise Diverged(f"{name} starts from {runs.after}, which diverged")
            chosen = {**self.tune(name), "seed": str(seed)}
            run = self.once(name, runs, chosen, before=before)
            self.reported[name, seed] = run
        return self.reported[name, seed]

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

    def at_edge(self) -> dict[str, dict[str, str]]:
        """Returns what was tuned to an edge of its grid, by row; rows that have it."""
        tuned = self.tuned.items()
        edges = {name: self.tier.runs[name].at_edge(chosen) for name, chosen in tuned}
        return {name: edge for name, edge in edges.items() if edge}

    def drifts(self) -> dict[str, float]:
        """Returns how far times moved within a measurement, of rows that they did."""
        found: dict[str, float] = {}
        for made in self.made:
            held = self.datasets.get(made["id"], xr.Dataset())
            moved, row = float(held.attrs.get("drift", 0.0)), made["row"]
            if moved > drift.STEADY and not made["tuning"]:
                found[row] = max(moved, found.get(row, 0.0))
        return found

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
            values = results.smoothed(self.read(run)[runs.by], runs.smooth)
            best.append(results.least(values))
        return float(np.median(best))

    def once(
        self,
        name: str,
        runs: Runs,
        overrides: Mapping[str, str],
        *,
        tuning: bool = False,
        before: directory.RunDirectory | None = None,
    ) -> directory.RunDirectory:
        """Returns a run that has finished or diverged, an existing one if possible."""
        parent = None if before is None else before.id
        merged = {**runs.overrides, **overrides}
        config = discover.load(runs.config, merged, self.root).config
        digest, made_by = configs.digest(config), code.of_run(config)
        ended = not self.fresh and self.has_ended(digest, made_by, parent)
        if not self.run_missing and not ended:
            older = "by this code " * self.has_ended(digest, None, parent)
            raise RunMissing(f"{runs.config} with {merged} has not been run {older}yet")
        self.configs.append((config, made_by))
        run = execute.ensure(
            runs.config,
            merged,
            root=self.root,
            devices=self.tier.devices,
            fresh=self.fresh,
            quiet=not self.progress,
            place=self.place(),
            after=parent,
        )
        self.made.append(
            {
                "row": name,
                "tuning": tuning,
                "config": runs.config,
                "overrides": merged,
                "id": run.id,
                "config_digest": digest,
                "code": made_by,
                # A benchmark's numbers are times, which nothing repeats.
                "result": None if self.timed else results.digest(self.read(run)),
                "cores": run.sessions()[-1].get("cores"),
                "used_again": ended and digest not in self.made_now,
                "commit": run.sessions()[-1].get("git_commit"),
                "diverged": run.status == "diverged",
                **({"after": runs.after, "parent": parent} if parent else {}),
            }
        )
        return run

    def place(self) -> str:
        """Returns which run is the next, of how many, and how long they take."""
        rows = self.tier.runs.values()
        trials = sum(len(r.trials()) * len(r.tune_seeds) for r in rows if r.tune)
        whole = trials + sum(len(r.seeds) for r in rows)
        now = sum(not run["used_again"] for run in self.made)
        took = time.monotonic() - self.began
        each = took / now if now else 60 * self.tier.minutes / whole
        left = each * (whole - len(self.made))
        return f"run {len(self.made) + 1} of {whole}, about {left:.0f} s left: "

    def read(self, run: directory.RunDirectory) -> xr.Dataset:
        """Returns a run's result, whose file is opened once."""
        if run.id not in self.datasets:
            self.datasets[run.id] = read_run(run)
        return self.datasets[run.id]

    def require_unchanged(self) -> None:
        """Raises CodeChanged if the runs' code has changed since it was read."""
        now = code.read_again()
        if any(code.of_run(cfg, reading=now) != made for cfg, made in self.configs):
            raise code.CodeChanged(
                "the code has changed since this process started, and what it has made "
                "cannot be traced: make the table again"
            )

    def has_ended(
        self, digest: str, made_by: str | None, parent: str | None = None
    ) -> bool:
        """Returns whether a run of a config and a code has finished or diverged."""
        found = directory.find_run(
            self.root,
            digest,
            ("done", "diverged"),
            devices=self.tier.devices,
            code=made_by,
            parent=parent,
        )
        return found is not None
