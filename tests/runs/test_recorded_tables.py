"""A committed record is printed as the table that was made."""

import io

import pytest
from rich.console import Console

from hpcjax.runs import build, cli, discover, render, table_records
from tests.conftest import REPOSITORY
from tests.runs import papers

RECORDS = [*table_records.find_records(REPOSITORY)]


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


@pytest.mark.parametrize("record", RECORDS, ids=lambda it: f"{it.table.id}.{it.tier}")
def test_a_committed_table_is_printed_without_a_broken_cell(record, monkeypatch):
    result = table_records.to_result(record)
    values, verdicts = render.values(result), render.verdicts(result.verdicts)
    monkeypatch.setattr(render, "values", lambda _: values)  # which takes long, as
    monkeypatch.setattr(render, "to_result", lambda _: result)  # judging does
    file = io.StringIO()
    Console(file=file, width=100).print(render.render_record(record))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert {*record.table.recalled} <= {*record.content["labels"].get("row", ())}
    whole = [*values.to_numpy().ravel(), *verdicts["ours (bound)"]]
    broken = {cell for cell in whole if not any(str(cell) in line for line in lines)}
    turned = any(line.startswith("Rows are columns here") for line in lines)
    assert broken <= {*(values.iloc[:, 0] if turned else ())}  # headings are wrapped
    assert all(f"({verdict.bound})" in file.getvalue() for verdict in result.verdicts)


def test_show_names_the_command_of_the_picture(capsys):
    assert cli.main(["show", "hammingmesh/networks", "--root", str(REPOSITORY)]) == 0
    told = "\nPicture: `hpcjax table hammingmesh/networks --picture FILE.png`\n"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("hammingmesh/networkss", "; did you mean 'hammingmesh/networks'?\n"),
        ("jorge/quikstart", " Or the table 'jorge/quickstart'?\n"),
        ("jorge/qqqqqqqqqqqqqqq", "; tables: jorge/ablation, jorge/quickstart"),
    ],
)
def test_what_there_is_not_names_the_nearest_once(asked, told, capsys):
    assert cli.main(["show", asked, "--root", str(REPOSITORY)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("networks'") <= 1
    assert "kaisa" not in error


def test_what_is_recalled_of_a_paper_is_a_column_of_its_own():
    (record,) = (it for it in RECORDS if it.table.id == "eager/throughput")
    shown = render.values(table_records.to_result(record)).set_index("row")
    said = shown["paper (recalled)"]
    assert said["one 300 ms, solo"] == "1.75"
    assert set(said.drop(list(record.table.recalled))) == {""}


def test_columns_that_claims_are_about_come_first():
    (record,) = (it for it in RECORDS if it.table.id == "hammingmesh/exchanges")
    columns = [*render.values(table_records.to_result(record))]
    assert columns[:4] == ["row", "Hx2 / fat tree", "torus / Hx2", "MB"]
