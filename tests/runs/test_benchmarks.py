"""What a machine that is lent for minutes is used for, and in what order."""

import json
import subprocess
import types
import zipfile

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import (
    benchmarks,
    cli,
    code,
    discover,
    places,
    table_commands,
    table_records,
)
from tests.runs import papers

TIMED = """
import dataclasses
def timed(table, minutes):
    (name, tier), = table.tiers.items()
    tiers = {name: dataclasses.replace(tier, minutes=minutes)}
    return dataclasses.replace(table, benchmark=True, tiers=tiers)
HOLDS, FAILS, FRAGILE = timed(HOLDS, 3.0), timed(FAILS, 2.0), timed(FRAGILE, 8.0)
HOPELESS = timed(HOPELESS, 1.0)
"""


@pytest.fixture
def root(tmp_path):
    made = papers.make(tmp_path)
    path = made / "experiments/curves/tables.py"
    path.write_text(path.read_text() + TIMED)
    return made


def benches(root):
    found = discover.find_tables(root)
    return [t for name, t in found.items() if name.startswith("curves/") if t.benchmark]


def wanted(root):
    return [t.id for t in benchmarks.wanted_first(benches(root), "cpu", root)]


def within(root, minutes, clock, tables=None):
    chosen = tables or benchmarks.wanted_first(benches(root), "cpu", root)
    return {
        table.id: (result is not None, why)
        for table, result, why in benchmarks.make_within(
            minutes, chosen, "cpu", root, clock=clock, progress=False
        )
    }


class Clock:
    """Every table takes what it says, in seconds of this clock."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 30.0
        return self.now


@pytest.mark.slow
def test_what_fits_is_made_shortest_first_and_the_rest_when_called_again(root):
    order = ["curves/hopeless", "curves/fails", "curves/holds", "curves/fragile"]
    assert wanted(root) == order
    made = within(root, 6.0, Clock())
    assert {name: done for name, (done, _) in made.items()} == {
        "curves/hopeless": False,  # has failed, and the others go on
        "curves/fails": True,
        "curves/holds": True,
        "curves/fragile": False,
    }
    assert made["curves/hopeless"][1].startswith("Diverged: slow: each of 2 trials")
    assert made["curves/fragile"][1] == "takes 8 min, and 4.0 are left"
    record = table_records.record_path(benches(root)[0], "cpu", root)
    assert json.loads(record.read_text())["claims"]
    assert wanted(root) == ["curves/hopeless", "curves/fragile"]
    assert within(root, 20.0, Clock())["curves/fragile"] == (True, "")
    assert wanted(root) == ["curves/hopeless"]


@pytest.mark.slow
def test_older_code_and_another_machine_are_wanted_after_what_is_missing(root):
    within(root, 60.0, Clock())
    assert wanted(root) == ["curves/hopeless"]
    fails = next(t for t in benches(root) if t.id == "curves/fails")
    path = table_records.record_path(fails, "cpu", root)
    content = json.loads(path.read_text())
    content["provenance"]["cpu_count"] = 1234
    path.write_text(json.dumps(content))
    assert wanted(root) == ["curves/hopeless", "curves/fails"]
    path = root / "experiments/curves/experiment.py"
    path.write_text(path.read_text().replace("loss += 1 /", "loss -= 1 /"))
    code.forget()
    assert wanted(root) == [
        "curves/hopeless",
        "curves/fails",
        "curves/holds",
        "curves/fragile",
    ]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose kernels have not been tested, and that forgets it afterwards."""
    source = tmp_path / "checkout"
    (source / "tests/kernels").mkdir(parents=True)
    monkeypatch.setattr(places, "checkout", lambda: source)
    monkeypatch.setattr(benchmarks, "describe_device", lambda: "1 device")
    return source


@pytest.mark.slow
def test_kernels_are_tested_before_times_are_taken(root, checkout, monkeypatch, capsys):
    asked = []

    def run(command, **options):
        asked.append((command[-3:], options["env"]["JAX_PLATFORMS"]))
        text = "1 failed" if len(asked) == 1 else "9 passed"
        return types.SimpleNamespace(
            returncode=int(len(asked) == 1), stdout=f"E wrong\n{text}\n", stderr=""
        )

    monkeypatch.setattr(benchmarks.subprocess, "run", run)
    with pytest.raises(benchmarks.KernelsWrong, match=r"fail here: 1 failed\n.*wrong"):
        benchmarks.check_kernels(5.0)
    assert benchmarks.check_kernels(5.0) == "9 passed"
    assert asked[0] == (["-m", "gpu", "tests/kernels"], "cuda")
    # The same kernels on the same device are not tested again.
    assert benchmarks.check_kernels(5.0) == "9 passed, before"
    assert len(asked) == 2
    (checkout / "tests/kernels/test_more.py").write_text("# one more")

    def late(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(benchmarks.subprocess, "run", late)
    with pytest.raises(benchmarks.KernelsWrong, match="more than 5 s"):
        benchmarks.check_kernels(5.0)
    monkeypatch.setattr(places, "checkout", lambda: None)
    with pytest.raises(ConfigError, match="in a checkout"):
        benchmarks.check_kernels(5.0)
    assert table_commands.bench
    flags = ["--minutes", "5", "--root", str(root)]
    assert cli.main(["bench", "curves/fails", "curves/holds", *flags]) == 1
    out = capsys.readouterr().out
    assert "0 of 2 benchmarks are recorded of this code on" in out
    assert "curves/fails · tier cpu" in out
    assert cli.main(["bench", "curves/fails", "curves/holds", *flags]) == 0
    assert "2 of 2 benchmarks" in capsys.readouterr().out


@pytest.mark.slow
def test_records_come_back_in_one_file(root, checkout, tmp_path):
    archive = tmp_path / "out" / "records.zip"
    flags = ["--root", str(root), "--archive", str(archive)]
    assert cli.main(["bench", "curves/fails", *flags]) == 2
    assert not archive.exists()
    cli.main(["bench", "curves/fails", "curves/holds", *flags, "--minutes", "9"])
    (checkout / benchmarks.KERNELS_PASSED).write_text("{}")
    benchmarks.write_archive(archive, benches(root), "cpu", root)
    with zipfile.ZipFile(archive) as file:
        held = set(file.namelist())
        file.extractall(tmp_path / "back")
    records = {
        f"experiments/curves/results/{name}.cpu.json" for name in ("fails", "holds")
    }
    assert held == records | {str(benchmarks.KERNELS_PASSED)}
    for name in records:
        assert (tmp_path / "back" / name).read_bytes() == (root / name).read_bytes()
