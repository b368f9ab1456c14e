"""Printing lists of configs, parts and tables, and one config in full."""

import os
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from hpcjax.core import parts
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import config as configs
from hpcjax.runs import outlines, overrides, values
from hpcjax.runs.discover import ConfigEntry, Loaded
from hpcjax.runs.frames import Frame
from hpcjax.runs.overview import System

if TYPE_CHECKING:
    from hpcjax.runs.confirmation import Confirmation
    from hpcjax.runs.inventory import Entry
    from hpcjax.runs.record_age import Age
    from hpcjax.runs.table_records import Record
    from hpcjax.runs.tables import Table

_PIPED_WIDTH = 100
_NAMED = 5  # parts that a config may hold in a place, which are named there


def console(*, stderr: bool = False) -> Console:
    """Returns the console of a command, which in a pipe is 100 wide, or `COLUMNS`."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return _Console(
        file=stream,
        width=None if known else _PIPED_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the command to end; rich would exit with 1, a failed claim."""
        raise Unread


class Unread(Exception):
    """Nobody reads what a command prints any more."""


def list_systems(systems: Iterable[System]) -> RenderableType:
    """Returns a line for each system: what it is, its tables, and what holds."""
    rows = [
        (
            each.name,
            each.about,
            str(each.tables or ""),
            f"{each.held} of {each.claims}" if each.claims else "",
            "" if each.minutes is None else f"{each.minutes:g} min",
        )
        for each in systems
    ]
    columns = ("system", "what", "tables", "claims hold", "from")
    listed = Frame("", columns, rows, numbers=columns[2:], whole=columns[2:])
    return Group(
        listed,
        Text(
            "hpcjax list SYSTEM: its configs and tables. hpcjax show SYSTEM/TABLE: "
            "what came out. hpcjax list --all: everything."
        ),
    )


def list_configs(entries: Iterable[ConfigEntry]) -> RenderableType:
    """Returns a line for each variant, bases first; then files that cannot be used."""
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    for entry in entries:
        if entry.problem:
            problems.append(f"{entry.name}: {entry.problem}")
        for place, name in enumerate(_base_first(entry)):
            about = entry.summary if place == 0 else ""
            rows.append((f"{entry.name}:{name}", about, ", ".join(entry.needs)))
    listed = Frame("Configs", ("config:variant", "what", "needs"), rows)
    return Group(listed, *(Text(problem) for problem in problems))


def _base_first(entry: ConfigEntry) -> list[str]:
    return sorted(entry.variants, key=lambda name: name != entry.base)


def list_parts(kind: str | None = None) -> RenderableType:
    """Returns a line for each part, or each of a kind: its name, summary and class."""
    if kind not in (None, *parts.KINDS):
        raise ConfigError(f"unknown kind {kind!r}{nearest(str(kind), parts.KINDS)}")
    rows = [
        (each, name, _first_line(cls), f"{cls.__module__}:{cls.__qualname__}")
        for each in (parts.KINDS if kind is None else (kind,))
        for name, cls in parts.classes(each).items()
    ]
    return Frame("Parts", ("kind", "name", "what", "class"), rows, keys=2)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def list_tables(tables: "Iterable[Table]") -> RenderableType:
    """Returns a line for each table and tier, with its duration."""
    rows = [
        (table.id, table.title, name, f"{tier.minutes:g} min")
        for table in tables
        for name, tier in table.tiers.items()
    ]
    columns = ("table", "what", "tier", "takes")
    return Group(
        Frame("Tables", columns, rows, numbers=columns[3:], whole=columns[3:]),
        Text("hpcjax table TABLE: makes it. hpcjax show TABLE: what came out."),
    )


def list_stale(ages: "Sequence[tuple[Record, Age]]") -> RenderableType:
    """Returns a line for each committed table that nothing says today's code makes."""
    rows = [
        (record.table.id, record.tier, age.age, "; ".join(age.reasons))
        for record, age in ages
        if age.stale
    ]
    listed = Frame("Committed tables", ("table", "tier", "made by", "why"), rows)
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
    table = Frame(found.table, ("row", "run", "result"), rows)
    return Group(table, Text(count), *lines)


