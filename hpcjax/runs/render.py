"""Tables in print: for the terminal, Markdown, CSV, HTML and LaTeX."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pandas as pd
import xarray as xr
from rich.console import Group, RenderableType
from rich.text import Text

from hpcjax.runs.frames import Frame
from hpcjax.runs.table_records import Record, describe_origin, to_result
from hpcjax.runs.tables import TableResult, Verdict, find_claimed

RECALLED = "paper (recalled)"
_FIRST = 6  # values of a figure that are printed of a run
Format = Literal["rich", "md", "csv", "html", "latex"]
# Characters that pandas does not escape: signs that TeX fonts lack, and a bracket,
# which at the beginning of a row would be an optional argument of the preceding `\\\\`.
_TEX = {"∞": r"$\infty$", "≤": r"$\leq$", "≥": r"$\geq$", "[": "{[}"}
# A number as `cell` writes it, with its interval; also of a unit of per cent.
_NUMBER = re.compile(
    r"(-?\d[\d.,]*(e[-+]?\d+)?|-?∞|missing)( \[[^\]]*\])?( %)?", re.IGNORECASE
)


def render_table(result: TableResult, form: Format = "rich") -> Any:
    """Returns a table's values and verdicts in a format.

    Args:
      result: from `build_table`.
      form: `"rich"` for a renderable of `rich`, others for text.
    """
    if form == "rich":
        return _rich(result)
    writers: dict[str, Callable[[pd.DataFrame], str]] = {
        "md": _markdown,
        "csv": lambda frame: frame.to_csv(index=False),
        "html": html,
        "latex": _latex,
    }
    parts = [writers[form](values(result)), writers[form](verdicts(result.verdicts))]
    return "\n".join(parts)


def values(result: TableResult) -> pd.DataFrame:
    """Returns the shown columns as text, with intervals in brackets.

    Those that claims are about come first, behind the labels of the rows.
    If rows differ in their source, such as measured and simulated, a column names it.
    Another one tells what of a row's best trial is at the edge of its grid, if any is.
    """
    dataset, table = result.dataset, result.table
    about = find_claimed(table.tier(result.tier), dataset)
    ranks = {name: name not in about for name in table.columns if name in dataset}
    names = sorted(ranks, key=ranks.__getitem__)
    frame = dataset[names].to_dataframe().reset_index()
    dims = [dim for dim in frame.columns if dim not in names]
    shown = frame[dims].rename(columns=str)
    for name in names:
        cells = [cell(value) for value in frame[name]]
        if f"{name}_low" in dataset and f"{name}_high" in dataset:
            bounds = dataset[[f"{name}_low", f"{name}_high"]].to_dataframe()
            pairs = zip(cells, bounds.iloc[:, 0], bounds.iloc[:, 1], strict=True)
            # A single value has an interval of length zero, which is not shown.
            cells = [
                f"{text} [{cell(low)}, {cell(high)}]" if low < high else text
                for text, low, high in pairs
            ]
        shown[table.columns[name]] = cells
    edges = result.at_edge
    if "row" in frame and edges:
        shown["at the edge of the grid"] = [
            ", ".join(f"{key}={text}" for key, text in edges.get(row, {}).items())
            for row in frame["row"]
        ]
    if "row" in frame and table.recalled:
        shown[RECALLED] = [table.recalled.get(row, "") for row in frame["row"]]
    sources = result.sources
    if "row" in frame and "source" not in frame and len({*sources.values()}) > 1:
        shown["source"] = [sources.get(row, result.source) for row in frame["row"]]
    return shown


def list_verdicts(found: Iterable[Verdict], title: str = "") -> RenderableType:
    """Returns verdicts for the terminal."""
    columns, rows = texts(verdicts(found))
    return Frame(title, columns, rows, whole=columns[1:3])


def verdicts(found: Iterable[Verdict]) -> pd.DataFrame:
    """Returns the claims: our number and its bound, whether it holds, and controls."""
    return pd.DataFrame(
        [
            (
                verdict.relation,
                f"{cell(verdict.ours)} ({verdict.bound})",
                _word(verdict),
                _list_controls(verdict),
            )
            for verdict in found
        ],
        columns=["claim", "ours (bound)", "verdict", "must not hold for"],
    )


def _word(verdict: Verdict) -> str:
    """Returns whether a claim holds, and whom it is about that has not learned."""
    told = f": {', '.join(verdict.unlearned)} has not learned" * bool(verdict.unlearned)
    return "holds" if verdict.holds else f"FAILS{told}"


def _list_controls(verdict: Verdict) -> str:
    """Returns whose cells make the negative controls, and their numbers."""
    both = zip(verdict.controls, verdict.broken, strict=True)
    return "; ".join(f"{control} ({cell(number)})" for control, number in both)


def describe_trivial(result: TableResult) -> str:
    """Returns which trivial row is the strongest, and which peers are worse."""
    trivial = result.table.tier(result.tier).trivial
    if trivial is None:
        return ""
    heading = result.table.columns.get(trivial.by, trivial.by)
    found = trivial.find_strongest(result.dataset)
    if found is None:
        return f"Strongest trivial row: unknown, for {heading} is not known of each"
    best = cell(result.dataset[trivial.by].sel(row=found).item())
    behind = trivial.find_unlearned(result.dataset)
    told = "".join(f"; {peer} is worse: peer has not learned" for peer in behind)
    return f"Strongest trivial row: {found}, {heading} {best}{told}"


def describe_drifts(result: TableResult) -> str:
    """Returns which rows were measured on a machine that was not steady."""
    each = ", ".join(f"{row} {moved:.0%}" for row, moved in result.drifts.items())
    told = "UNSTABLE: within a measurement a median of times moved, by the row's runs"
    return f"{told}: {each}" if each else ""


def cell(value: Any) -> str:
    """Returns one value as text: four significant digits, a missed target as `∞`."""
    if not isinstance(value, float):
        return str(value)
    if value != value:  # noqa: PLR0124 - NaN
        return "missing"
    return "∞" if value == float("inf") else f"{value:.4g}"


def render_record(record: Record) -> RenderableType:
    """Returns a committed table for the terminal, and where it was made."""
    result = to_result(record)
    made = f"Made: by {describe_origin(record)}, of {len(result.runs)} run"
    made += "s" * (len(result.runs) != 1)
    return Group(Text(f"{record.table.title}\n"), *_list_parts(result), Text(made))


def render_figures(dataset: xr.Dataset) -> RenderableType:
    """Returns what a run found: its figures, what they mean, and some values."""
    rows, groups = [], {}
    for name, figure in dataset.data_vars.items():
        meaning = str(figure.attrs.get("long_name", ""))
        each = f"by {', '.join(map(str, figure.dims))}"
        rows.append((str(name), each if figure.dims else cell(figure.item()), meaning))
        groups.setdefault(figure.dims, []).append(name)
    columns = ("figure", "value", "what")
    parts: list[RenderableType] = [Frame("", columns, rows, whole=columns[:2])]
    for dims, names in groups.items():
        if dims:
            values = dataset[names].to_dataframe(dim_order=dims).reset_index()
            shown = values.head(_FIRST).map(cell)
            columns, rows = texts(shown[[*dims, *names]])
            title = f"{len(shown)} of {len(values)} values" * (len(values) > len(shown))
            numbers = [columns[place] for place in number_columns(rows)]
            parts.append(Frame(title, columns, rows, numbers, columns, len(dims)))
    return Group(*parts)


def _list_parts(result: TableResult) -> list[RenderableType]:
    """Returns a table, its verdicts, and what is to be known of both."""
    title = f"{result.table.id} · tier {result.tier} · {result.source}"
    columns, rows = texts(values(result))
    numbers = [columns[place] for place in number_columns(rows)]
    headings = result.table.columns.values()
    keys = next(place for place, name in enumerate(columns) if name in headings)
    parts: list[RenderableType] = [Frame(title, columns, rows, numbers, columns, keys)]
    if result.verdicts:
        parts.append(list_verdicts(result.verdicts))
    told = (describe_trivial(result), describe_drifts(result))
    parts.extend(map(Text, filter(None, told)))
    parts.append(Text(f"Paper: {result.table.paper}"))
    if result.table.caption:
        parts.append(Text(f"Note: {result.table.caption}"))
    return parts


def _rich(result: TableResult) -> RenderableType:
    parts = _list_parts(result)
    if result.differences is not None:
        lines = result.differences or ("equal to the committed result",)
        parts.append(Text(f"Check: {'; '.join(lines)} (of {result.recorded})"))
    parts.append(Text(f"Runs: {_count_runs(result)}"))
    return Group(*parts)


def _count_runs(result: TableResult) -> str:
    again = sum(bool(run.get("used_again")) for run in result.runs)
    made = f"{len(result.runs) - again} made now"
    return f"{made}, {again} of the same config and code used again" if again else made


def html(frame: pd.DataFrame) -> str:
    """Returns a frame as an HTML table, its text escape."""
    return frame.to_html(index=False, border=0)


def texts(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Returns a frame's columns and rows as text."""
    rows = frame.itertuples(index=False)
    return list(map(str, frame.columns)), [list(map(str, row)) for row in rows]


def number_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    """Returns which columns of a table of text hold numbers alone, to end at the right.

    Examples:
      >>> number_columns([["sgd", "58 [54, 64]", "1e-3"], ["adamw", "∞", "missing"]])
      {1, 2}
    """
    columns = enumerate(zip(*rows, strict=True))
    return {n for n, cells in columns if all(map(_NUMBER.fullmatch, cells))}


def _latex(frame: pd.DataFrame) -> str:
    text = frame.to_latex(index=False, escape=True)
    for sign, tex in _TEX.items():
        text = text.replace(sign, tex)
    return text


def _markdown(frame: pd.DataFrame) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def escape(cells: list[str]) -> list[str]:
        return [re.sub(r"([\\|*_`<&])", r"\\\1", " ".join(c.split())) for c in cells]

    columns, rows = texts(frame)
    lines = [escape(columns), ["---"] * len(columns), *map(escape, rows)]
    return "\n".join(map(line, lines)) + "\n"
