"""One self-contained HTML page of tables, curves, configs and provenance."""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import xarray as xr

from hpcjax.core.errors import ConfigError, Diverged
from hpcjax.core.files import read_json, write_atomic
from hpcjax.runs import build, curves, directory, discover, execute, render, results
from hpcjax.runs.tables import TableResult


def write_report(
    ids: Sequence[str] = (),
    *,
    root: pathlib.Path | None = None,
    path: pathlib.Path | None = None,
) -> pathlib.Path:
    """Writes a page on tables and runs, and a PNG beside it for each table's curves.

    Args:
      ids: tables (`jorge/steps`) and runs (names below `runs/`); by default every table
        whose runs on tier cpu have all finished under `root`.
      root: folder that holds `runs/`; default the working directory.
      path: the page; default `<root>/runs/report.html`.

    Returns:
      The page's path.

    Raises:
      ConfigError: nothing to report, an id that is neither table nor run, or a run
        that has not finished.
    """
    root = root or pathlib.Path.cwd()
    path = path or root / "runs" / "report.html"
    known = discover.find_tables(root)
    ids = ids or _finished(list(known), root)
    if not ids:
        raise ConfigError("nothing to report yet: run a config or a table first")
    sections = [
        _table_section(build.build_table(name, root=root), root, path)
        if name in known
        else _run_section(directory.open_run(root, name), path)
        for name in ids
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpcjax.runs", "templates"), autoescape=True
    )
    page = environment.get_template("report.html.jinja").render(sections=sections)
    write_atomic(path, page)
    return path


def _finished(tables: Sequence[str], root: pathlib.Path) -> list[str]:
    finished = []
    for name in tables:
        with contextlib.suppress(build.RunMissing, ConfigError, Diverged):
            build.build_table(name, root=root, run_missing=False)
            finished.append(name)
    return finished


def _table_section(
    result: TableResult, root: pathlib.Path, page: pathlib.Path
) -> dict[str, Any]:
    reported = dict.fromkeys(run["id"] for run in result.runs if not run["tuning"])
    table = result.table
    return {
        "name": table.id,
        "title": table.title,
        "command": f"hpcjax table {table.id} --tier {result.tier}",
        "source": result.dataset.attrs.get("source", "measured"),
        "paper": table.paper,
        "caption": table.caption,
        "values": render.html(render.values(result)),
        "verdicts": render.html(render.verdicts(result)),
        "figure": _figure(result.rows, page, table.id),
        "runs": [_run_facts(directory.open_run(root, run_id)) for run_id in reported],
    }


def _run_section(folder: directory.RunDirectory, page: pathlib.Path) -> dict[str, Any]:
    dataset = execute.read_result(folder)
    facts = _run_facts(folder)
    return {
        "name": folder.id,
        "title": "one run",
        "command": facts["command"],
        "source": dataset.attrs.get("source", "measured"),
        "figure": _figure(
            {folder.id: results.over_seeds({0: dataset})}, page, folder.id
        ),
        "runs": [facts],
    }


def _figure(
    rows: Mapping[str, xr.Dataset], page: pathlib.Path, name: str
) -> str | None:
    """Draws curves if the runs are trainings; writes a PNG and returns inline SVG."""
    if not any("val_error" in row for row in rows.values()):
        return None
    figure = curves.draw(rows)
    curves.save(figure, page.with_name(f"{name.replace('/', '-')}.png"))
    text = curves.encode(figure, "svg").decode()
    return text[text.index("<svg") :]


def _run_facts(folder: directory.RunDirectory) -> dict[str, Any]:
    origin = read_json(folder.path / "provenance.json")
    return {
        "id": folder.id,
        "command": f"hpcjax run runs/{folder.id}/config.json",
        "config": json.dumps(read_json(folder.path / "config.json"), indent=2),
        "provenance": json.dumps(origin, indent=2, sort_keys=True),
        "commit": origin.get("git_commit"),
    }
