"""Makes the site's sources in `build/docs`, and its settings in `build/mkdocs.yml`.

`zensical build --config-file build/mkdocs.yml` makes the site of them, in `build/site`.

The READMEs, the guides of this folder and a page for each room become pages; links
between them, which work in the repository, are rewritten to work on the site.

With `--readme` it writes what is made in README.md instead: the quickstart, of its
record, and the table of papers, as `hpcjax list --markdown` prints it.
"""

import ast
import html
import importlib
import itertools
import os
import pathlib
import pkgutil
import re
import shutil
import sys
from collections.abc import Sequence

import pandas as pd
import yaml

import hpcjax
from hpcjax.runs import (
    curves,
    discover,
    drawing,
    pictures,
    render,
    roster,
    table_records,
)
from hpcjax.runs.tables import TableResult

ROOT = pathlib.Path(__file__).parent.parent
BUILD = ROOT / "build"
SITE = BUILD / "docs"
QUICKSTART = "experiments/jorge/results/quickstart.cpu.json"
PICTURE = "docs/quickstart.png"
# What README.md shows of training, inference, weather and systems.
SHOWN = {
    "jorge/quickstart": PICTURE,
    "chai/latency": "docs/pictures/chai-latency.png",
    "ens10/baselines": "docs/pictures/ens10-baselines.png",
    "nopfs/loading": "docs/pictures/nopfs-loading.png",
}
OPTIONS = """    options:
      show_root_heading: false
      show_root_toc_entry: false
      show_source: true
      heading_level: 3
"""
# The navigation, by what a reader wants: its heads, and the files that become the pages
# below each. The rooms stand last, under a head of their own.
HEADS = {
    "Start": ("README.md", "docs/notebooks.md", "CHANGELOG.md"),
    "Compose in your own code": (
        "docs/kfac.md",
        "docs/exchanges.md",
        "docs/sparsity.md",
        "docs/language-models.md",
        "docs/graphs.md",
        "docs/weather.md",
        "docs/quantum-transport.md",
    ),
    "Configs and sweeps": ("docs/configs.md", "docs/search.md", "docs/logging.md"),
    "Tables and papers": ("experiments/*/README.md", "docs/gpu.md"),
    "Parts of your own": ("docs/house.md", "docs/own-work.md", "CONTRIBUTING.md"),
    "Clusters and processes": (
        "docs/clusters.md",
        "docs/parallel.md",
        "docs/pipelines.md",
        "docs/hostcomm.md",
        "docs/input.md",
    ),
    "Reliability": ("docs/reliability.md",),
}
# A link or picture: what stands before its target, the target, what stands behind it.
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
# The section of a paper's page that holds its records.
CAME_OUT = "## What came out"
# What is shown as code: blocks, however indented, and words of a line.
CODE = re.compile(r"(^[ ]*(`{3,}|~~~).*?^[ ]*\2|`+[^`\n]+`+)", re.M | re.S)


def find_pages() -> dict[pathlib.Path, str]:
    """Returns the page of each Markdown file that becomes one, head by head.

    Raises:
      SystemExit: a guide stands under no head.
    """
    found = [path for head in HEADS for path in find_files(head)]
    for guide in sorted({*(ROOT / "docs").glob("*.md")} - {*found}):
        sys.exit(f"docs/{guide.name} must stand under a head: HEADS in docs/build.py")
    return {path: name_page(path) for path in found}


def find_files(head: str) -> list[pathlib.Path]:
    """Returns the Markdown files below a head of the navigation, in order."""
    return [path for each in HEADS[head] for path in sorted(ROOT.glob(each))]


def name_page(path: pathlib.Path) -> str:
    """Returns the page that a Markdown file becomes."""
    if path.parent == ROOT:
        return "index.md" if path.stem == "README" else f"{path.stem.lower()}.md"
    guide = path.parent == ROOT / "docs"
    return f"guides/{path.name}" if guide else f"papers/{path.parent.name}.md"


