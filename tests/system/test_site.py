"""The site's pages: links rewritten, every page in the navigation, records shown."""

import importlib.util
import pathlib
import re
from xml.etree import ElementTree

import pytest
import yaml
from PIL import Image

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """`docs/build.py`, which writes into a temporary folder."""
    spec = importlib.util.spec_from_file_location(
        "site_build", REPOSITORY / "docs" / "build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    monkeypatch.setattr(module, "SITE", tmp_path / "docs")
    return module


def rewritten(build, text, source="README.md"):
    return build.rewrite_links(text, REPOSITORY / source, build.find_pages())


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[a](docs/kfac.md)", "[a](guides/kfac.md)"),
        ("README.md", "[`a`](docs/kfac.md#notes)", "[`a`](guides/kfac.md#notes)"),
        ("README.md", "[a](experiments/lm/README.md)", "[a](papers/lm.md)"),
        ("docs/kfac.md", "[a](house.md)", "[a](house.md)"),
        ("docs/kfac.md", "[a](../CONTRIBUTING.md)", "[a](../contributing.md)"),
        (
            "experiments/lm/README.md",
            "[a](../../docs/language-models.md)",
            "[a](../guides/language-models.md)",
        ),
        ("README.md", "[a](https://x.org/b)", "[a](https://x.org/b)"),
        ("README.md", "[a](mailto:a@x.org)", "[a](mailto:a@x.org)"),
        ("README.md", "[a](#below)", "[a](#below)"),
        # A file that is no page leaves its text; code is no link.
        ("README.md", "see [the makefile](Makefile)", "see the makefile"),
        ("README.md", "`[a](gone.md)`", "`[a](gone.md)`"),
        ("README.md", "```\n[a](gone.md)\n```", "```\n[a](gone.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(build, source, link, expected):
    assert rewritten(build, link, source) == (expected, [])


def test_pictures_come_along(build):
    picture = REPOSITORY / "docs" / "quickstart.png"
    text, shown = rewritten(build, "![a](docs/quickstart.png)")
    assert (text, shown) == ("![a](guides/quickstart.png)", [picture])


@pytest.mark.parametrize("link", ["[a](docs/gone.md)", "![a](gone.png#b)"])
def test_a_dead_link_ends_the_build(build, link):
    target = link[link.index("(") + 1 : -1]
    with pytest.raises(
        SystemExit, match=re.escape(f"README.md: dead link to {target}")
    ):
        rewritten(build, link)


@pytest.fixture
def settings(build, tmp_path):
    build.write_settings(build.find_pages(), ["optim", "runs"])
    return yaml.safe_load((tmp_path / "mkdocs.yml").read_text())


def list_targets(navigation):
    for entry in navigation:
        held = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [held] if isinstance(held, str) else list_targets(held)


def test_every_page_is_in_the_navigation_once(build, settings):
    targets = list(list_targets(settings["nav"]))
    assert len(set(targets)) == len(targets)
    rooms = {"api/optim.md", "api/runs.md"}
    assert set(targets) == {*build.find_pages().values(), *rooms, "gallery.md"}


def written(folder, readme, **guides):
    (folder / "docs").mkdir()
    (folder / "README.md").write_text(readme)
    for name, text in guides.items():
        (folder / "docs" / f"{name}.md").write_text(text)


def test_heads_are_what_a_reader_wants(settings):
    heads = [head for entry in settings["nav"] for head in entry]
    assert heads[:2] == ["Start", "Compose in your own code"]
    assert heads[-2:] == ["Reliability", "API"]
    assert settings["nav"][0]["Start"][0] == "index.md"


@pytest.mark.parametrize(
    ("page", "placed"),
    [
        ("# A\n\n## Use it\nso\n", "# A\n\n## What came out\nR\n\n## Use it\nso\n"),
        (
            "# A\n\n## Use it\n\n## What came out\n\nlong\n",
            "# A\n\n## Use it\n\n## What came out\nR\n\nlong\n",
        ),
        ("# A\n", "# A\n## What came out\nR\n\n"),
    ],
)
def test_records_stand_above_what_is_said_of_them(build, page, placed):
    assert build.put_records(page, ["R"]) == placed
    assert build.put_records(page, []) == page


def test_what_is_first_below_tables_is_a_paper(build):
    first, *_, last = build.find_files("Tables and papers")
    assert (first.parent.parent.name, last.name) == ("experiments", "gpu.md")


def test_every_page_begins_with_a_heading_which_is_its_title(build):
    for path in build.find_pages():
        assert path.read_text().startswith("# "), path


def test_a_guide_under_no_head_ends_the_build(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "HEADS", {"Start": ("README.md", "docs/two.md")})
    written(tmp_path, "# All\n", two="# A\n")
    assert list(build.find_pages().values()) == ["index.md", "guides/two.md"]
    (tmp_path / "docs" / "one.md").write_text("# Z\n")
    with pytest.raises(SystemExit, match=r"docs/one\.md must stand under a head"):
        build.find_pages()


@pytest.fixture
def readme(build, monkeypatch, tmp_path):
    """A README.md in which all that is made is older than the records."""
    shown = "<!-- made of committed records -->"
    begins = build.roster.BEGIN, f"<!-- made of {build.QUICKSTART} -->", shown
    parts = (f"{begin}\n\nold\n\n{build.roster.END}\n" for begin in begins)
    written(tmp_path, "\n".join(["# All\n", *parts]))
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build.roster, "markdown", lambda root: "| new |")
    monkeypatch.setattr(build, "describe_quickstart", lambda: "| first |")
    monkeypatch.setattr(build, "draw_shown", lambda: None)
    monkeypatch.setattr(build, "describe_shown", lambda: "a picture")
    return tmp_path / "README.md"


def test_an_old_table_of_the_readme_ends_the_build(build, readme, monkeypatch):
    monkeypatch.setattr(build.sys, "argv", ["build.py"])
    with pytest.raises(SystemExit, match=r"python docs/build\.py --readme"):
        build.main()


def test_what_is_made_in_the_readme_is_written(build, readme, monkeypatch):
    monkeypatch.setattr(build.sys, "argv", ["build.py", "--readme"])
    build.main()
    text = readme.read_text()
    assert text.index("| new |") < text.index("| first |") < text.index("a picture")
    assert "old" not in text
    assert text.startswith("# All")


def test_the_readme_shows_what_the_records_hold(build):
    """If not: `python docs/build.py --readme`."""
    page = (REPOSITORY / "README.md").read_text()
    assert build.fill(page) == page
    assert page.count(build.render.render_table(quickstart(build), "md")) == 1


def quickstart(build):
    return build.table_records.to_result(build.read_shown("jorge/quickstart"))


def test_pictures_of_the_readme_are_drawn_of_records(build, monkeypatch, tmp_path):
    """Without any run; they are those that the page shows."""
    records = {name: build.read_shown(name) for name in build.SHOWN}
    monkeypatch.setattr(build, "read_shown", records.get)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    build.draw_shown()
    page = (REPOSITORY / "README.md").read_text()
    for place in build.SHOWN.values():
        assert f"]({place})" in page
        with Image.open(tmp_path / place) as new, Image.open(REPOSITORY / place) as old:
            assert new.size == old.size


def test_pictures_are_read_in_the_dark(settings):
    """The theme's dark scheme is there, and the rule that turns pictures names it."""
    schemes = [each["scheme"] for each in settings["theme"]["palette"]]
    assert schemes[0] == "default"
    style = (REPOSITORY / "docs" / settings["extra_css"][0]).read_text()
    (dark,) = re.findall(
        r'\[data-md-color-scheme="(\w+)"\][^{]* img \{[^}]*invert', style
    )
    assert dark in schemes[1:]


def test_every_public_name_is_listed_once(build):
    rooms = build.write_rooms()
    assert {"optim", "optim.kfac", "runs"} <= set(rooms)
    for room in rooms:
        text = (build.SITE / "api" / f"{room}.md").read_text()
        for kind in (r"^## (\w+)$", r"^::: (\S+)$"):
            names = re.findall(kind, text, re.M)
            assert len(set(names)) == len(names), (room, kind)


def test_a_papers_page_shows_its_records(build):
    text = "\n".join(build.describe_records("jorge"))
    pictures = re.findall(r"\]\((pictures/[^)]+\.svg)\)", text)
    assert "pictures/jorge-quickstart.cpu.svg" in pictures
    assert all((build.SITE / "papers" / name).exists() for name in pictures)
    assert "**The paper**: arXiv 2310.12298: time per iteration" in text
    assert build.describe_records("of nobody") == []


def test_a_record_is_shown_with_its_cells_and_verdicts(build):
    text = "\n".join(build.describe_record(build.read_shown("jorge/quickstart")))
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    result = quickstart(build)
    frames = build.render.values(result), build.render.verdicts(result.verdicts)
    for shown, frame in zip(map(ElementTree.fromstring, tables), frames, strict=True):
        assert [cell.text for cell in shown.iter("th")] == list(frame.columns)
        cells = [[cell.text for cell in row] for row in shown.find("tbody")]
        assert cells == frame.values.tolist()
        assert not shown.get("class")
    assert "measured, by `hpcjax table jorge/quickstart` on 2026-" in text
    assert result.table.caption in text
