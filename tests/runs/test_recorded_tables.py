"""A committed record is printed as the table that was made."""

import pytest

from hpcjax.runs import build, discover, render, table_records
from tests.runs import papers


@pytest.mark.quick("md")
@pytest.mark.parametrize("form", ["md", "csv"])
def test_a_record_prints_as_its_table_did(tmp_path, form):
    root = papers.make(tmp_path)
    made = build.build_table("curves/holds", root=root, progress=False, record=True)
    table = discover.find_tables(root)["curves/holds"]
    record = table_records.read_record(table, "cpu", root)
    again = table_records.to_result(record)
    assert render.render_table(again, form) == render.render_table(made, form)
    assert (again.passed, again.source) == (made.passed, "measured")
