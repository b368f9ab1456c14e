"""The README's commands are commands, and the table it begins with holds."""

import pathlib
import re

import pytest

from hpcjax.runs import build, cli, commands, discover, table_commands

REPOSITORY = pathlib.Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
IDS = sorted(set(re.findall(r"hpcjax (?:run|show|table) ([a-z_]+/[\w:-]+)", README)))
COMMANDS = sorted(set(re.findall(r"hpcjax ([a-z]+)", README)) & set(cli.COMMANDS))


@pytest.mark.smoke
def test_the_readme_names_commands_that_exist():
    assert {"list", "run", "table", "report"} <= set(COMMANDS)
    quoted = re.findall(r"[`$] ?hpcjax ([a-z]+)", README)
    assert set(quoted) <= set(cli.COMMANDS)
    flags = set(re.findall(r"`(--[a-z-]+)", README))
    modules = commands, table_commands
    source = "".join(pathlib.Path(each.__file__).read_text() for each in modules)
    for flag in flags - {"--help"}:
        assert flag.removeprefix("--").replace("-", "_") in source, flag


@pytest.mark.smoke
@pytest.mark.parametrize("name", IDS)
def test_the_readme_names_configs_and_tables_that_exist(name):
    if name not in discover.find_tables(REPOSITORY):
        assert discover.load(name, {}, REPOSITORY).config


@pytest.mark.slow
def test_the_quickstart_table_holds(tmp_path):
    """All of it: a minute on two idle cores."""
    result = build.build_table("jorge/quickstart", root=tmp_path, progress=False)
    assert result.passed, result.verdicts
    assert all(run["row"] in result.dataset["row"] for run in result.runs)
