"""The report as a browser sees it: no error, and no wider than a telephone.

Chromium's own flags do it: what a script in a copy of the page finds out is read from
the page that `--dump-dom` prints.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from hpcjax.runs import build, directory, execute, report, results
from tests.runs import papers

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here: `apt-get install chromium`"
    ),
    pytest.mark.slow,
]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
# A frame is as narrow as it is made; a window is not, below 500 pixels.
FRAME = """<!doctype html><iframe id="f" style="width: {width}px; height: 800px"
frameborder="0" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{
  const page = document.getElementById("f").contentDocument;
  page.querySelectorAll("details").forEach((each) => (each.open = true));
  const widths = [page.documentElement.clientWidth, page.documentElement.scrollWidth];
  const wide = [...page.querySelectorAll("table")].map((each) => each.offsetWidth);
  document.title = JSON.stringify({{ widths, widest: Math.max(...wide) }});
}});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = papers.make(tmp_path_factory.mktemp("browser"))
    build.build_table("curves/holds", root=root, progress=False)
    spent = {"spent_compute_seconds": 5.0, "compile_seconds": 2.0, "lost_seconds": 2.0}
    run = execute.run("curves/plain", {"lr": "0.6"}, root=root, quiet=True)
    results.write(run.dataset.assign(spent), run.directory / "result.nc", {})
    return report.write_report(["curves/holds", run.id], root=root)


def browse(address, folder):
    """Returns the page as it stands after loading, and what its console says."""
    arguments = (*FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", address)
    done = subprocess.run(
        [CHROMIUM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_it_opens_without_errors(page, tmp_path):
    seen, console = browse(page.as_uri(), tmp_path)
    assert console == []
    assert "<h1>hpcjax report</h1>" in seen
    assert seen.count("</section>") == page.read_text().count("</section>")


def test_errors_would_be_seen(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text() + "<script>missing()</script>")
    _, console = browse(broken.as_uri(), tmp_path)
    assert len(console) == 1
    assert "missing is not defined" in console[0]


def found(text, width, folder):
    outer = folder / f"{width}.html"
    outer.write_text(FRAME.format(width=width, page=html.escape(text)))
    seen, console = browse(outer.as_uri(), folder)
    assert console == []
    (title,) = re.findall("<title>(.*?)</title>", seen)[:1]
    return json.loads(html.unescape(title))


@pytest.mark.parametrize("width", [360, 1200])
def test_it_scrolls_only_within_its_boxes(page, tmp_path, width):
    told = found(page.read_text(), width, tmp_path)
    assert told["widths"] == [width, width]
    if width == 360:  # or nothing was asked of the boxes
        assert told["widest"] > width


def test_a_page_that_is_too_wide_would_be_seen(page, tmp_path):
    wide = page.read_text().replace("overflow-x: auto", "overflow-x: visible")
    assert found(wide, 360, tmp_path)["widths"][1] > 360


def test_a_link_to_a_run_opens_it(page, tmp_path):
    root = page.parents[1]
    run = directory.list_runs(root)[-1]
    assert '<details class="run" open="">' not in browse(page.as_uri(), tmp_path)[0]
    seen, _ = browse(f"{page.as_uri()}#run-{run.id}", tmp_path)
    (opened,) = re.findall(
        r'<details class="run" open=""><summary[^>]*><code>([^<]*)', seen
    )
    assert opened == run.id
