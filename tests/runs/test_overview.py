"""Systems are listed from their files, and as importing them would."""

import pytest

from hpcjax.runs import cli, discover, overview, table_records
from tests.conftest import REPOSITORY
from tests.runs import roots


def test_what_is_read_is_what_is_imported():
    found = {each.name: each for each in overview.find_systems(REPOSITORY)}
    tables, minutes = {}, {}
    for name, table in discover.find_tables(REPOSITORY).items():
        paper = name.partition("/")[0]
        tables[paper] = tables.get(paper, 0) + 1
        minutes.setdefault(paper, []).extend(t.minutes for t in table.tiers.values())
    records = [*table_records.find_records(REPOSITORY)]
    for name, each in found.items():
        own = [it for it in records if it.table.id.startswith(f"{name}/")]
        holds = [c["holds"] for it in own for c in it.content["claims"].values()]
        assert each.tables == tables.get(name, 0)
        assert (each.held, each.claims) == (sum(holds), len(holds))
        assert each.minutes == min(minutes.get(name, [None]))
        assert each.about
    assert found.keys() >= tables.keys()


@pytest.mark.parametrize("columns", [None, "100", "160"])
def test_the_list_of_systems_fits_a_page(monkeypatch, capsys, columns):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(discover, "activate", None)  # nothing is imported
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    (jorge,) = (line.split() for line in lines if line.startswith("jorge "))
    assert jorge[-2:] == ["4", "min"]
    assert jorge[-4] == "of"


def test_a_folder_of_ones_own_is_a_system(tmp_path):
    roots.make_running(tmp_path)
    roots.write(tmp_path, "experiments/mine/README.md", "no heading")
    roots.write(tmp_path, "configs/broken/first.py", "def")
    found = {each.name: each for each in overview.find_systems(tmp_path)}
    assert found["mine"].about == "Two ways to do it"
    assert found["mine"].minutes == 0.1
    assert found["broken"] == overview.System("broken", "", 0, 0, 0, None)
    assert "jorge" in found