def rewrite_links(
    text: str, source: pathlib.Path, pages: dict[pathlib.Path, str]
) -> tuple[str, list[pathlib.Path]]:
    """Returns a page's text with links as they are on the site, and files it shows.

    A link to a file of the repository that is neither a page nor lies in `docs/` has
    nothing to lead to on the site, and becomes its text.

    Raises:
      SystemExit: a link leads nowhere.
    """
    shown: list[pathlib.Path] = []

    def rewrite(match: re.Match[str]) -> str:
        before, target, behind = match.groups()
        place, hash_mark, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not place:
            return match[0]
        path = pathlib.Path(os.path.normpath(source.parent / place))
        if not path.exists():
            sys.exit(f"{source.relative_to(ROOT)}: dead link to {target}")
        if path in pages:
            found = pages[path]
        elif path.is_relative_to(ROOT / "docs"):
            shown.append(path)
            found = f"guides/{path.relative_to(ROOT / 'docs')}"
        else:
            return before.lstrip("!")[1:-2]
        here = pathlib.PurePosixPath(pages[source]).parent
        return f"{before}{os.path.relpath(found, here)}{hash_mark}{anchor}{behind}"

    # Code is set aside, for what looks like a link in it is none; a link's text may
    # hold some.
    codes: list[str] = []

    def set_aside(match: re.Match[str]) -> str:
        codes.append(match[0])
        return f"\0{len(codes) - 1}\0"

    rewritten = LINK.sub(rewrite, CODE.sub(set_aside, text))
    return re.sub(r"\0(\d+)\0", lambda m: codes[int(m[1])], rewritten), shown


