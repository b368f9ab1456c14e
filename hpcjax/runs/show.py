"""Printing lists of configs, parts and tables, and one config in full."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from hpcjax.core import parts
from hpcjax.runs import config as configs
from hpcjax.runs import overrides, values
from hpcjax.runs.discover import ConfigEntry, Loaded

if TYPE_CHECKING:
    from hpcjax.runs.table_records import Age, Record
    from hpcjax.runs.tables import Table

_PIPED_WIDTH = 1000


def console(*, stderr: bool = False) -> Console:
    """Returns the console of a command; in a pipe lines are not cut or coloured."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def frame(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]
) -> RenderableType:
    """Returns a table of text under its title; cells are folded, never cut."""
    table = RichTable(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return Group(Text(title), table) if title else table


def list_configs(entries: Iterable[ConfigEntry]) -> RenderableType:
    """Returns a line for each variant, bases first; then files that cannot be used."""
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    for entry in entries:
        if entry.problem:
            problems.append(f"{entry.name}: {entry.problem}")
        for place, name in enumerate(_base_first(entry)):
            paper = entry.name.partition("/")[0]
            about = entry.summary if place == 0 else ""
            rows.append((paper, f"{entry.name}:{name}", about, ", ".join(entry.needs)))
    listed = frame("Configs", ("paper", "config:variant", "what", "needs"), rows)
    return Group(listed, *(Text(problem) for problem in problems))


def _base_first(entry: ConfigEntry) -> list[str]:
    return sorted(entry.variants, key=lambda name: name != entry.base)


def list_parts() -> RenderableType:
    """Returns a line for each part: its kind, name, summary and class."""
    rows = [
        (kind, name, _first_line(cls), f"{cls.__module__}:{cls.__qualname__}")
        for kind in parts.KINDS
        for name, cls in parts.classes(kind).items()
    ]
    return frame("Parts", ("kind", "name", "what", "class"), rows)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def list_tables(tables: "Mapping[str, Table]") -> RenderableType:
    """Returns a line for each table and tier, with command and duration."""
    rows = [
        (table.id, table.title, command, f"{tier.minutes:g} min")
        for table in tables.values()
        for command, tier in zip(table.commands(), table.tiers.values(), strict=True)
    ]
    return frame("Tables", ("table", "what", "made by", "takes"), rows)


def list_stale(ages: "Sequence[tuple[Record, Age]]") -> RenderableType:
    """Returns a line for each committed table that today's code did not make."""
    rows = [
        (record.table.id, record.tier, age.age, "; ".join(age.reasons))
        for record, age in ages
        if age.age != "this code"
    ]
    listed = frame("Committed tables", ("table", "tier", "made by", "why"), rows)
    count = f"{len(ages) - len(rows)} of {len(ages)} are made by this code"
    return Group(listed, Text(count)) if rows else Text(count)


def page(entry: ConfigEntry | None, loaded: Loaded) -> RenderableType:
    """Returns a config in full: keys with value, base value and type; its variants.

    Args:
      entry: the file it comes from; None for a `config.json` of an unknown config.
      loaded: the config with its overrides.
    """
    cls = type(loaded.config)
    parts: list[RenderableType] = [
        Text(f"{loaded.title} ({cls.__module__}:{cls.__qualname__})")
    ]
    if entry is not None:
        parts.append(Text(f"\n{entry.doc}"))
    parts.append(_keys(loaded))
    if entry is not None:
        parts += _about(entry)
    return Group(*parts)


def _keys(loaded: Loaded) -> RenderableType:
    changed = configs.diff(loaded.base, loaded.config)
    rows = [
        (
            "  " * path.count(".") + path,
            "" if key.group and not key.settable else values.show(key.value),
            _show(changed[path][0]) if path in changed else "",
            key.type,
            key.help,
        )
        for path, key in overrides.keys(loaded.config).items()
    ]
    return frame("", ("key", "value", "base has", "type", "what"), rows)


def _show(value: Any) -> str:
    return repr(value) if value is configs.ABSENT else values.show(value)


def _about(entry: ConfigEntry) -> list[RenderableType]:
    base = entry.variants[entry.base]
    rows = []
    for name in _base_first(entry):
        changes = configs.changes(base, entry.variants[name])
        text = " ".join(f"{path}={value}" for path, value in changes.items())
        rows.append((name, "(base)" if name == entry.base else text))
    smoke = " ".join(f"{path}={value}" for path, value in entry.smoke.items())
    parts: list[RenderableType] = [frame("Variants", ("variant", "from base"), rows)]
    if smoke:
        parts.append(Text(f"Smoke run: hpcjax run {entry.name} {smoke}"))
    if entry.needs:
        parts.append(Text(f"Needs: {', '.join(entry.needs)}"))
    return parts
