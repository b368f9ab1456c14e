"""What a table's picture is: one of six kinds, each naming the columns that it prints.

A picture is drawn of a table's cells alone, so that the one of a committed record is
the one of its runs. Nothing here imports matplotlib before something is drawn.
"""

import dataclasses
import fractions
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

    from hpcjax.runs.tables import TableResult, Tier, Verdict

Names = str | tuple[str, ...]
Role = Literal["about", "control", "other"]
# Letters of a line of the verdicts above a picture.
_LETTERS = 104


@dataclasses.dataclass(frozen=True)
class Picture:
    """What all kinds of pictures say.

    In colour are the rows that the claims are about, those whose cells a negative
    control replaces; what it puts there is hollow, and all others are grey.

    Attributes:
      rows: texts; only rows whose names contain one of them are drawn.
      about: the same of the rows in colour, in place of those of the claims.
      bound: a claim whose bound is a line on the axis of the first column; or a number.
      label: of the axis of values; default the columns' headings.
      log: whether this axis is logarithmic; by default it is found.
    """

    _naming: ClassVar[tuple[str, ...]] = ("columns",)  # fields that name columns

    rows: Names = dataclasses.field(default=(), kw_only=True)
    about: Names = dataclasses.field(default=(), kw_only=True)
    bound: str | float = dataclasses.field(default="", kw_only=True)
    label: str = dataclasses.field(default="", kw_only=True)
    log: bool | None = dataclasses.field(default=None, kw_only=True)

    def names(self) -> tuple[str, ...]:
        """Returns the columns that are drawn."""
        named = [getattr(self, field) for field in self._naming]
        return tuple(name for names in named for name in _tuple(names))

    def dims(self) -> tuple[str, ...]:
        """Returns the dimensions that a column must have."""
        return ("row",)


@dataclasses.dataclass(frozen=True)
class Dots(Picture):
    """A dot for each row, its interval and its single seeds; a panel for each column.

    Attributes:
      columns: one or several.
      by: what stands in the rows' names behind their group.
      sort: whether the rows of a group are in the order of the first column.
    """

    columns: Names = ()
    by: str = ""
    sort: bool = False


@dataclasses.dataclass(frozen=True)
class Lines(Picture):
    """Lines with bands from `<column>_low` to `_high`.

    Attributes:
      x: where a row stands: a text with `{}` in the place of a number of its name, as
        `"P={}"`, of which the rest is the line's name; or a dimension of `y`. Rows that
        lack the text are lines across.
      y: one column or several.
      log_x: whether the axis of `x` is logarithmic; by default it is found.
      x_label: default what stands around the number.
    """

    _naming: ClassVar[tuple[str, ...]] = ("y",)

    x: str
    y: Names
    log_x: bool | None = None
    x_label: str = ""

    def dims(self) -> tuple[str, ...]:
        """Returns the dimensions that a column must have."""
        return ("row",) if "{}" in self.x else ("row", self.x)


@dataclasses.dataclass(frozen=True)
class Bars(Picture):
    """Bars of one or several columns for each row.

    Attributes:
      columns: one or several, told apart by colour and hatching.
      stacked: whether they are put behind one another.
      by: as in `Dots`.

    Raises:
      ConfigError: the axis is to be logarithmic: bars would have no lengths.
    """

    columns: Names
    stacked: bool = False
    by: str = ""

    def __post_init__(self) -> None:
        if self.log:
            raise ConfigError(
                "bars begin at zero, which a logarithmic axis lacks: Dots do not"
            )


@dataclasses.dataclass(frozen=True)
class Scatter(Picture):
    """A point for each row.

    Attributes:
      x, y: columns.
      labels: whether rows are named beside their points.
      front: which ends of both are good, as `("least", "most")`: the rows that no
        other is better than in both are joined.
      by: what stands behind the group in rows' names; groups differ in their markers.
      log_x: whether the axis of `x` is logarithmic; by default it is found.
    """

    _naming: ClassVar[tuple[str, ...]] = ("x", "y")

    x: str
    y: str
    labels: bool = True
    front: tuple[str, str] | tuple[()] = ()
    by: str = ""
    log_x: bool | None = None


@dataclasses.dataclass(frozen=True)
class Timeline(Picture):
    """What each device does when, a panel for each row.

    Attributes:
      column: as `packing.timeline` makes it.
    """

    _naming: ClassVar[tuple[str, ...]] = ("column",)

    column: str

    def dims(self) -> tuple[str, ...]:
        """Returns the dimensions that a column must have."""
        return "row", "kind", "device", "bar", "edge"


