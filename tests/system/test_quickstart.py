"""The README's commands are commands, and the table it begins with is the record."""

import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from hpcjax.runs import (
    build,
    cli,
    commands,
    discover,
    list_commands,
    table_commands,
    table_records,
)

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
    modules = commands, list_commands, table_commands
    source = "".join(pathlib.Path(each.__file__).read_text() for each in modules)
    for flag in flags - {"--help"}:
        assert flag.removeprefix("--").replace("-", "_") in source, flag


@pytest.mark.smoke
@pytest.mark.parametrize("name", IDS)
def test_the_readme_names_configs_and_tables_that_exist(name):
    if name not in discover.find_tables(REPOSITORY):
        assert discover.load(name, {}, REPOSITORY).config


def test_the_readmes_code_runs_as_it_stands(tmp_path, monkeypatch):
    """But for the number of steps."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block.replace('"200"', '"12"'), names)
    assert names["logits"].shape == (8, 10)
    assert names["result"].dataset.sizes["step"] == 12


@pytest.fixture(scope="module")
def recorded():
    table = discover.find_tables(REPOSITORY)["jorge/quickstart"]
    return table_records.read_record(table, "cpu", REPOSITORY)


@pytest.mark.smoke
def test_the_readmes_picture_is_of_the_committed_quickstart(recorded):
    with Image.open(REPOSITORY / "docs" / "quickstart.png") as picture:
        drawn = picture.info["Description"].split()
    new = "`python docs/build.py --readme` draws it of the record"
    assert drawn == [run["id"] for run in recorded.content["runs"]], new


@pytest.mark.smoke
def test_rows_of_the_quickstart_have_the_same_seeds(recorded):
    seeds = {}
    for run in recorded.content["runs"]:
        seeds.setdefault(run["row"], []).append(run["overrides"]["seed"])
    assert list(seeds) == ["sgd", "adamw", "shampoo", "jorge"]
    assert all(each == [*map(str, range(20, 32))] for each in seeds.values())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_can_be_made(tmp_path):
    """All of it: a minute on two idle cores, more as programs are compiled here."""
    result = build.build_table("jorge/quickstart", root=tmp_path, progress=False)
    assert all(run["row"] in result.dataset["row"] for run in result.runs)
    assert np.isfinite(result.dataset["steps_by_seed"]).all()
    assert float(result.dataset["ratio"].sel(row="jorge")) < 1.0
    (verdict,) = result.verdicts
    assert verdict.ours == float(result.dataset["ratio_high"].sel(row="jorge"))
