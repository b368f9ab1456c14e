"""The page: whole, balanced, escaped, and in need of nothing else."""

import html.parser
import re
import shutil

import numpy as np
import pytest
import xarray as xr
from PIL import Image

from hpcjax.core import ConfigError, Diverged
from hpcjax.core.files import read_json, write_json
from hpcjax.runs import (
    build,
    cli,
    curves,
    directory,
    execute,
    render,
    report,
    results,
    sweeps,
)
from hpcjax.runs.sweeps import driver, worker
from tests.runs import papers

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
    return folder


@pytest.fixture(scope="module")
def written(root):
    return report.write_report(["curves/holds"], root=root)


@pytest.fixture(scope="module")
def page(written):
    return Page(written.read_text())


@pytest.mark.slow
def test_it_refers_to_nothing_outside(page):
    assert page.references
    assert all(ref.startswith(("#", "data:")) for ref in page.references)
    inner = {ref[1:] for ref in page.references if ref.startswith("#")}
    assert inner <= set(page.ids)
    assert not {"script", "iframe", "img", "object", "embed"} & set(page.tags)


def test_the_list_of_runs_is_aligned(written):
    """Every line has a cell below each heading, and numbers end at the right."""
    text = written.read_text()
    (head,) = re.findall(r'<div class="columns quiet".*?</div>', text)
    headings = re.findall(r"<span[^>]*>([^<]+)</span>", head)
    assert headings == ["run", "config", "seed", "commit", "state", "goodput"]
    lines = re.findall(r'<summary class="columns">(.*?)</summary>', text, re.DOTALL)
    assert len(lines) == 4
    for line in lines:
        cells = re.sub(r'<span class="unseen">.*?</span>', "", line)
        found = re.findall(r'<(?:code|span)(?: class="(\w+)")?>[^<]*<', cells)
        assert found[:6] == ["", "quiet", "number", "", "", "number"]
    assert re.search(r'<th class="number">steps / slow&#39;s</th>', text)
    assert re.search(r"<th>row</th>", text)


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
    # The table's picture; its curves against steps, and against seconds.
    assert page.tags.count("svg") == 3
    assert 'role="img" aria-label="Fast &amp; slow' in written.read_text()
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_tables_with_runs_that_diverged(root, tmp_path):
    build.build_table("curves/fragile", root=root, progress=False)
    with pytest.raises(Diverged):
        build.build_table("curves/hopeless", root=root, progress=False)
    page = Page(report.write_report(root=root, path=tmp_path / "all.html").read_text())
    assert "curves/fragile" in page.ids
    assert "curves/hopeless" not in page.ids
    text = " ".join(page.text)
    assert re.search(r"(?<=\s)∞(?=\s)(?! \[)", text)
    assert "∞ [" not in text


def test_a_run_that_returns_single_numbers(root, tmp_path):
    """Also where one is named as a curve is."""
    done = execute.run("curves/plain", {"lr": "0.71"}, root=root, quiet=True)
    single = results.measured({"val_loss": 0.25, "accuracy": 0.5})
    results.write(single, done.directory / "result.nc", {})
    path = report.write_report([done.id], root=root, path=tmp_path / "one.html")
    assert "svg" not in Page(path.read_text()).tags
    assert [each.name for each in tmp_path.iterdir()] == ["one.html"]


def test_a_page_cannot_take_the_place_of_a_folder(root, tmp_path, capsys):
    args = ["report", "curves/holds", "--root", str(root), "--path", str(tmp_path)]
    assert cli.main(args) == 2
    assert f"{tmp_path} is a folder" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_cannot_be_reported(root, capsys):
    with pytest.raises(RuntimeError):
        execute.run("curves/plain", {"ends": "broken"}, root=root, quiet=True)
    run = directory.list_runs(root)[-1]
    assert cli.main(["report", run.id, "--root", str(root)]) == 2
    assert "has no result: it is failed" in capsys.readouterr().err


def test_nothing_to_report(tmp_path):
    with pytest.raises(ConfigError, match="nothing to report"):
        report.write_report(root=tmp_path)
    with pytest.raises(ConfigError, match="no run 'curves-none'"):
        report.write_report(["curves-none"], root=tmp_path)


