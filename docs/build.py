"""Writes the pages that are made from sources: one per paper, one per room."""

import ast
import importlib
import pathlib
import pkgutil

import hpcjax

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
OPTIONS = """    options:
      show_root_heading: false
      show_source: true
      heading_level: 3
"""


def papers() -> list[str]:
    """Copies each experiment's README to a page of its own."""
    pages = []
    for readme in sorted((ROOT / "experiments").glob("*/README.md")):
        page = DOCS / "papers" / f"{readme.parent.name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(readme.read_text())
        pages.append(page.stem)
    return pages


def rooms() -> list[str]:
    """Writes a page per room with the documentation of its public names."""
    pages = []
    for room in pkgutil.walk_packages(hpcjax.__path__, f"{hpcjax.__name__}."):
        stub = ROOT / room.name.replace(".", "/") / "__init__.pyi"
        if not (room.ispkg and stub.exists()):
            continue
        module = importlib.import_module(room.name)
        parts = [f"# {module.__name__}", "", str(module.__doc__), ""]
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    source = f"{module.__name__}.{node.module}.{alias.name}"
                    parts += [f"## {alias.name}", "", f"::: {source}", OPTIONS]
        (DOCS / "api").mkdir(exist_ok=True)
        name = room.name.removeprefix(f"{hpcjax.__name__}.")
        (DOCS / "api" / f"{name}.md").write_text("\n".join(parts))
        pages.append(name)
    return pages


def main() -> None:
    """Makes all pages and the front page."""
    (DOCS / "index.md").write_text((ROOT / "README.md").read_text())
    (DOCS / "contributing.md").write_text((ROOT / "CONTRIBUTING.md").read_text())
    (DOCS / "changelog.md").write_text((ROOT / "CHANGELOG.md").read_text())
    print(f"papers: {papers()}; rooms: {rooms()}")


if __name__ == "__main__":
    main()
