"""Runs what the project's pages show: their Python, and their commands."""

import pathlib
import re
import shlex
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent
# Every page that shows something to be run.
PAGES = tuple(
    str(path.relative_to(REPOSITORY))
    for path in (
        REPOSITORY / "README.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
        *sorted((REPOSITORY / "experiments").glob("*/README.md")),
    )
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What a reader fills in.
_BLANK = re.compile(r"…|<[a-z/ ]+>|\[[a-z]+\]|\b[A-Z]{2,}\b")


def _path(page: str) -> pathlib.Path:
    """The file of a page: a guide's name, or a path from the repository's root."""
    from_root = "/" in page or page == "README.md"
    return REPOSITORY / page if from_root else REPOSITORY / "docs" / page


def blocks(page: str, heading: str | None = None) -> list[str]:
    """Returns the Python blocks of a page, or of those below one heading alone.

    A section ends with the next heading of its kind, or of a larger one.

    Args:
      page: the name of a file of `docs/`, or a path such as
        `"experiments/jorge/README.md"`.
      heading: the text of a heading.
    """
    text = _path(page).read_text()
    if heading is not None:
        (text,) = re.findall(rf"^##+ {heading}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(page: str, *headings: str) -> dict[str, Any]:
    """Runs a page's blocks in turn, or those of sections; returns the names made."""
    names: dict[str, Any] = {}
    for heading in headings or (None,):
        for block in blocks(page, heading):
            run_block(block, page, names)
    return names


def run_block(block: str, page: str, names: dict[str, Any]) -> None:
    """Runs one block of a page with the names that it takes from its reader's code."""
    exec(compile(block, str(_path(page)), "exec"), names)


def shell(page: str) -> list[str]:
    """Returns the blocks of a page that are for a shell, by its path.

    They name no language. Where lines begin with `$`, the others are answers.
    """
    blocks = (block for language, block in _fenced(page) if not language)
    return [
        "".join(re.findall(r"^\$ (.*\n)", block, re.M)) or block for block in blocks
    ]


def _fenced(page: str) -> list[tuple[str, str]]:
    """Returns the language and the text of each block of a page."""
    return _FENCE.findall((REPOSITORY / page).read_text())


def lines(page: str) -> list[str]:
    """Returns the `hpcjax` commands of a page as they are written, by its path.

    They stand in blocks of their own, or between backticks; those of which the reader
    fills in something (`ID`, `…`, `[paper]`, `<file>`) are left out.
    """
    text = _FENCE.sub("", (REPOSITORY / page).read_text())
    inline = re.findall(r"`([^`]+)`", text)
    blocks = re.sub(r"\\\n\s*", "", "\n".join(shell(page)))
    found = [*blocks.splitlines(), *(" ".join(each.split()) for each in inline)]
    told = [each.strip() for line in found for each in line.split("&&")]
    bare = [re.sub(r"^(python3? -m|mpirun -n \d+) ", "", line) for line in told]
    return [
        line
        for line in bare
        if line.startswith("hpcjax ") and not _BLANK.search(unquoted(line))
    ]


def unquoted(line: str) -> str:
    """Returns what a shell reads of a line besides quoted text and comments."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*", "", line)


def commands(page: str) -> list[list[str]]:
    """Returns the words of each `hpcjax` command of a page, by its path."""
    return [shlex.split(line, comments=True) for line in lines(page)]
