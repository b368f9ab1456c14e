"""A disk that is full at any file of a run or a table: exit 6, nothing half-written."""

import itertools
import json

import pytest

from hpcjax.runs import cli, directory
from hpcjax.runs.metrics import Metrics
from tests import full_disk
from tests.runs import papers


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


def call(root, *args):
    return cli.main([*args, "--root", str(root)])


def assert_told(failed, err):
    last = err.splitlines()[-1]
    assert last.startswith("error: no space left to write ")
    assert last.endswith(" bytes free")
    assert failed
    assert "Traceback" not in err


def assert_whole(root, name):
    """Every JSON file can be read, and no temporary file is left."""
    for path in root.rglob("*.json"):
        json.loads(path.read_text())
    assert not list(root.rglob(f".{name}.*"))


# The library for netCDF opens its file by itself, see `test_execute.py`.
FILES = [
    ("metrics.jsonl", "write"),
    ("result.nc", "fsync"),
    ("result.nc", "replace"),
    *itertools.product(
        ["config.json", "provenance.json", "status", "checksums.json"],
        full_disk.STAGES,
    ),
]


@pytest.mark.faults(18)
@pytest.mark.parametrize(("name", "stage"), FILES)
def test_no_room_for_a_file_of_a_run(root, capsys, name, stage):
    with full_disk.no_room(name, stage) as failed:
        assert call(root, "run", "curves/plain", "--quiet") == 6
    assert_told(failed, capsys.readouterr().err)
    assert_whole(root, name)
    assert not [run for run in directory.list_runs(root) if run.status == "done"]
    for run in root.glob("runs/*/metrics.jsonl"):
        assert [r["step"] for r in Metrics(run).read()] in (
            [],
            [1, 1, 2, 2, 3, 3, 4, 4],
        )
    assert call(root, "run", "curves/plain", "--quiet") == 0


@pytest.mark.slow
@pytest.mark.faults(18)
def test_no_room_for_a_record_leaves_the_old_one(root, capsys):
    table = ("table", "curves/holds", "--record")
    assert call(root, *table) == 0
    (record,) = root.rglob("holds.cpu.json")
    record.write_text("{}\n")
    for stage in full_disk.STAGES:
        with full_disk.no_room(record.name, stage) as failed:
            assert call(root, *table) == 6
        assert_told(failed, capsys.readouterr().err)
        assert_whole(root, record.name)
        assert record.read_text() == "{}\n"


@pytest.mark.faults(18)
@pytest.mark.parametrize(("name", "stage"), FILES[:2])
def test_no_room_for_a_run_of_a_table_is_no_row_that_failed(root, capsys, name, stage):
    with full_disk.no_room(name, stage) as failed:
        assert call(root, "table", "curves/holds", "--record") == 6
    assert_told(failed, capsys.readouterr().err)
    assert_whole(root, name)
    assert not list(root.rglob("holds.cpu.json"))
