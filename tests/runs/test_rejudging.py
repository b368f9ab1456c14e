"""Committed tables that are judged anew, by their cells alone."""

import dataclasses
import json
import math

import pytest

from hpcjax.core import ConfigError
from hpcjax.core.files import write_json
from hpcjax.runs import build, cli, discover, reduce, table_records
from tests.runs import papers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = papers.make(tmp_path_factory.mktemp("rejudged"))
    build.build_table("curves/holds", root=root, progress=False, record=True)
    return root


def record(root, **claims):
    """Returns the committed result, of the table with other claims if there are any."""
    table = discover.find_tables(root)["curves/holds"]
    if claims:
        tier = dataclasses.replace(table.tiers["cpu"], claims=claims)
        table = dataclasses.replace(table, tiers={"cpu": tier})
    return table_records.read_record(table, "cpu", root)


def test_claims_that_are_written_anew_follow_from_the_cells(root, capsys):
    before = record(root)
    forged = json.loads(json.dumps(before.content))
    forged["claims"] = {"fewer": {"ours": 7.0, "bound": "≤ 9", "holds": True}}
    path = table_records.record_path(before.table, "cpu", root)
    write_json(path, forged)
    assert table_records.find_false_claims(record(root))
    assert cli.main(["rejudge", "curves/holds", "--root", str(root)]) == 0
    assert "fewer steps" in capsys.readouterr().out.replace("\n", " ")
    assert record(root).content == before.content


def test_other_claims_are_judged_without_a_run(root):
    ratio = reduce.cell("ratio", "fast")
    claims = {
        "more": ratio.at_least(5.0, "more steps"),
        "fewer": ratio.at_most(0.9, "fewer steps").fails({"fast": "slow"}),
    }
    more, fewer = table_records.rejudge(record(root, **claims), root)
    assert (more.holds, fewer.holds, fewer.broken) == (False, True, (1.0,))
    held = record(root).content["claims"]
    assert held["more"] == {"ours": more.ours, "bound": "≥ 5", "holds": False}
    assert table_records.find_false_claims(record(root, **claims)) == ()


def test_cells_that_do_not_suffice_are_named_and_nothing_is_written(root):
    before = record(root).content
    absent = reduce.cell("speed", "fast").at_most(1.0, "a column of other code")
    found = reduce.cell("ratio", "fast").at_most(1.0, "there")
    claims = {"absent": absent, "control": found.fails({"fast": "slower"})}
    with pytest.raises(ConfigError, match=r"\['absent', 'control'\].*--record"):
        table_records.rejudge(record(root, **claims, there=found), root)
    assert record(root).content == before
    assert not math.isnan(found.ours(table_records.to_dataset(record(root))))