@dataclasses.dataclass(frozen=True)
class Map(Picture):
    """A field for each row, on one scale, and how far each is from the truth.

    Attributes:
      column: with dimensions `row`, `y` and `x`.
      truth: a row; below the others are their differences from it.
      y: dimension from the bottom to the top, such as latitude.
      x: dimension from left to right, such as longitude.
    """

    _naming: ClassVar[tuple[str, ...]] = ("column",)

    column: str
    truth: str = ""
    y: str = "y"
    x: str = "x"

    def dims(self) -> tuple[str, ...]:
        """Returns the dimensions that a column must have."""
        return "row", self.y, self.x


Drawn = Picture | Callable[["xr.Dataset"], "Figure"]


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


class Series(NamedTuple):
    """A line of a picture: its name, its role, and its points in the order of `x`."""

    name: str
    role: Role
    x: Sequence[Any]
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


def check_names(
    picture: Drawn | None, columns: Iterable[str] | None, claims: Iterable[str]
) -> None:
    """Checks what a picture names; columns that are not known are left.

    Raises:
      ConfigError: there is no such column or claim.
    """
    if not isinstance(picture, Picture):
        return
    if columns is not None:
        _require("columns", picture.names(), columns)
    if isinstance(picture.bound, str):
        _require("claims", filter(None, [picture.bound]), claims)


def check(picture: Drawn | None, table: "xr.Dataset") -> None:
    """Checks that a table has what its picture draws.

    Raises:
      ConfigError: it lacks a column or a row, or a column is of other dimensions, or
        not of numbers.
    """
    if not isinstance(picture, Picture):
        return
    _require("columns", picture.names(), map(str, table))
    rows = [str(row) for row in table["row"].values] if "row" in table.dims else []
    if isinstance(picture, Lines) and "{}" not in picture.x:
        _require("dimensions", [picture.x], set(map(str, table.dims)) - {"row"})
    elif isinstance(picture, Lines) and not any(split(r, picture.x)[0] for r in rows):
        raise ConfigError(f"no row has a number as {picture.x!r} says: got {rows}")
    for texts in (picture.rows, picture.about):
        if texts and not any(_has(row, texts) for row in rows):
            _require("rows", _tuple(texts), rows)
    if isinstance(picture, Map) and picture.truth:
        _require("rows", [picture.truth], map(str, pick(picture, table)["row"].values))
    for name in picture.names():
        wanted, there = picture.dims(), tuple(map(str, table[name].dims))
        if {*wanted} != {*there}:
            raise ConfigError(
                f"the picture draws columns of dimensions {wanted}: {name} has {there}"
            )
        if table[name].dtype.kind not in "biuf":
            first = table[name].values.ravel()[:1]
            raise ConfigError(f"the picture draws numbers: {name} has {first}")


def _require(what: str, wanted: Iterable[str], there: Iterable[str]) -> None:
    known = list(there)
    lacking = [name for name in wanted if name not in known]
    if lacking:
        raise ConfigError(f"the picture names {what} {lacking}: there are {known}")


def tell_verdicts(result: "TableResult") -> str:
    """Returns how many claims hold, and each that does not with its number."""
    failed = [v for v in result.verdicts if not v.holds]
    if not result.verdicts:
        return ""
    if not failed:
        count = len(result.verdicts)
        return f"{count} of {count} claims hold" if count > 1 else "the claim holds"
    head = f"{len(failed)} of {len(result.verdicts)} claims FAIL"
    return "\n".join(
        textwrap.fill(line, _LETTERS, subsequent_indent="  ")
        for line in (f"{head}:", *(_tell(v, result) for v in failed))
    )


def _tell(verdict: "Verdict", result: "TableResult") -> str:
    """Returns a claim with its number, and why it fails if the number does not."""
    claim = result.table.tier(result.tier).claims[verdict.name]
    kept = " (kept, but by a control too, or a peer has not learned)"
    found = "missing" if math.isnan(verdict.ours) else f"{verdict.ours:.4g}"
    why = kept * (claim.holds(verdict.ours) and not verdict.holds)
    return f"{verdict.relation}: {found}, bound {verdict.bound}{why}"


def describe(result: "TableResult") -> str:
    """Returns a picture in words, for who cannot see it: title, axes and verdicts."""
    table, picture = result.table, result.table.picture
    parts = [table.title]
    if isinstance(picture, Picture):
        drawn = " and ".join(heading(name, table.columns) for name in picture.names())
        against = picture.x_label or picture.x if isinstance(picture, Lines) else ""
        behind = f" against {against.format('n')}" if against else ""
        parts.append(f"{type(picture).__name__} of {picture.label or drawn}{behind}")
    for v in result.verdicts:
        word = "holds" if v.holds else "FAILS"
        parts.append(f"{word}: {_tell(v, result)}")
    return ". ".join(parts) + "."


