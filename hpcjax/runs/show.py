"""Printing lists of configs, parts and tables, and one config in full."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    from hpcjax.runs.confirmation import Confirmation
    from hpcjax.runs.inventory import Entry
    from hpcjax.runs.record_age import Age
    from hpcjax.runs.table_records import Record
    from hpcjax.runs.tables import Table

_PIPED_WIDTH = 1000


def console(*, stderr: bool = False) -> Console:
    """Returns the console of a command; in a pipe lines are not cut or coloured."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return _Console(
        file=stream, width=width, highlight=False, markup=False, emoji=False
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the command to end; rich would exit with 1, a failed claim."""
        raise Unread


class Unread(Exception):
    """Nobody reads what a command prints any more."""


def frame(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    numbers: Collection[str] = (),
) -> RenderableType:
    """Returns a table of text under its title; cells are folded, never cut.

    Args:
      title: of the table; may be empty.
      columns: their names.
      rows: a text for each column.
      numbers: the columns that end at the right, so that digits stand below digits.
    """
    table = RichTable(box=box.SIMPLE_HEAD)
    for column in columns:
        justify = "right" if column in numbers else "left"
        table.add_column(Text(column), overflow="fold", justify=justify)
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
    """Returns a line for each committed table that nothing says today's code makes."""
    rows = [
        (record.table.id, record.tier, age.age, "; ".join(age.reasons))
        for record, age in ages
        if age.stale
    ]
    listed = frame("Committed tables", ("table", "tier", "made by", "why"), rows)
    made = sum(age.age == "this code" for _, age in ages)
    repeated = len(ages) - len(rows) - made
    count = (
        f"{made} of {len(ages)} are made by this code, {repeated} by older code whose "
        "numbers this code repeats"
    )
    return Group(listed, Text(count)) if rows else Text(count)


def list_repeated(found: "Confirmation") -> RenderableType:
    """Returns a line for each run that was repeated, and what follows for the table."""
    if not found.repeated:
        return Text(f"{found.table} is not stale: nothing to confirm")
    words = {True: "the same bits", False: "DIFFERS"}
    rows = [(run.row, run.title, words[run.same]) for run in found.repeated]
    count = f"{sum(run.same for run in found.repeated)} of {len(rows)} repeated runs "
    count += f"(of {found.total}) have the same bits: "
    count += "confirmed" if found.passed else "NOT confirmed"
    lines = [
        Text(f"{what} was {there}, and is {here} here: bits may differ for that")
        for what, (there, here) in found.machine.items()
        if not found.passed
    ]
    table = frame(found.table, ("row", "run", "result"), rows)
    return Group(table, Text(count), *lines)


def list_runs(entries: "Sequence[Entry]") -> RenderableType:
    """Returns a line for each run, and how much room they take together."""
    rows = [
        (
            entry.id,
            entry.title,
            " ".join(entry.tags),
            entry.state,
            " ".join(f"{name} {value:.4g}" for name, value in entry.scores.items()),
            str(entry.steps or ""),
            entry.made_by,
            f"{entry.days:.0f} d" if entry.days >= 1 else f"{24 * entry.days:.0f} h",
            f"{entry.bytes / 1e6:.1f} MB",
        )
        for entry in entries
    ]
    whole = sum(entry.bytes for entry in entries) / 1e6
    count = Text(f"{len(rows)} runs, {whole:.1f} MB")
    if not rows:
        return count
    columns = ["run", "config", "tags", "state", "last scores"]
    columns += ["steps", "made by", "age", "size"]
    if any(entry.verdicts for entry in entries):
        columns.append("in tables, claims that hold")
        told = (", ".join(entry.verdicts) for entry in entries)
        rows = [(*row, said) for row, said in zip(rows, told, strict=True)]
    return Group(frame("Runs", columns, rows, ("steps", "age", "size")), count)


def page(entry: ConfigEntry | None, loaded: Loaded) -> RenderableType:
    """Returns a config in full: keys with value, base and type; figures; variants.

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
    if figures := getattr(loaded.config, "figures", None):
        from hpcjax.runs import outlines  # and xarray, which a list does not need

        rows = [(name, *said) for name, said in outlines.declared(figures).items()]
        parts.append(frame("Figures", ("figure", "of each", "what"), rows))
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


def settings(loaded: Loaded) -> RenderableType:
    """Returns the values of a config by key, and its base's where they differ."""
    changed = configs.diff(loaded.base, loaded.config)
    rows = [
        (path, values.show(value), _show(changed[path][0]) if path in changed else "")
        for path, value in configs.flatten(loaded.config).items()
    ]
    return frame(loaded.title, ("key", "value", "base has"), rows)


def _show(value: Any) -> str:
    return repr(value) if value is configs.ABSENT else values.show(value)


def _about(entry: ConfigEntry) -> list[RenderableType]:
    base = entry.variants[entry.base]
    rows = []
    for name in _base_first(entry):
        changes = configs.changes(base, entry.variants[name])
        text = " ".join(f"{path}={value}" for path, value in changes.items())
        rows.append((name, "(base)" if name == entry.base else text))
    smoke = " ".join(f"{path}={value}" for path, value in entry.small().items())
    parts: list[RenderableType] = [frame("Variants", ("variant", "from base"), rows)]
    if smoke:
        parts.append(Text(f"Smoke run: hpcjax run {entry.name} {smoke}"))
    if entry.needs:
        parts.append(Text(f"Needs: {', '.join(entry.needs)}"))
    return parts
