"""Every table is made of drawn runs: its rows, its columns, a number for each claim."""

import pytest

from hpcjax.runs import discover
from tests.conftest import REPOSITORY
from tests.experiments import rows

TABLES = discover.find_tables(REPOSITORY)


@pytest.mark.parametrize(
    ("table_id", "tier"),
    [(table_id, tier) for table_id, table in TABLES.items() for tier in table.tiers],
)
def test_a_table_is_made_of_any_runs(table_id, tier):
    rows.check_reduction(TABLES[table_id], tier, REPOSITORY)
