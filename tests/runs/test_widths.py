"""No command prints what is wider than the terminal; in a pipe, than 100 columns."""

import pytest

from hpcjax.runs import cli
from tests.runs import roots

COMMANDS = [
    *(f"{command} --help" for command in cli.COMMANDS),
    "--help",
    "list",
    "list jorge",
    "list --all",
    "list --parts",
    "list --parts optimizer",
    "list loop --stale",
    "list --runs",
    "show jorge/digits:sgd",
    "show hammingmesh/networks",
    "show mine/first:second",
    "show mine/holds",
    "run mine/first",
    "run mine/first --dry-run",
    "table mine/holds",
    "rejudge jorge/quickstart",
    "verify {run}",
    "diff mine/first:first mine/first:second",
    "data list",
    "doctor",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return roots.make_running(tmp_path_factory.mktemp("root"))


@pytest.mark.parametrize("columns", [None, "80", "100"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_keeps_to_the_width(root, command, columns, monkeypatch, capsys):
    monkeypatch.chdir(root)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    runs = [path.name for path in root.glob("runs/*")] or ["none"]
    assert cli.main(command.format(run=runs[0]).split()) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    if "--help" in command and lines[0].startswith("usage: "):
        del lines[0]  # which tyro does not wrap
    assert lines
    assert max(map(len, lines)) <= int(columns or 100), max(lines, key=len)