def cells(page, run_id):
    """Returns the words that follow the place where a run is told in full."""
    words = [word.strip() for word in page.text if word.strip()]
    return words[words.index("Again:", words.index(run_id, words.index("Runs"))) :]


@pytest.mark.slow
def test_each_run_is_told_once_with_command_commit_and_seed(root, tmp_path):
    path = tmp_path / "two.html"
    report.write_report(["curves/holds", "curves/fails"], root=root, path=path)
    page = Page(path.read_text())
    told = [name for name in page.ids if name.startswith("run-")]
    assert len(told) == len(set(told)) == 4
    assert len(set(page.ids)) == len(page.ids)
    for name in told:
        run = directory.open_run(root, name.removeprefix("run-"))
        assert page.references.count(f"#{name}") == 2
        origin, words = read_json(run.path / "provenance.json"), cells(page, run.id)
        assert words[1] == f"hpcjax run runs/{run.id}/config.json"
        assert words[3] == origin["command"]
        assert origin["git_commit"] is None or origin["git_commit"][:10] in words[5]
        seed = run.read_config()["values"]["seed"]
        assert f", seed {seed}, on 1 of" in words[6]


@pytest.mark.slow
def test_it_begins_with_papers_and_verdicts(root, tmp_path):
    path = tmp_path / "two.html"
    report.write_report(["curves/fails", "curves/holds"], root=root, path=path)
    words = [word.strip() for word in Page(path.read_text()).text if word.strip()]
    index = words[words.index("curves") : words.index("All 4 runs")]
    assert index[:4] == ["curves", "curves/fails", "FAILS", "measured"]
    assert index[5:8] == ["curves/holds", "holds", "measured"]


@pytest.mark.slow
def test_tables_that_lack_runs_are_named(root, tmp_path):
    page = Page(report.write_report(root=root, path=tmp_path / "a.html").read_text())
    text = " ".join(page.text)
    assert "hpcjax table curves/steep --tier cpu" in text
    assert "curves/steep" not in page.ids


def test_differences_to_the_base_config(page, root):
    fast = [
        run.id
        for run in directory.list_runs(root)
        if run.read_config()["values"]["speed"] == 2.0
    ]
    words = cells(page, fast[0])
    place = words.index("here")
    assert words[place - 2 : place] == ["key", "base"]
    assert words[place + 1 : place + 7] == ["wd", "0.0", "0.125", "speed", "1.0", "2.0"]


def test_the_time_of_a_run_is_split(root, tmp_path):
    spent = {
        "spent_init_seconds": 3.0,  # of which 2 to compile
        "spent_data_seconds": 1.0,
        "spent_compute_seconds": 5.0,
        "spent_validation_seconds": 0.5,
        "spent_checkpoint_seconds": 0.5,
        "compile_seconds": 2.0,
        "lost_seconds": 2.0,
    }
    done = execute.run("curves/plain", {"lr": "0.6"}, root=root, quiet=True)
    results.write(done.dataset.assign(spent), done.directory / "result.nc", {})
    path = report.write_report([done.id], root=root, path=tmp_path / "one.html")
    words = cells(Page(path.read_text()), done.id)
    place = words.index("share")
    told = dict(zip(words[place + 1 :: 3], words[place + 3 :: 3], strict=False))
    assert told["compute"] == "41.7 %"
    assert told["init"] == "8.3 %"
    assert told["lost"] == "16.7 %"
    assert "goodput </span>41.7%" in path.read_text()


