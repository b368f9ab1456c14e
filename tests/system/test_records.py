"""Committed results of tables: what they claim follows from what they hold."""

import collections
import json

import pytest

from hpcjax.runs import discover, table_records
from hpcjax.runs.table_records import read_record, record_path
from tests.system.test_configs import REPOSITORY

TABLES = discover.find_tables(REPOSITORY)
RECORDS = [
    (table_id, tier)
    for table_id, table in TABLES.items()
    for tier in table.tiers
    if record_path(table, tier, REPOSITORY).exists()
]


def record(table_id, tier="cpu"):
    path = record_path(TABLES[table_id], tier, REPOSITORY)
    return json.loads(path.read_text())


@pytest.mark.parametrize(("table_id", "tier"), RECORDS)
def test_a_record_is_of_its_table(table_id, tier):
    found, defined = record(table_id, tier), TABLES[table_id].tier(tier)
    assert (found["table"], found["tier"]) == (table_id, tier)
    assert set(found["claims"]) == set(defined.claims)
    assert {run["row"] for run in found["runs"]} == set(defined.runs)


@pytest.mark.parametrize(("table_id", "tier"), RECORDS)
def test_verdicts_follow_from_cells(table_id, tier):
    """So that no verdict can be written into a record."""
    found = read_record(TABLES[table_id], tier, REPOSITORY)
    assert table_records.find_false_claims(found) == ()
    forged = json.loads(json.dumps(found.content))
    for claim in forged["claims"].values():
        claim["holds"] = not claim["holds"]
    told = table_records.find_false_claims(found._replace(content=forged))
    assert len(told) == len(forged["claims"])


def test_kfac_and_its_rivals_were_tuned_alike():
    """Five seeds, as many trials for each optimizer, and no seed tuned on.

    The claim itself, four seeds of five on digits, does not hold: acceptance check 10
    of KAISA is not claimed.
    """
    found = record("kaisa/steps")
    trials, seeds = collections.Counter(), collections.defaultdict(set)
    for run in found["runs"]:
        row, seed = run["row"], run["overrides"]["seed"]
        if run["tuning"]:
            trials[row] += 1
        else:
            seeds[row].add(seed)
        assert (seed == "1000") == run["tuning"]
    assert len(set(trials.values())) == 1
    assert {len(each) for each in seeds.values()} == {5}
