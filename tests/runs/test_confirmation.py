"""Records of older code, confirmed by repeating a sample of their runs."""

import json

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import (
    build,
    cli,
    code,
    confirmation,
    discover,
    record_age,
    results,
)
from hpcjax.runs.table_records import read_record, record_path
from tests.runs import papers
from tests.runs.test_build import edit_experiment


@pytest.fixture
def root(tmp_path):
    return papers.make(tmp_path)


def record(root, name="curves/holds"):
    build.build_table(name, root=root, progress=False, record=True)
    return record_path(discover.find_tables(root)[name], "cpu", root)


def age(root, name="curves/holds"):
    found = read_record(discover.find_tables(root)[name], "cpu", root)
    return record_age.find_age(found, root)


def change(root, old, new):
    edit_experiment(root, old, new)
    code.forget()  # what another process would see


@pytest.mark.slow
@pytest.mark.faults(25)
def test_code_that_computes_the_same_confirms_a_record(root, capsys):
    path = record(root)
    before = json.loads(path.read_text())
    change(root, "loss += 1 /", "loss = loss + 1 /")
    assert age(root).age == "older code"
    assert cli.main(["confirm", "curves/holds", "--root", str(root)]) == 0
    assert "3 of 3 repeated runs (of 10)" in capsys.readouterr().out
    found = age(root)
    assert (found.age, found.stale) == ("confirmed", False)
    assert found.reasons == ("the code of 10 of 10 runs: confirmed",)
    after = json.loads(path.read_text())
    assert {key: after[key] for key in before if key != "runs"} == {
        key: before[key] for key in before if key != "runs"
    }
    for now, then in zip(after["runs"], before["runs"], strict=True):
        assert now.items() >= then.items()
        assert now["confirmed"]["code"] != then["code"]
    repeated = [(r["row"], r["tuning"]) for r in after["runs"] if r["repeated"]]
    assert sorted(repeated) == [("fast", False), ("slow", False), ("slow", True)]
    assert confirmation.confirm_table("curves/holds", root=root).repeated == ()
    assert cli.main(["list", "curves", "--stale", "--root", str(root)]) == 0
    assert "0 of 1 are made by this code, 1 by older" in capsys.readouterr().out
    # What comes after that is of no confirmed code.
    change(root, "loss = loss + 1 /", "loss = 1 * loss + 1 /")
    assert age(root).age == "older code"


@pytest.mark.slow
@pytest.mark.faults(25)
def test_one_row_with_another_bit_confirms_nothing(root, capsys):
    path = record(root)
    before = path.read_text()
    change(root, "1 / (step * cfg.speed)", "1 / (step * cfg.speed**1.0000001)")
    assert cli.main(["confirm", "curves/holds", "--root", str(root)]) == 1
    told = capsys.readouterr().out
    assert "2 of 3 repeated runs (of 10) have the same bits: NOT confirmed" in told
    (line,) = [line for line in told.splitlines() if "DIFFERS" in line]
    assert line.split()[0] == "fast"
    assert path.read_text() == before
    assert age(root).age == "older code"


@pytest.mark.slow
def test_a_run_that_diverges_as_it_did_is_repeated(root):
    record(root, "curves/fragile")
    change(root, "loss += 1 /", "loss = loss + 1 /")
    found = confirmation.confirm_table("curves/fragile", root=root)
    assert found.passed
    assert {run.row for run in found.repeated} == {"slow", "fast", "none"}
    assert not age(root, "curves/fragile").stale


REFUSED = {
    "no digest": (lambda held: held["runs"][0].pop("result"), "without a digest"),
    "no cores": (lambda held: held["runs"][0].pop("cores"), "without a digest"),
    "reduced": (lambda held: held.update(code="0" * 16), "makes its table"),
    "other runs": (lambda held: held["runs"].pop(), "makes its table"),
    "cores": (lambda held: [r.update(cores=999) for r in held["runs"]], "999 cores"),
}


@pytest.mark.quick("no digest")
@pytest.mark.parametrize("why", REFUSED)
def test_a_record_that_a_sample_says_nothing_of_is_refused(root, why):
    path = record(root)
    held = json.loads(path.read_text())
    spoil, told = REFUSED[why]
    spoil(held)
    path.write_text(json.dumps(held))
    change(root, "loss += 1 /", "loss = loss + 1 /")
    with pytest.raises(ConfigError, match=told):
        confirmation.confirm_table("curves/holds", root=root)
    assert json.loads(path.read_text()) == held


def test_a_benchmark_is_not_repeated(root):
    record(root)
    change(root, "loss += 1 /", "loss = loss + 1 /")
    held = read_record(discover.find_tables(root)["curves/holds"], "cpu", root)
    timed = held._replace(table=held.table.__class__(**vars(held.table) | TIMED))
    with pytest.raises(ConfigError, match="measures time"):
        confirmation.require_confirmable(timed)


TIMED = {"benchmark": True}


def test_the_sample_has_each_row_and_each_code_that_was_tried():
    def run(row, made_by, tuning=False):
        return {"row": row, "tuning": tuning, "code": made_by}

    runs = [
        *(run("sgd", made_by, True) for made_by in "aabb"),
        *(run("sgd", "a") for _ in range(3)),
        *(run("jorge", "c") for _ in range(3)),
    ]
    now = [{"code": "00000004"}] * len(runs)
    # Four tells which of two, and which of three.
    assert confirmation.draw_sample(runs, now) == [0, 2, 5, 8]


def test_results_with_the_same_bits_have_one_digest(root):
    record(root)
    first, other = (build.read_run(run) for run in build.directory.list_runs(root)[:2])
    same = first.assign(seconds=first["seconds"] + 1)
    assert results.digest(same) == results.digest(first)
    assert results.digest(other) != results.digest(first)
    last = first["loss"].copy()
    last[-1] = float(last[-1]) * (1 + 2**-52)
    assert results.digest(first.assign(loss=last)) != results.digest(first)
    renamed = first.rename(loss="cost")
    assert results.digest(renamed) != results.digest(first)
