"""The page: whole, balanced, escaped, and in need of nothing else."""

import html.parser
import pathlib
import re

import pytest
from PIL import Image

from hpcjax.core import ConfigError, Diverged
from hpcjax.runs import build, cli, directory, discover, execute, report
from tests.runs import papers

REPOSITORY = pathlib.Path(__file__).parents[2]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(html.parser.HTMLParser):
    """Collects text and references; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.references, self.ids = [], [], [], []
        self.text = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        # An XML name space looks like an address, and is none.
        named = [(name, value) for name, value in attrs if not name.startswith("xmlns")]
        self.references += [
            value
            for name, value in named
            if name.endswith(("href", "src", "data", "action"))
        ]
        self.references += [inner for _, value in named for inner in urls(value or "")]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] == "style":
            assert "@import" not in data
            self.references += urls(data)


def urls(text):
    return re.findall(r"url\(['\"]?([^)'\"]*)", text)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = papers.make(tmp_path_factory.mktemp("report"))
    build.build_table("curves/holds", root=folder, progress=False)
    yield folder
    discover.activate(REPOSITORY)


@pytest.fixture(scope="module")
def written(root):
    return report.write_report(["curves/holds"], root=root)


@pytest.fixture(scope="module")
def page(written):
    return Page(written.read_text())


def test_it_refers_to_nothing_outside(page):
    assert page.references
    assert all(ref.startswith("#") or ref == "data:," for ref in page.references)
    inner = {ref[1:] for ref in page.references if ref.startswith("#")}
    assert inner <= set(page.ids)
    assert not {"script", "iframe", "img", "object", "embed"} & set(page.tags)


def test_it_shows_values_and_verdicts(page):
    text = " ".join(page.text)
    for part in (
        "curves/holds",
        "hpcjax table curves/holds --tier cpu",
        "measured",
        "best loss",
        "steps / slow's",
        "fast <needs> fewer steps",
        "≤ 0.9",
        "holds",
        "none <given>",
        'a "drawn" curve',
    ):
        assert part in text, part


def test_it_shows_configs_and_provenance_of_reported_runs(page, root):
    text = " ".join(page.text)
    reported = [
        run.id
        for run in directory.list_runs(root)
        if run.read_config()["values"]["seed"] != 1000
    ]
    assert len(reported) == 4
    for run_id in reported:
        assert f"hpcjax run runs/{run_id}/config.json" in text
    assert text.count('"config_digest"') == 4
    assert text.count('"jaxlib"') == 4
    assert text.count('"speed": 2.0') == 2


def test_curves_are_inside_and_beside_it(page, written):
    assert page.tags.count("svg") == 1
    with Image.open(written.with_name("curves-holds.png")) as image:
        assert image.format == "PNG"
        image.verify()


def test_text_is_escaped(written):
    text = written.read_text()
    assert "fast &lt;needs&gt; fewer steps" in text
    assert "Fast &amp; slow" in text
    assert "<needs>" not in text


def test_its_repeat_command_works(root, page):
    run = directory.list_runs(root)[-1]
    again = execute.run(f"runs/{run.id}/config.json", root=root, quiet=True)
    mine = directory.open_run(root, again.id).read_config()
    assert mine["values"] == run.read_config()["values"]


def test_single_runs_can_be_reported(root, tmp_path):
    done = execute.run("curves/plain", {"lr": "0.7"}, root=root, quiet=True)
    path = tmp_path / "new" / "one.html"
    assert report.write_report([done.id], root=root, path=path) == path
    page = Page(path.read_text())
    assert '"lr": 0.7' in " ".join(page.text)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        f"{done.id}.png",
        "one.html",
    ]


def test_by_default_it_holds_what_has_finished(root, tmp_path, capsys):
    path = tmp_path / "all.html"
    args = ["report", "--root", str(root), "--path", str(path)]
    assert cli.main(args) == 0
    assert capsys.readouterr().out == f"{path}\n"
    page = Page(path.read_text())
    assert "curves/holds" in page.ids
    # the same runs as those of `holds`
    assert "curves/fails" in page.ids
    assert "curves/steep" not in page.ids


def test_tables_with_runs_that_diverged(root, tmp_path):
    build.build_table("curves/fragile", root=root, progress=False)
    with pytest.raises(Diverged):
        build.build_table("curves/hopeless", root=root, progress=False)
    page = Page(report.write_report(root=root, path=tmp_path / "all.html").read_text())
    assert "curves/fragile" in page.ids
    assert "curves/hopeless" not in page.ids
    text = " ".join(page.text)
    assert "∞ [∞, ∞]" in text


def test_an_unfinished_run_cannot_be_reported(root, capsys):
    with pytest.raises(RuntimeError):
        execute.run("curves/plain", {"ends": "broken"}, root=root, quiet=True)
    run = directory.list_runs(root)[-1]
    assert cli.main(["report", run.id, "--root", str(root)]) == 2
    assert "has no result: it is failed" in capsys.readouterr().err


def test_nothing_to_report(tmp_path):
    try:
        with pytest.raises(ConfigError, match="nothing to report"):
            report.write_report(root=tmp_path)
        with pytest.raises(ConfigError, match="no run 'curves-none'"):
            report.write_report(["curves-none"], root=tmp_path)
    finally:
        discover.activate(REPOSITORY)
