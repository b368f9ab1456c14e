"""No command prints what is wider than the terminal; in a pipe, than 100 columns.

But for what is to be copied whole: a path, an id, a command.
"""

import pytest

from hpcjax.runs import cli, execute
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
    root = roots.make_running(tmp_path_factory.mktemp("root"))
    execute.run("mine/first", root=root, quiet=True)
    return root


@pytest.mark.parametrize("columns", [None, "60"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_keeps_to_the_width(root, command, columns, monkeypatch, capsys):
    monkeypatch.chdir(root)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    run = next(root.glob("runs/*-mine-*")).name
    assert cli.main(command.format(run=run).split()) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    copied = ("directory  ", "All values: ", "Picture: ", "usage: ")
    room = int(columns or 100)
    if "--help" in command:  # tyro keeps the lines of docstrings
        room = max(room, 80)
    wide = [line for line in lines if len(line) > room]
    assert all(line.startswith(copied) for line in wide), max(wide, key=len)