def heading(name: str, columns: Mapping[str, str]) -> str:
    """Returns what a column is called in print."""
    return columns.get(name, name.replace("_", " "))


def pick(picture: Picture, table: "xr.Dataset") -> "xr.Dataset":
    """Returns the rows of a table that are drawn."""
    if not picture.rows or "row" not in table.dims:
        return table
    return table.isel(row=[_has(row, picture.rows) for row in table["row"].values])


def _has(row: Any, texts: Names) -> bool:
    return any(text in str(row) for text in _tuple(texts))


def find_roles(picture: Picture, tier: "Tier", rows: Iterable[Any]) -> dict[Any, Role]:
    """Returns which rows claims are about, and which are their negative controls."""
    controls = [each.rows for c in tier.claims.values() for each in c.controls]
    about = {row for each in controls for row in each}
    replaced = {row for each in controls for row in each.values()}
    trivial = set(tier.trivial.rows) if tier.trivial else set()
    names = list(rows)
    if picture.about:
        about = {row for row in names if _has(row, picture.about)}
        replaced = (replaced | trivial) - about
    else:
        replaced = (replaced - about) | trivial
        about -= replaced
    if not about.intersection(names):
        about = set(names) - replaced
    return {
        row: "about" if row in about else "control" if row in replaced else "other"
        for row in names
    }


def split(name: str, template: str) -> tuple[str | None, str]:
    """Returns the number that a name has for `{}`, and the rest of the name.

    Examples:
      >>> split("P=8, sync", "P={}"), split("sync", "P={}")
      (('8', 'sync'), (None, 'sync'))
    """
    number = r"(\d+(?:[./]\d+)?(?:e[+-]?\d+)?)(?![\w.])"
    pattern = re.escape(template).replace(r"\{\}", number)
    found = re.search(pattern, name)
    if found is None:
        return None, name
    rest = f"{name[: found.start()]}\0{name[found.end() :]}"
    rest = re.sub(r"[,\s/]*\0[,\s/]*$|^\0[,\s/]*", "", rest)
    return found[1], re.sub(r"[,\s]*\0", "", rest).strip()


def group(row: str, by: str) -> tuple[str, str]:
    """Returns the group of a row, and the row's name in it."""
    before, between, behind = row.partition(by) if by else ("", "", row)
    return (before, behind) if between else ("", row)


def find_series(
    picture: Lines,
    table: "xr.Dataset",
    roles: Mapping[Any, Role],
    result: "TableResult",
) -> Iterator[Series]:
    """Yields the lines of a picture; one without an `x` is to be drawn across."""
    for column in picture.names():
        rest = heading(column, result.table.columns) if len(picture.names()) > 1 else ""
        ends = [table.get(f"{column}_{end}", table[column]) for end in ("low", "high")]
        lines: dict[tuple[str, bool], list[tuple[Any, Role, np.ndarray]]] = {}
        for row in table["row"].values.tolist():
            points = np.stack([each.sel(row=row) for each in (table[column], *ends)])
            if picture.x in table.dims:
                x = table[picture.x].values.tolist()
                name = ", ".join(filter(None, [row, rest]))
                yield Series(name, roles[row], x, *points)
                continue
            at, name = split(str(row), picture.x)
            name = ", ".join(filter(None, [name, rest]))
            place = None if at is None else float(fractions.Fraction(at))
            lines.setdefault((name, at is None), []).append((place, roles[row], points))
        for (name, _), members in lines.items():
            members.sort(key=lambda each: each[0] or 0)
            x, found, points = zip(*members, strict=True)
            order: tuple[Role, ...] = ("about", "control", "other")
            role = next(each for each in order if each in found)
            yield Series(name, role, x, *np.stack(points, 1))


def find_front(points: np.ndarray, good: Sequence[str]) -> np.ndarray:
    """Returns the places of the points `[n, 2]` that none is better than in both."""
    costs = points * [1 if end == "least" else -1 for end in good]
    kept = [
        n
        for n, cost in enumerate(costs)
        if np.isfinite(cost).all()
        and not any((o <= cost).all() and (o < cost).any() for o in costs)
    ]
    return np.array(sorted(kept, key=lambda n: points[n][0]), int)
