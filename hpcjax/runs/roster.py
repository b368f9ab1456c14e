"""The table of papers, as a page in Markdown shows it.

All of it is said elsewhere: what a paper is by its README, see `overview`; its tables
and tiers by `tables.py`; what holds by the committed records.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpcjax.core.errors import ConfigError
from hpcjax.runs import discover, table_records
from hpcjax.runs.overview import Said, read
from hpcjax.runs.table_records import Record
from hpcjax.runs.tables import Table

COLUMNS = ("system", "where", "tables", "tier", "status")
BEGIN = "<!-- made by `hpcjax list --markdown` -->"
END = "<!-- end of what is made -->"


def markdown(root: pathlib.Path, paper: str | None = None) -> str:
    """Returns a line for each paper with tables, in the order of folders' names.

    Args:
      root: folder with further papers.
      paper: only this one.

    Raises:
      ConfigError: there is no such paper.
    """
    if paper is not None:
        discover.experiment_folder(paper, root)
    tables = _by_paper(discover.find_tables(root).values(), lambda table: table)
    records = _by_paper(table_records.find_records(root), lambda it: it.table)
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for name in sorted(tables) if paper is None else [paper] * (paper in tables):
        said = read(discover.experiment_folder(name, root))
        lines.append(_row(said, tables[name], records.get(name, [])))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by_paper(
    things: Iterable[Any], table_of: Callable[[Any], Table]
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for thing in things:
        paper = table_of(thing).id.partition("/")[0]
        found.setdefault(paper, []).append(thing)
    return found


def _row(said: Said, tables: Sequence[Table], records: Sequence[Record]) -> list[str]:
    page = said.place.partition("#")[0]
    system = f"[{said.name}]({page})" if page else said.name
    system += f" ({said.venue})" if said.venue else ""
    return [
        f"{system}. {said.about}" if said.about else system,
        said.rooms,
        " ".join(f"`{table.id}`" for table in tables),
        _tiers(tables),
        _status(said, tables, records),
    ]


def _tiers(tables: Iterable[Table]) -> str:
    """Returns the tiers; where not all tables have one, with those that do."""
    having: dict[str, list[str]] = {}
    whole = list(tables)
    for table in whole:
        for tier in table.tiers:
            having.setdefault(tier, []).append(table.id.partition("/")[2])
    return "; ".join(
        tier if len(own) == len(whole) else f"{tier}: {', '.join(own)}"
        for tier, own in having.items()
    )


def _status(said: Said, tables: Iterable[Table], records: Iterable[Record]) -> str:
    """Returns how many recorded claims hold, which fail, and what has no record."""
    made = {(it.table.id, it.tier): it.content["claims"] for it in records}
    parts = [_holding([claim for claims in made.values() for claim in claims.values()])]
    absent = []
    for table in tables:
        for tier in table.tiers:
            name = f"`{table.id}`" + (f" ({tier})" if len(table.tiers) > 1 else "")
            claims = made.get((table.id, tier))
            if claims is None:
                absent.append(name)
            elif not all(claim["holds"] for claim in claims.values()):
                parts.append(f"{name} {_failing(claims, said.place)}")
    parts += [f"not recorded: {', '.join(absent)}"] if absent else []
    return "; ".join(part for part in parts if part)


def _holding(claims: Sequence[Mapping[str, object]]) -> str:
    held = sum(bool(claim["holds"]) for claim in claims)
    if not claims:
        return ""
    if len(claims) == held:
        return f"all {held} claims hold" if held > 1 else "its claim holds"
    return f"{held} of {len(claims)} claims hold"


def _failing(claims: Mapping[str, Mapping[str, object]], place: str) -> str:
    failed = sum(not claim["holds"] for claim in claims.values())
    word = f"[fails]({place})" if place else "fails"
    return word if len(claims) == 1 else f"{word}: {failed} of {len(claims)}"


def put(page: str, made: str, begin: str = BEGIN) -> str:
    """Returns a page with what is made between its markers, `begin` and `END`.

    Raises:
      ConfigError: it has no markers.
    """
    before, found, rest = page.partition(f"{begin}\n")
    _, end, after = rest.partition(f"\n{END}")
    if not end:
        raise ConfigError(f"the page has no lines {begin!r} and {END!r}")
    return f"{before}{found}\n{made}\n{end}{after}"
