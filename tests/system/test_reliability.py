"""The page on reliability names tests and commands that show what it says."""

import ast
import pathlib
import re

import pytest

from hpcjax.runs import cli, discover

REPOSITORY = pathlib.Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.*) \| (.*) \| (.*) \|$", PAGE, re.M)
SHOWN = [
    pytest.param(int(number), shown, id=f"{number}-{shown}")
    for number, _, shows, _ in ROWS
    for shown in re.findall(r"`([^`]+)`", shows)
]


def figures_of(test):
    """Returns the figures of which a test, `path::name`, is marked to be one."""
    path, name = test.split("::")
    module = ast.parse((REPOSITORY / path).read_text())
    (function,) = (
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return {
        argument.value
        for mark in function.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.faults"
        for argument in mark.args
        if isinstance(argument, ast.Constant)
    }


def test_all_figures_are_listed_in_order():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 30))
    assert {each.values[0] for each in SHOWN} == set(range(1, 30))


@pytest.mark.parametrize(("number", "shown"), SHOWN)
def test_what_shows_a_figure_is_there(number, shown):
    if "::" in shown:
        assert number in figures_of(shown)
    else:
        program, command, *tables = shown.split()
        assert program == "hpcjax"
        assert command in cli.COMMANDS
        assert set(tables) <= set(discover.find_tables(REPOSITORY))
