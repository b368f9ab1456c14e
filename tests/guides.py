"""Runs what the pages of `docs/` show."""

import pathlib
import re
from typing import Any

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def blocks(page: str, heading: str | None = None) -> list[str]:
    """Returns the Python blocks of `docs/<page>`, or of those below one heading alone.

    A section ends with the next heading of its kind, or of a larger one.
    """
    text = (DOCS / page).read_text()
    if heading is not None:
        (text,) = re.findall(rf"^##+ {heading}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(page: str, *headings: str) -> dict[str, Any]:
    """Runs a page's blocks in turn, or those of sections; returns the names made."""
    names: dict[str, Any] = {}
    for heading in headings or (None,):
        for block in blocks(page, heading):
            exec(compile(block, str(DOCS / page), "exec"), names)
    return names
