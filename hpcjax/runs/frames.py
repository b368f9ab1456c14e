"""Tables of text for the terminal, which are never wider than it is."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

_GAP = 2  # between columns


@dataclasses.dataclass(frozen=True)
class Frame:
    """A table of text under its title, for `rich`; no word of it is broken.

    One that is too wide is printed in parts, each with the columns that name the rows;
    or, if its cells are whole, with rows and columns exchanged, if it fits then. It
    says so.

    Attributes:
      title: of the table; may be empty.
      columns: their names.
      rows: a text for each column.
      numbers: the columns that end at the right, so that digits stand below digits.
      whole: those whose cells stay on one line; others are wrapped between words.
      keys: how many of the first columns name a row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    whole: Collection[str] = ()
    keys: int = 1

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yields what fits the console."""
        if self.title:
            yield Text(self.title)
        room, needed = options.max_width, self.width
        turned = self._turn()
        if needed > room >= turned.width and set(self.columns) <= set(self.whole):
            yield turned
            yield Text(f"Rows are columns here; they are not with COLUMNS={needed}.")
            return
        parts = _split(self._least, self.keys, room)
        for part in parts:
            yield Group(self._print(part, room), "")
        if len(parts) > 1:
            yield Text(f"In {len(parts)} parts; they are one with COLUMNS={needed}.")

    @property
    def width(self) -> int:
        """How wide it must be for no word to be broken."""
        return sum(self._least) + _GAP * (len(self.columns) - 1)

    @property
    def _least(self) -> list[int]:
        """The width that each column must have."""
        return [
            max(
                _measure(name, words=True),
                *(
                    _measure(row[place], words=name not in self.whole)
                    for row in self.rows
                ),
                0,
            )
            for place, name in enumerate(self.columns)
        ]

    def _turn(self) -> "Frame":
        """Returns the table with rows and columns exchanged."""
        heads = [", ".join(row[: self.keys]) for row in self.rows]
        lines = [
            [name, *(row[place] for row in self.rows)]
            for place, name in enumerate(self.columns[self.keys :], self.keys)
        ]
        return Frame("", ["", *heads], lines, whole=heads)

    def _print(self, places: Sequence[int], room: int) -> RichTable:
        """Returns some of the columns as a table, in a room."""
        table = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        names = [self.columns[place] for place in places]
        rows = [[row[place] for place in places] for row in self.rows]
        wanted = [
            max(_measure(text) for text in texts)
            for texts in zip(names, *rows, strict=True)
        ]
        least = [self._least[place] for place in places]
        widths = share_room(wanted, least, room - _GAP * (len(places) - 1))
        for name, width in zip(names, widths, strict=True):
            justify = "right" if name in self.numbers else "left"
            table.add_column(Text(name), overflow="fold", justify=justify, width=width)
        for row in rows:
            table.add_row(*map(Text, row))
        return table


def _measure(text: str, words: bool = False) -> int:
    """Returns the width of a text's widest line, or word."""
    return max(map(cell_len, text.split() if words else text.splitlines()), default=0)


def _split(least: Sequence[int], keys: int, room: int) -> list[list[int]]:
    """Returns the columns of parts that fit a room, each with the first columns."""
    parts = [[*range(keys)]]
    for place in range(keys, len(least)):
        taken = sum(least[each] + _GAP for each in parts[-1])
        if len(parts[-1]) > keys and taken + least[place] > room:
            parts.append([*range(keys)])
        parts[-1].append(place)
    return parts


def share_room(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Returns columns' widths: what they need, and of the rest what they ask for.

    Examples:
      >>> share_room([5, 40, 60], [5, 10, 10], 65)
      [5, 30, 30]
    """
    widths = list(least)
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    left = max(0, room - sum(widths))
    wishes = [max(0, most - width) for most, width in zip(wanted, widths, strict=True)]
    for rank, place in enumerate(sorted(range(len(wishes)), key=wishes.__getitem__)):
        more = min(wishes[place], left // (len(wishes) - rank))
        widths[place] += more
        left -= more
    return widths