def list_runs(entries: "Sequence[Entry]") -> RenderableType:
    """Returns a line for each run, and how much room they take together."""
    lines = [
        {
            "run": entry.id,
            "config": entry.title,
            "state": entry.state,
            "last scores": " ".join(f"{k} {v:.4g}" for k, v in entry.scores.items()),
            "steps": str(entry.steps or ""),
            "age": f"{entry.days:.0f} d"
            if entry.days >= 1
            else f"{24 * entry.days:.0f} h",
            "tags": " ".join(entry.tags),
            "made by": entry.made_by,
            "size": f"{entry.bytes / 1e6:.1f} MB",
            "in tables, claims that hold": ", ".join(entry.verdicts),
        }
        for entry in entries
    ]
    whole = sum(entry.bytes for entry in entries) / 1e6
    count = Text(f"{len(lines)} runs, {whole:.1f} MB")
    columns = [name for name in (lines or [{}])[0] if any(each[name] for each in lines)]
    rows = [[each[name] for name in columns] for each in lines]
    numbers = ("steps", "age", "size")
    return (
        Group(Frame("Runs", columns, rows, numbers, whole=numbers), count)
        if rows
        else count
    )


def page(entry: ConfigEntry | None, loaded: Loaded) -> RenderableType:
    """Returns a config in full: keys with value, base and type; figures; variants.

    Args:
      entry: the file it comes from; None for a `config.json` of an unknown config.
      loaded: the config with its overrides.
    """
    cls = type(loaded.config)
    lines: list[RenderableType] = [
        Text(f"{loaded.title} ({cls.__module__}:{cls.__qualname__})")
    ]
    if entry is not None:
        lines.append(Text(f"\n{entry.doc}\n"))
    lines.append(describe_keys(loaded))
    if figures := getattr(loaded.config, "figures", None):
        rows = [(name, *said) for name, said in outlines.declared(figures).items()]
        lines.append(Frame("Figures", ("figure", "of each", "what"), rows))
    if entry is not None:
        lines += _about(entry)
    return Group(*lines)


def describe_keys(loaded: Loaded) -> RenderableType:
    """Returns a line for each key: value, base's if any differs, type, meaning."""
    changed = configs.diff(loaded.base, loaded.config)
    rows = [
        (
            path,
            "" if key.group and not key.settable else values.show(key.value),
            *(
                [values.show(changed[path][0]) if path in changed else ""]
                * bool(changed)
            ),
            ": ".join(filter(None, (_describe_type(key), key.help))),
        )
        for path, key in overrides.keys(loaded.config).items()
    ]
    columns = ("key", "value", *["base has"] * bool(changed), "what")
    return Frame("", columns, rows)


def _describe_type(key: overrides.Key) -> str:
    """Returns a key's type in words; of many parts how many, and what lists them."""
    allowed = {*values.members(key.hint).values()}
    kinds = (kind for kind in parts.KINDS if allowed <= {*parts.classes(kind).values()})
    kind = next(kinds, None) if len(allowed) > _NAMED else None
    if kind is None:
        return key.type
    none = " | none" * (type(None) in typing.get_args(key.hint))
    return f"one of {len(allowed)}: `hpcjax list --parts {kind}`{none}"


def _about(entry: ConfigEntry) -> list[RenderableType]:
    base = entry.variants[entry.base]
    rows = []
    for name in _base_first(entry):
        changes = configs.changes(base, entry.variants[name])
        text = " ".join(f"{path}={value}" for path, value in changes.items())
        rows.append((name, "(base)" if name == entry.base else text))
    smoke = " ".join(f"{path}={value}" for path, value in entry.small().items())
    parts: list[RenderableType] = [Frame("Variants", ("variant", "from base"), rows)]
    if smoke:
        parts.append(Text(f"Smoke run: hpcjax run {entry.name} {smoke}"))
    if entry.needs:
        parts.append(Text(f"Needs: {', '.join(entry.needs)}"))
    return parts