def write_pages(pages: dict[pathlib.Path, str]) -> None:
    """Writes all pages that are Markdown files of the repository."""
    for source, page in pages.items():
        text, shown = rewrite_links(source.read_text(), source, pages)
        if page.startswith("papers/"):
            text = put_records(text, describe_records(source.parent.name))
        write(SITE / page, text)
        for path in shown:
            copy = SITE / "guides" / path.relative_to(ROOT / "docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def put_records(text: str, lines: Sequence[str]) -> str:
    """Returns a paper's page with its records above the prose about what came out.

    A page without such a section has them above its first.
    """
    if not lines:
        return text
    found = re.search(rf"^{CAME_OUT}$", text, re.M) or re.search("^## .*$", text, re.M)
    place = found.start() if found else len(text)
    rest = text[place:].removeprefix(CAME_OUT).lstrip("\n")
    return "\n".join([text[:place] + CAME_OUT, *lines, "", rest])


def describe_records(paper: str) -> list[str]:
    """Returns the lines on a paper's committed tables, and writes their pictures."""
    records = table_records.find_records(ROOT, paper)
    return [line for record in records for line in describe_record(record)]


def describe_record(record: table_records.Record) -> list[str]:
    """Returns the lines on one table: the paper's figures, our cells and verdicts."""
    table, result = record.table, table_records.to_result(record)
    ours = f"{result.source}, by {table_records.describe_origin(record)}."
    return [
        *("", f"### `{table.id}`, tier {record.tier}", "", f"{table.title}."),
        *("", tabulate(render.values(result))),
        *draw_record(record, result),
        *("", tabulate(render.verdicts(result.verdicts)), ""),
        *(f"**The paper**: {table.paper}.", ""),
        *(f"**Ours**: {ours} {table.caption}", ""),
    ]


def draw_record(record: table_records.Record, result: TableResult) -> list[str]:
    """Returns the lines that show a table's picture, which is written."""
    figure = drawing.draw(result)
    if figure is None:
        return []
    place = SITE / "papers" / name_picture(record)
    place.parent.mkdir(parents=True, exist_ok=True)
    curves.save(figure, place)
    return ["", show_picture(name_picture(record), result)]


def name_picture(record: table_records.Record) -> str:
    """Returns where the picture of a record is, seen from its paper's page."""
    return f"pictures/{record.table.id.replace('/', '-')}.{record.tier}.svg"


def show_picture(place: str, result: TableResult) -> str:
    """Returns the Markdown of a picture, with what it shows in words."""
    said = re.sub(r"[][]", "", pictures.describe(result))
    return f"![{said}]({place})\n\n{result.table.shows}"


def write_gallery() -> None:
    """Writes a page with the picture of every committed table, paper by paper."""
    lines = ["# Gallery", "", "Every committed table as a picture, with its verdict."]
    records = table_records.find_records(ROOT)
    for paper, own in itertools.groupby(records, lambda it: it.table.id.split("/")[0]):
        lines += ["", f"## [{paper}](papers/{paper}.md)", "", '<div class="gallery">']
        lines += [show_thumbnail(record) for record in own]
        lines.append("</div>")
    write(SITE / "gallery.md", "\n".join(lines))


def show_thumbnail(record: table_records.Record) -> str:
    """Returns a record's picture in a gallery, which leads to its paper's page."""
    result = table_records.to_result(record)
    held = sum(verdict.holds for verdict in result.verdicts)
    verdict = f"{held} of {len(result.verdicts)} claims hold"
    place = f"../papers/{name_picture(record)}"
    page = f"../papers/{record.table.id.split('/')[0]}/"
    said, title, shows = map(
        html.escape,
        (pictures.describe(result), record.table.title, record.table.shows),
    )
    return (
        f'<a href="{page}"><img src="{place}" alt="{said}" loading="lazy">'
        f"<span><b>{record.table.id}</b>: {title}: {verdict}. {shows}</span></a>"
    )


def tabulate(frame: pd.DataFrame) -> str:
    """Returns a frame as HTML without the class of pandas: the theme's are for none."""
    return render.html(frame).replace(' class="dataframe"', "")


def write_rooms() -> list[str]:
    """Writes a page for each room with the documentation of its public names."""
    names = []
    for room in pkgutil.walk_packages(hpcjax.__path__, f"{hpcjax.__name__}."):
        stub = ROOT / room.name.replace(".", "/") / "__init__.pyi"
        if not (room.ispkg and stub.exists()):
            continue
        module = importlib.import_module(room.name)
        parts = [f"# {module.__name__}", "", str(module.__doc__), ""]
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                own = vars(importlib.import_module(f"{room.name}.{node.module}"))
                # What is imported late, such as runs.Dataset, is another library's.
                for alias in (each for each in node.names if each.name in own):
                    place = f"{module.__name__}.{node.module}.{alias.name}"
                    parts += [f"## {alias.name}", "", f"::: {place}", OPTIONS]
        name = room.name.removeprefix(f"{hpcjax.__name__}.")
        write(SITE / "api" / f"{name}.md", "\n".join(parts))
        names.append(name)
    return names


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file and the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_settings(pages: dict[pathlib.Path, str], rooms: list[str]) -> None:
    """Writes the settings of MkDocs: those of the repository, and the navigation."""
    navigation = {head: [pages[path] for path in find_files(head)] for head in HEADS}
    navigation["Start"].insert(1, "gallery.md")
    navigation["API"] = [{name: f"api/{name}.md"} for name in rooms]
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | {
        "docs_dir": "docs",
        "site_dir": "site",
        "nav": [{head: below} for head, below in navigation.items()],
    }
    write(BUILD / "mkdocs.yml", yaml.safe_dump(settings, sort_keys=False))


def describe_quickstart() -> str:
    """Returns what README.md shows of the quickstart: tables, picture, origin."""
    record = read_shown("jorge/quickstart")
    origin = record.content["provenance"]
    made = f"{origin['started'][:10]} with jax {origin['versions']['jax']}"
    tables = render.render_table(table_records.to_result(record), "md")
    return f"""{tables}
{show_picture(PICTURE, table_records.to_result(record))}

Tables and picture are those of [the record]({QUICKSTART}),
made on {made}. `hpcjax report jorge/quickstart` draws the curves of your runs."""


def draw_shown() -> None:
    """Draws README.md's pictures, of the committed records."""
    for name, place in SHOWN.items():
        record = read_shown(name)
        figure = drawing.draw(table_records.to_result(record))
        if figure is not None:
            (ROOT / place).parent.mkdir(exist_ok=True)
            curves.save(
                figure, ROOT / place, [run["id"] for run in record.content["runs"]]
            )


def read_shown(name: str) -> table_records.Record:
    """Returns the committed record of a table that is made on a CPU."""
    return table_records.read_record(discover.find_tables(ROOT)[name], "cpu", ROOT)


def describe_shown() -> str:
    """Returns what README.md shows of other tables: their pictures, and where to."""
    lines = []
    for name, place in SHOWN.items():
        paper = name.split("/")[0]
        result = table_records.to_result(read_shown(name))
        if place != PICTURE:
            said = f"[{result.table.title}](experiments/{paper}/README.md):"
            lines += [said, "", show_picture(place, result), ""]
    return "\n".join(lines)


def fill(page: str) -> str:
    """Returns README.md with what is made in it."""
    filled = roster.put(page, describe_quickstart(), f"<!-- made of {QUICKSTART} -->")
    filled = roster.put(filled, describe_shown(), "<!-- made of committed records -->")
    return roster.put(filled, roster.markdown(ROOT))


def main() -> None:
    """Makes all pages anew, or what is made in README.md."""
    readme = ROOT / "README.md"
    told = fill(readme.read_text())
    if "--readme" in sys.argv[1:]:
        draw_shown()
        readme.write_text(told)
        return
    if told != readme.read_text():
        sys.exit(
            "README.md does not show what the committed records hold: "
            "python docs/build.py --readme"
        )
    shutil.rmtree(SITE, ignore_errors=True)
    pages = find_pages()
    write_pages(pages)
    write_gallery()
    shutil.copy(ROOT / "docs" / "site.css", SITE)
    rooms = write_rooms()
    write_settings(pages, rooms)
    print(f"pages: {', '.join(itertools.chain(pages.values(), rooms))}")


if __name__ == "__main__":
    main()