@pytest.mark.slow
def test_how_figures_came_about_is_marked(root, tmp_path):
    """Runs that were simulated mark their row among measured ones, and the table."""
    slow = [
        run
        for run in directory.list_runs(root)
        if run.read_config()["values"]["wd"] == 0.25
        and run.read_config()["name"] == "curves/plain:slow"
    ]
    kept = {run.path: (run.path / "result.nc").read_bytes() for run in slow}
    try:
        for run in slow:
            result = results.read(run.path / "result.nc")
            simulated = result.assign_attrs(source="simulated")
            results.write(simulated, run.path / "result.nc", {})
            run.seal()
        path = tmp_path / "mixed.html"
        report.write_report(["curves/holds"], root=root, path=path)
    finally:
        for folder, content in kept.items():
            (folder / "result.nc").write_bytes(content)
            directory.RunDirectory(folder).seal()
    words = [word.strip() for word in Page(path.read_text()).text if word.strip()]
    assert words.count("simulated, measured") == 2  # the index, and the table's head
    edge, head, *shown = words[words.index("steps / slow's") + 1 :]
    assert (edge, head) == ("at the edge of the grid", "source")
    # The row that was tuned, to the least of its two decays.
    assert (shown[0], shown[4:6]) == ("slow", ["wd=0.25", "simulated"])
    assert shown[6:11:4] == ["fast", "measured"]


def test_a_run_of_several_sessions_and_devices(root, tmp_path):
    done = execute.run("curves/plain", {"lr": "0.65"}, root=root, quiet=True)
    path = done.directory / "provenance.json"
    first = {**read_json(path), "git_commit": "a" * 40, "git_dirty": None}
    second = {**first, "git_commit": "b" * 40, "git_dirty": "c", "used_devices": 2}
    write_json(path, {**second, "devices": {"H200": 8}, "earlier": [first]})
    page = Page(
        report.write_report(
            [done.id], root=root, path=tmp_path / "one.html"
        ).read_text()
    )
    words = cells(page, done.id)
    assert words[1] == f"hpcjax run runs/{done.id}/config.json --devices 2"
    assert words[5] == f"{'a' * 10}, {'b' * 10}+"
    assert "on 2 of 8 H200, in 2 sessions" in words[6]


def test_a_config_that_is_no_longer_known(root, tmp_path):
    done = execute.run("curves/plain", {"lr": "0.66"}, root=root, quiet=True)
    path = done.directory / "config.json"
    write_json(path, {**read_json(path), "class": "experiments.curves.gone:Config"})
    path = report.write_report([done.id], root=root, path=tmp_path / "one.html")
    assert "cannot be compared with its base" in path.read_text()


@pytest.mark.slow
def test_fifty_runs_are_less_than_five_megabytes(root, tmp_path):
    """Whatever their length: what one run adds to a page is bounded."""
    sizes = {}
    for steps in ("300", "3000"):
        done = execute.run(
            "curves/plain", {"train.steps": steps}, root=root, quiet=True
        )
        path = report.write_report([done.id], root=root, path=tmp_path / "one.html")
        sizes[steps] = path.stat().st_size
    assert sizes["3000"] < min(1.5 * sizes["300"], 5e6 / 50)


@pytest.mark.slow
def test_rows_of_several_tasks_have_a_picture_each(root, tmp_path):
    history = results.over_seeds(
        {0: results.read(directory.list_runs(root)[0].path / "result.nc")}
    )
    page = report._Page(root, tmp_path / "page.html", "cpu")
    rows = {"a/x": history, "a/y": history, "b/x": history, "c/x": history[["loss"]]}
    drawn = page.figures(rows, "paper/table")
    assert [figure["title"] for figure in drawn] == ["paper/table/a", "paper/table/b"]
    assert all(len(figure["panels"]) == 2 for figure in drawn)
    assert {path.name for path in tmp_path.iterdir()} == {
        "paper-table-a.png",
        "paper-table-b.png",
    }


def test_the_text_of_pictures_has_the_colour_of_the_page(root):
    history = results.over_seeds(
        {0: results.read(directory.list_runs(root)[0].path / "result.nc")}
    )
    first, second = (
        curves.inline(curves.draw({"0.12345": history, "b": history}), name)
        for name in ("one", "two")
    )
    assert "currentColor" in first
    assert not re.search("#000000|#ffffff|<style|<metadata|font-family", first)
    assert ">0.12345</text>" in first
    inner = [set(re.findall(r' id="([^"]*)"', text)) for text in (first, second)]
    assert inner[0]
    assert not inner[0] & inner[1]
    assert set(re.findall(r"(?:url\(|href=\")#(\w+)", first)) <= inner[0]


