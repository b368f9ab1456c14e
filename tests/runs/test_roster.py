"""The table of papers is made of their folders, and README.md holds it as it is."""

import json

import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.runs import cli, roster
from tests import guides
from tests.runs import roots

TABLES = """
from hpcjax.runs.tables import Claim, Runs, Table, Tier

def tier(*claims):
    claim = Claim(relation="more", ours=lambda t: t.answer.item(), at_least=1.0)
    runs = {"only": Runs(config="mine/first:first")}
    return Tier(runs=runs, claims=dict.fromkeys(claims, claim), minutes=0.1)

def table(name, **tiers):
    return Table(id=f"mine/{name}", title="Answers", paper="none", tiers=tiers,
                 reduce=None, columns={"answer": "the answer"})

FIRST = table("first", cpu=tier("enough", "more"))
TIMED = table("timed", cpu=tier("fast"), gpu=tier("fast"))
"""
README = """\
# Mine (Here 2026)

All that is [mine](../../docs/mine.md), and what
[came out](#what-came-out). In `optim`, `runs`.

More of it.

## What came out
"""


@pytest.fixture
def root(tmp_path):
    roots.write(tmp_path, "experiments/mine/tables.py", TABLES)
    roots.write(tmp_path, "experiments/mine/README.md", README)
    return tmp_path


def commit(root, name, **holds):
    empty = {"cells": {}, "columns": {}, "labels": {}, "provenance": {}, "tuned": {}}
    claims = {claim: {"holds": held} for claim, held in holds.items()}
    record = {**empty, "runs": [], "claims": claims}
    roots.write(root, f"experiments/mine/results/{name}.json", json.dumps(record))


def row(root):
    lines = roster.markdown(root, "mine").splitlines()
    heads, _, cells = ([each.strip() for each in x.split("|")[1:-1]] for x in lines)
    return dict(zip(heads, cells, strict=True))


def test_a_paper_is_listed_with_what_its_readme_says(root):
    page = "experiments/mine/README.md"
    assert row(root) == {
        "system": f"[Mine]({page}) (Here 2026). All that is [mine](docs/mine.md), and "
        f"what [came out]({page}#what-came-out).",
        "where": "`optim`, `runs`",
        "tables": "`mine/first` `mine/timed`",
        "tier": "cpu; gpu: timed",
        "status": "not recorded: `mine/first`, `mine/timed` (cpu), `mine/timed` (gpu)",
    }


def test_claims_are_counted_and_those_that_fail_named(root):
    commit(root, "first.cpu", enough=True, more=True)
    absent = "not recorded: `mine/timed` (cpu), `mine/timed` (gpu)"
    assert row(root)["status"] == f"all 2 claims hold; {absent}"
    commit(root, "first.cpu", enough=True, more=False)
    commit(root, "timed.cpu", fast=False)
    commit(root, "timed.gpu", fast=True)
    link = "[fails](experiments/mine/README.md#what-came-out)"
    assert row(root)["status"] == (
        f"2 of 4 claims hold; `mine/first` {link}: 1 of 2; `mine/timed` (cpu) {link}"
    )


def test_a_paper_without_a_readme_has_the_name_of_its_folder(root):
    (root / "experiments/mine/README.md").unlink()
    commit(root, "first.cpu", enough=False, more=True)
    assert row(root)["system"] == "mine"
    assert "`mine/first` fails: 1 of 2" in row(root)["status"]


def test_a_readme_without_a_heading_is_refused(root):
    roots.write(root, "experiments/mine/README.md", "Mine.\n")
    with pytest.raises(ConfigError, match=r"must begin with '# Name \(venue\)'"):
        roster.markdown(root, "mine")


def test_the_command_prints_it_without_cutting_lines(root, capsys):
    words = ["list", "mine", "--markdown", "--root", str(root)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{roster.markdown(root, 'mine')}\n"
    assert cli.main([*words[:1], "mime", *words[2:]]) == 2


def test_a_page_without_markers_is_refused():
    with pytest.raises(ConfigError, match="the page has no lines"):
        roster.put("# All\n", "| new |")


def test_the_table_of_the_readme_is_the_one_that_is_made():
    """If not: `python docs/build.py --readme`."""
    page = (guides.REPOSITORY / "README.md").read_text()
    assert roster.put(page, roster.markdown(guides.REPOSITORY)) == page
