"""Every command that a page shows can be given, and names what there is."""

import contextlib
import functools
import importlib.util
import io
import pathlib
import re
import shlex
import subprocess
import tomllib

import pytest

from hpcjax.data import catalog
from hpcjax.runs import cli, directory, discover
from tests import guides

REPOSITORY = guides.REPOSITORY
README = (REPOSITORY / "README.md").read_text()
REFUSED = "optimizer.momentun=0.8"
# What `docs/own-work.md` makes is tested with its files, in `test_own_work`.
OWN = re.compile(r"mine/|halving")
RANGE = re.compile(r"(uniform|log|int|logint)\(")


def given_by(words, monkeypatch):
    """Returns what a command line hands to its command, which is not run."""
    given = {}

    def note(command):
        @functools.wraps(command)
        def stand_in(*args, **options):
            given.update(options)
            return 0

        return stand_in

    stand_ins = {name: note(command) for name, command in cli.COMMANDS.items()}
    monkeypatch.setattr(cli, "COMMANDS", stand_ins)
    assert cli.main(words) == 0, words
    return given


COMMANDS = [
    pytest.param(words[1:], id=f"{page}: {shlex.join(words[1:])}")
    for page in guides.PAGES
    for words in guides.commands(page)
    if REFUSED not in words and not OWN.search(" ".join(words))
]


@pytest.mark.smoke
def test_pages_show_commands():
    assert len(COMMANDS) > 90
    shown = ["hpcjax run train/digits optimizer=jorge", "hpcjax sweep jorge/digits"]
    lines = [shlex.join(words) for words in guides.commands("README.md")]
    assert all(any(line.startswith(each) for line in lines) for each in shown)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_a_page_can_be_given(words, monkeypatch):
    name = words[0]
    if name == "data":  # its actions run while the line is read
        action, *names = words[1:]
        assert action in ("list", "fetch")
        assert set(names) <= set(catalog.CATALOG)
        return
    given = given_by(words, monkeypatch)
    if name == "run":
        changes = dict(each.split("=", 1) for each in given["overrides"])
        assert discover.load(given["config"], changes, REPOSITORY).config
    if name == "sweep":
        pairs = [each.split("=", 1) for each in given["overrides"]]
        # The first value of a list, the lower end of a range such as `log(1e-3,1)`.
        first = {
            key: re.split(r"[(,]", text)[RANGE.match(text) is not None]
            for key, text in pairs
        }
        assert discover.load(given["config"], first, REPOSITORY).config
    if name in ("table", "confirm", "rejudge"):
        tables = discover.find_tables(REPOSITORY)
        assert all(tables[each].choose_tier(given["tier"]) for each in given["ids"])


@pytest.mark.smoke
def test_the_unknown_key_of_the_readme_is_answered_as_shown(tmp_path, monkeypatch):
    (block,) = re.findall(r"```\n\$ (hpcjax run .*?)\n(.*?)\n```", README, re.DOTALL)
    command, answer = block
    monkeypatch.chdir(tmp_path)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        code = cli.main(shlex.split(command)[1:])
    assert (code, told.getvalue().strip()) == (2, answer)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_of_the_page_on_logging_writes_what_it_says(tmp_path):
    for package in ("tensorboardX", "wandb"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"pip install {package}")
    (words,) = [w for w in guides.commands("docs/logging.md") if "--log" in w]
    small = ["train.steps=2", "train.eval_every=2", "model.width=2", "--quiet"]
    place = ["--root", str(tmp_path)]
    assert cli.main([*words[1:], *small, *place]) == 0
    (run,) = directory.list_runs(tmp_path)
    assert list((run.path / "tensorboard").rglob("events.*"))
    assert list((run.path / "wandb").glob("offline-run-*"))


def test_the_scripts_of_pages_are_there():
    """Those of the notebooks are run in `test_notebooks`."""
    for page in guides.PAGES:
        text = (REPOSITORY / page).read_text()
        for name in re.findall(r"^(?:python|marimo edit) (\S+\.py)", text, re.M):
            assert (REPOSITORY / pathlib.Path(name)).exists(), (page, name)


def test_every_python_block_of_a_guide_is_run_by_a_test():
    """A test takes all blocks of a page at once, or names their headings."""
    tests = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")]
    shown = {page for page in guides.PAGES if page.startswith("docs/")}
    idle = [page for page in shown if guides.blocks(page) and not is_run(page, tests)]
    assert idle == []


def is_run(page, tests):
    name = page.removeprefix("docs/")
    whole = re.compile(rf'guides\.(run|blocks)\("(docs/)?{re.escape(name)}"\)')
    if any(whole.search(text) for text in tests):
        return True
    headings = re.findall(r"^##+ (.*)$", (REPOSITORY / page).read_text(), re.M)
    naming = "".join(text for text in tests if f'"{name}"' in text)
    run = [
        block
        for heading in headings
        if f'"{heading}"' in naming
        for block in guides.blocks(page, re.escape(heading))
    ]
    return set(guides.blocks(page)) <= set(run)


def test_every_block_says_what_it_is():
    """Python, text, a drawing, or by saying nothing a shell's: all code is tested."""
    for page in guides.PAGES:
        text = (REPOSITORY / page).read_text()
        fences = re.findall(r"^([ \t]*)(?:```|~~~)(.*)$", text, re.M)
        assert {indent for indent, _ in fences} <= {""}, page
        kinds = {"", "python", "text", "mermaid"}
        assert {name for _, name in fences} <= kinds, page
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        assert not re.findall(r"\n\n {4,}(?![-*|] |\d\. ).*", prose), page


def test_the_python_of_pages_parses():
    for page in guides.PAGES:
        for block in guides.blocks(page):
            assert compile(block, page, "exec")


def test_a_shell_reads_the_commands_of_pages_as_they_are_written():
    """So that they can be pasted: no bracket, glob or redirection is without quotes."""
    for page in guides.PAGES:
        script = "\n".join([*guides.shell(page), *guides.lines(page)])
        read = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (read.returncode, read.stderr) == (0, ""), page
        for line in guides.lines(page):
            assert not re.search(r"[][(){}*?<>$;|~`]", guides.unquoted(line)), line


def test_what_pages_make_and_install_is_there():
    rules = re.findall(r"^([\w./-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for page in guides.PAGES:
        text = (REPOSITORY / page).read_text()
        made = re.findall(r"(?:^|`)make ([\w./-]+)", text, re.M)
        assert set(made) <= set(rules), page
        for names in re.findall(r"pip install '(?:\.|hpcjax)\[(.*?)\]'", text):
            assert set(names.split(",")) <= set(project["optional-dependencies"]), page
