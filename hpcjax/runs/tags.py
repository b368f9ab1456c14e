"""Words by which runs are found again; they are no part of a config or a result."""

import pathlib
from collections.abc import Iterable

from hpcjax.core import files

NAME = "tags.txt"


def check_tags(tags: Iterable[str]) -> None:
    """Raises ConfigError unless each tag is one safe word."""
    for tag in tags:
        files.check_name(tag, "tag")


def read_tags(folder: pathlib.Path) -> tuple[str, ...]:
    """Returns the tags of the run in `folder`, in the order they were given."""
    path = folder / NAME
    return tuple(path.read_text().split()) if path.exists() else ()


def add_tags(folder: pathlib.Path, tags: Iterable[str]) -> None:
    """Adds tags to those that the run in `folder` has."""
    new = [*tags]
    check_tags(new)
    if new:
        words = dict.fromkeys([*read_tags(folder), *new])
        files.write_atomic(folder / NAME, "\n".join(words) + "\n")