def make_sweep(root, name, sampler="grid", **varied):
    axes, fixed = sweeps.parse(varied)
    options = {"sampler": sampler, "trials": None if sampler == "grid" else 3}
    sweep = sweeps.Sweep(
        config="curves/plain", axes=tuple(axes), overrides=fixed, **options
    )
    return sweeps.create_study(name, sweep, root)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "halton"])
def test_a_sweep_that_is_asked_for(root, tmp_path, sampler):
    rates = {"grid": "0.01,0.1,1.0,1000.0", "halton": "log(1e-3,10)"}
    study = make_sweep(root, sampler, sampler, lr=rates[sampler], wd="0.25,0.5")
    path = tmp_path / "sweep.html"
    with pytest.raises(ConfigError, match=f"sweep {sampler} has not finished"):
        report.write_report([sampler], root=root, path=path)
    worker.work(sampler, root)
    driver._collect(study, root)
    report.write_report([sampler], root=root, path=path)
    page = Page(path.read_text())
    assert f"sweep-{sampler}" in page.ids
    assert page.tags.count("svg") == 1
    assert {p.name for p in tmp_path.iterdir()} == {
        "sweep.html",
        f"sweep-{sampler}.png",
    }
    words = [word.strip() for word in page.text if word.strip()]
    best = words[words.index("Best trials") :]
    ranking = sweeps.ranking(sweeps.gather(study, root))
    first = ranking.iloc[0]
    assert best[1:5] == ["lr", "wd", "val_loss", "run"]
    assert best[8:12] == [
        render.cell(float(first["lr"])),
        render.cell(float(first["wd"])),
        render.cell(float(first["value"])),
        first["run"],
    ]
    assert all(f"#run-{run}" in page.references for run in ranking["run"])
    if sampler == "grid":
        assert words.count("diverged") == 4  # two trials, each also in the list of runs
    assert all(ref.startswith(("#", "data:")) for ref in page.references)


def test_texts_of_a_sweep_are_no_formulas():
    texts = [r"$\frac{a$", "$x$", "a$b", r"\$5$"]
    values = np.arange(8.0).reshape(4, 2)
    dataset = xr.Dataset(
        {"value": (("tag", "lr"), values)},
        coords={"tag": texts, "lr": [0.1, 100.0]},
        attrs={"axes": "tag lr", "by": "val_loss"},
    )
    figure = sweeps.draw(dataset)
    text = curves.inline(figure, "sweep")
    for each in texts:
        assert text.count(f">{each}</text>") == 2  # its panel, and the map
    assert curves.encode(figure, "png")


def test_a_sweep_whose_runs_were_deleted(root, tmp_path):
    study = make_sweep(root, "cut", lr="0.31,0.32")
    worker.work("cut", root)
    gone = study.trials()[0].run
    shutil.rmtree(root / "runs" / gone)
    page = Page(
        report.write_report(["cut"], root=root, path=tmp_path / "a.html").read_text()
    )
    assert f"#run-{gone}" not in page.references
    assert "deleted" in page.text


def test_without_ids_all_that_has_finished_is_told_and_tables_fold_their_runs(
    root, tmp_path
):
    made_in, root = root, papers.make(tmp_path)
    made = build.build_table("curves/holds", root=made_in, progress=False)
    alone = execute.run("curves/plain", {"wd": "0.125"}, root=root, quiet=True)
    page = Page(report.write_report(root=root).read_text())
    assert alone.id in page.ids
    for run in made.runs:
        shutil.copytree(made_in / "runs" / run["id"], root / "runs" / run["id"])
    make_sweep(root, "waits", lr="0.01,0.1")
    make_sweep(root, "mine", lr="0.3,0.2")
    worker.work("mine", root)
    text = report.write_report(root=root).read_text()
    page = Page(text)
    first, second, third = (
        page.ids.index(each) for each in ("curves/holds", "sweep-mine", alone.id)
    )
    assert first < second < third
    assert "sweep waits has not finished" in text
    own = {run["id"] for run in made.runs}
    assert not own & {*page.ids}
    reported = sum(not run["tuning"] for run in made.runs)
    assert any(
        f"{reported} runs of curves/{name}" in text for name in ("holds", "fails")
    )
    assert "2 runs of mine" in text
    assert "jorge/quickstart" not in text  # of which there is no run
