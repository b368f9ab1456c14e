"""Committed results of tables: what they claim follows from what they hold."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from hpcjax.runs import discover, table_records
from hpcjax.runs.table_records import read_record, record_path
from hpcjax.runs.tables import judge
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


@pytest.mark.parametrize("table_id", TABLES)
def test_every_claim_has_a_negative_control(table_id):
    for tier in TABLES[table_id].tiers.values():
        assert [name for name, claim in tier.claims.items() if not claim.controls] == []


@pytest.mark.parametrize(("table_id", "tier"), RECORDS)
def test_verdicts_follow_from_cells_and_fail_for_controls(table_id, tier, monkeypatch):
    """No verdict can be written into a record.

    A trivial row may pass, as what is true of it: the claim then fails. And a bound is
    drawn along the axis of its claim's number.
    """
    table, defined = TABLES[table_id], TABLES[table_id].tier(tier)
    found = read_record(table, tier, REPOSITORY)
    dataset = table_records.to_dataset(found)
    verdicts = judge(defined, dataset)  # once, for it takes long
    monkeypatch.setattr(table_records, "judge", lambda *_: verdicts)
    assert table_records.find_false_claims(found) == ()
    forged = json.loads(json.dumps(found.content))
    for claim in forged["claims"].values():
        claim["holds"] = not claim["holds"]
    told = table_records.find_false_claims(found._replace(content=forged))
    assert len(told) == len(forged["claims"])

    trivial = defined.trivial.rows if defined.trivial else ()
    for verdict in verdicts:
        if getattr(table.picture, "bound", None) == verdict.name:
            assert is_drawn(verdict.ours, table, dataset), verdict
        for control, broken in zip(verdict.controls, verdict.broken, strict=True):
            assert not math.isnan(broken), verdict
            if defined.claims[verdict.name].holds(broken):
                assert set(control.rows.values()) <= set(trivial), verdict
                assert not verdict.holds, verdict


def is_drawn(number, table, dataset):
    """Whether a number is a cell of the columns, and their ends, in a picture."""
    drawn = [
        dataset[name + end].values.ravel()
        for name in table.picture.names()
        for end in ("", "_low", "_high")
        if name + end in dataset
    ]
    return np.isclose(np.concatenate(drawn), number, rtol=1e-6).any()


def lose(table, column, rows):
    """The table without some of a column's cells."""
    held = table[column].values.astype(float)
    held[rows] = math.nan
    return table.assign({column: (table[column].dims, held)})


def count(tier, claim, table):
    """The number of one claim."""
    own = {claim: dataclasses.replace(tier.claims[claim], controls=())}
    (verdict,) = judge(dataclasses.replace(tier, claims=own, trivial=None), table)
    return verdict.ours


@pytest.mark.parametrize(
    ("table_id", "tier", "claim", "column", "row"),
    [
        ("chai/elbow", "cpu", "late", "error_4", 0),
        ("eager/latency", "cpu", "solo", "solo", 0),
        ("gradcomp/utility", "model", "winners", "wins", 2),
        ("gradcomp/validation", "cpu", "crossover", "foretold", 3),
        ("polythrottle/savings", "cpu", "jointly", "joint", 2),
        ("spb/resources", "cpu", "monotone", "memory", 5),
        ("specdec/depth-width", "cpu", "line", "line", 1),
        ("specdec/model", "cpu", "foretold", "measured", 0),
        ("specdec/model", "cpu", "chosen", "measured", 2),
        ("gptq/quality", "cpu", "act_order", "perplexity", 13),
        ("pipefisher/fill", "model", "period", "ratio", 0),
        ("samo/layouts", "model", "transmission first", "collective", 5),
        ("specdec/depth-width", "cpu", "line", "milliseconds", 12),
        ("tensor3d/grids", "cpu", "planner", "words", 20),
        ("tensor3d/overlap", "model", "dW first", "at_2", 0),
    ],
)
def test_no_claim_passes_over_a_cell_that_is_missing(
    table_id, tier, claim, column, row
):
    """Python's `max`, and xarray's, may look at the others alone, and `<` is false."""
    found = read_record(TABLES[table_id], tier, REPOSITORY)
    table, defined = table_records.to_dataset(found), TABLES[table_id].tier(tier)
    assert not math.isnan(count(defined, claim, table))
    assert math.isnan(count(defined, claim, lose(table, column, row)))


@pytest.mark.slow
@pytest.mark.parametrize(("table_id", "tier"), RECORDS)
def test_no_claim_holds_that_reads_a_cell_that_is_missing(table_id, tier):
    """A claim reads a cell if another number in its place makes another one of it."""
    found = read_record(TABLES[table_id], tier, REPOSITORY)
    table, defined = table_records.to_dataset(found), TABLES[table_id].tier(tier)
    columns = [n for n, c in table.items() if c.dtype.kind in "fib" and c.ndim == 1]
    for claim, told in defined.claims.items():
        ours = count(defined, claim, table)
        for column, row in itertools.product(columns, range(table.sizes["row"])):
            without = lose(table, column, row)
            if math.isnan(table[column].values[row]):
                continue
            if not told.holds(count(defined, claim, without)):
                continue
            for other in (-1e9, 0.5, 1e9):
                filled = table.assign({column: without[column].fillna(other)})
                assert count(defined, claim, filled) == ours, (claim, column, row)


TUNED = [
    name
    for name, table in TABLES.items()
    if any(runs.tune for tier in table.tiers.values() for runs in tier.runs.values())
]


@pytest.mark.parametrize("table_id", TUNED)
def test_baselines_are_tuned_as_well_as_ours(table_id):
    """As many trials for each, the same seeds, and none that is reported."""
    for tier in TABLES[table_id].tiers.values():
        tuned = [runs for runs in tier.runs.values() if runs.tune]
        assert len({len(runs.trials()) for runs in tuned}) == 1
        assert len({(runs.tune_seeds, runs.smooth, runs.by) for runs in tuned}) == 1
        assert len(tuned[0].tune_seeds) >= 3
        for runs in tier.runs.values():
            assert len(runs.seeds) >= 5
            assert not set(runs.seeds) & set(tuned[0].tune_seeds)
