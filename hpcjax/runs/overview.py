"""What systems there are, read from their files: none of their modules is imported.

What a system is says its README, whose first heading is `# Name (venue)` and whose
first paragraph says what there is and ends with the rooms that it lives in, "In
`optim`, `cost`."; or else the docstring of its tables, or of a config.
"""

import ast
import contextlib
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.runs import places

_HEADING = re.compile(r"# (?P<name>[^\n(]+?)(?: \((?P<venue>[^\n]*)\))?\n")
_ROOMS = re.compile(r"\s+In ((?:`[\w.]+`(?:, )?)+)\.$")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)]*)\)")
_LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CAME_OUT = "## What came out\n"
_LINE = 50  # characters, of the column of a list 100 wide
_ID = re.compile(r"""\bid=["']([\w-]+/[\w-]+)["']""")
_MINUTES = re.compile(r"\bminutes=([\d.]+)")


class Said(NamedTuple):
    """What the README of a paper says first.

    Attributes:
      name: of the system.
      venue: where and when it was published; may be empty.
      about: what there is.
      rooms: where it lives, in backticks; may be empty.
      place: of its results, as a link from the root leads there.
    """

    name: str
    venue: str = ""
    about: str = ""
    rooms: str = ""
    place: str = ""


class System(NamedTuple):
    """A system as a line of a list.

    Attributes:
      name: of its folders.
      about: what it is.
      tables: how many are written or recorded.
      held: how many claims hold in its records, of
      claims: so many.
      minutes: of the table that takes least; None if none says it.
    """

    name: str
    about: str
    tables: int
    held: int
    claims: int
    minutes: float | None


def find_systems(root: pathlib.Path) -> list[System]:
    """Returns the systems below a root and the checkout, sorted by name."""
    folders = places.search_path(root)
    records = [*read_records(root)]
    return [
        _describe(name, folder, [each for each in records if _paper(each) == name])
        for name, folder in sorted(
            (name, folder) for folder in folders for name in places.papers(folder)
        )
    ]


def _paper(record: dict[str, Any]) -> str:
    return str(record.get("table")).partition("/")[0]


def _describe(name: str, root: pathlib.Path, records: list[dict[str, Any]]) -> System:
    """Returns what the files of a system below a root, and its records, say."""
    tables = [*sorted((root / "experiments" / name).glob("*tables.py"))]
    texts = [file.read_text(encoding="utf-8") for file in tables]
    known = {each["table"] for each in records}
    known.update(found for text in texts for found in _ID.findall(text))
    holds = [bool(it["holds"]) for each in records for it in each["claims"].values()]
    minutes = [float(found) for text in texts for found in _MINUTES.findall(text)]
    about = ""
    with contextlib.suppress(ConfigError):  # a README of another form
        about = _LINKED.sub(r"\1", read(root / "experiments" / name).about)
    if not about:
        sources = [*tables, *sorted((root / "configs" / name).glob("*.py"))]
        about = next(filter(None, map(_first_line, sources)), "")
    return System(
        name=name,
        about=shorten(re.split(r"[.:;](?= |$)", about)[0]),
        tables=len(known),
        held=sum(holds),
        claims=len(holds),
        minutes=min(minutes, default=None),
    )


def shorten(sentence: str) -> str:
    """Returns as many clauses of a sentence as go on a line, but at least the first.

    Examples:
      >>> shorten("Programs as graphs of operators, what they move, and which is least")
      'Programs as graphs of operators, what they move'
    """
    whole, *clauses = sentence.split(", ")
    for clause in clauses:
        if len(f"{whole}, {clause}") > _LINE:
            break
        whole = f"{whole}, {clause}"
    return whole


def _first_line(file: pathlib.Path) -> str:
    """Returns the first line of a module's docstring; "" if there is none."""
    with contextlib.suppress(SyntaxError, ValueError):
        module = ast.parse(file.read_text(encoding="utf-8"))
        return (ast.get_docstring(module) or "").partition("\n")[0]
    return ""


def read_records(root: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields what the readable records of tables hold, of a root and the checkout."""
    for folder in places.search_path(root):
        for file in sorted(folder.glob("experiments/*/results/*.json")):
            with contextlib.suppress(DataFormatError):
                record = files.read_object(file)
                claims = record.get("claims")
                if isinstance(claims, dict) and isinstance(record.get("table"), str):
                    yield record


def read(folder: pathlib.Path) -> Said:
    """Returns what a paper's README says first; without one its name is the folder's.

    Raises:
      ConfigError: the README does not begin with a heading.
    """
    file, place = folder / "README.md", f"experiments/{folder.name}/README.md"
    if not file.exists():
        return Said(folder.name)
    text = file.read_text(encoding="utf-8")
    heading = _HEADING.match(text)
    if heading is None:
        raise ConfigError(f"{file} must begin with '# Name (venue)'")
    paragraph = " ".join(text[heading.end() :].strip().partition("\n\n")[0].split())
    rooms = _ROOMS.search(paragraph)
    about = _LINK.sub(
        lambda link: f"]({_from_root(link[1], place)})", _ROOMS.sub("", paragraph)
    )
    return Said(
        name=heading["name"],
        venue=heading["venue"] or "",
        about=about,
        rooms=rooms[1] if rooms else "",
        place=f"{place}#what-came-out" if _CAME_OUT in text else place,
    )


def _from_root(target: str, place: str) -> str:
    """Returns where a link of a page leads, seen from the root."""
    path, mark, anchor = target.partition("#")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
    return f"{found if path else place}{mark}{anchor}"
