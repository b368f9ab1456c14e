"""Tables in print: for the terminal, Markdown, CSV, HTML and LaTeX."""

from collections.abc import Callable
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from hpcjax.runs.tables import TableResult

Format = Literal["rich", "md", "csv", "html", "latex"]


def render_table(result: TableResult, form: Format = "rich") -> Any:
    """Returns the table's values and its verdicts in one form.

    Args:
      result: what `build_table` returned.
      form: `"rich"` gives something for `rich.print`, the others give text.
    """
    if form == "rich":
        return _rich(result)
    writers: dict[str, Callable[[pd.DataFrame], str]] = {
        "md": _markdown,
        "csv": lambda frame: frame.to_csv(index=False),
        "html": lambda frame: frame.to_html(index=False, border=0),
        "latex": lambda frame: frame.to_latex(index=False),
    }
    parts = [writers[form](values(result)), writers[form](verdicts(result))]
    return "\n".join(parts)


def values(result: TableResult) -> pd.DataFrame:
    """Returns the shown columns as text, intervals in brackets, one line per row."""
    dataset, table = result.dataset, result.table
    names = [name for name in table.columns if name in dataset]
    frame = dataset[names].to_dataframe().reset_index()
    dims = [dim for dim in frame.columns if dim not in names]
    shown = frame[dims].rename(columns=str)
    for name in names:
        cells = [cell(value) for value in frame[name]]
        if f"{name}_low" in dataset and f"{name}_high" in dataset:
            bounds = dataset[[f"{name}_low", f"{name}_high"]].to_dataframe()
            pairs = zip(cells, bounds.iloc[:, 0], bounds.iloc[:, 1], strict=True)
            cells = [f"{text} [{cell(low)}, {cell(high)}]" for text, low, high in pairs]
        shown[table.columns[name]] = cells
    return shown


def verdicts(result: TableResult) -> pd.DataFrame:
    """Returns the claims: paper's relation, our number, verdict."""
    return pd.DataFrame(
        [
            {
                "paper's relation": verdict.relation,
                "ours": f"{cell(verdict.ours)} ({verdict.bound})",
                "verdict": "holds" if verdict.holds else "FAILS",
            }
            for verdict in result.verdicts
        ],
        columns=["paper's relation", "ours", "verdict"],
    )


def cell(value: Any) -> str:
    """Returns one value as text: four significant digits, a missed target as `∞`."""
    if not isinstance(value, float):
        return str(value)
    if value != value:  # noqa: PLR0124 - NaN
        return "missing"
    return "∞" if value == float("inf") else f"{value:.4g}"


def _rich(result: TableResult) -> RenderableType:
    source = result.dataset.attrs.get("source", "measured")
    title = f"{result.table.id} · tier {result.tier} · {source}"
    parts: list[RenderableType] = [_frame(values(result), title)]
    if result.verdicts:
        parts.append(_frame(verdicts(result), "paper's relation | ours | verdict"))
    parts.append(Text(f"Paper: {result.table.paper}"))
    if result.table.caption:
        parts.append(Text(f"Note: {result.table.caption}"))
    if result.differences is not None:
        lines = result.differences or ("equal to the committed result",)
        parts.append(Text("Check: " + "; ".join(lines)))
    return Group(*parts)


def _frame(frame: pd.DataFrame, title: str) -> RichTable:
    table = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in frame.columns:
        table.add_column(str(column), overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*map(str, row))
    return table


def _markdown(frame: pd.DataFrame) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    head = [line([str(c) for c in frame.columns]), line(["---"] * len(frame.columns))]
    body = [line([str(c) for c in row]) for row in frame.itertuples(index=False)]
    return "\n".join(head + body) + "\n"
