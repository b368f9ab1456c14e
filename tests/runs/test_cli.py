"""Every command through `main`, in this process."""

import errno
import json
import os
import pathlib
import re
import shutil
import types

import pytest
import xarray as xr
from PIL import Image

from hpcjax import core
from hpcjax.runs import build, cli, execute, plan, render, report, table_records
from tests.runs import roots


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with one paper, as the working directory; what `main` sets is undone."""
    roots.make_running(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCJAX_DATA", "")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    return tmp_path


def run_dirs(root):
    return sorted(root.glob("runs/*/status"))


def every_error(base):
    return {
        base,
        *(found for kind in base.__subclasses__() for found in every_error(kind)),
    }


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in cli.COMMANDS)
    assert "75 preempted" in text
    # Every error tells how it ends, and a failed claim alone ends with 1.
    told = {int(number) for number in re.findall(r"\b(\d+) [a-z]", text)}
    assert {error.exit_code for error in every_error(core.HpcjaxError)} <= told - {1}
    assert cli.main([]) == 0


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_each_command(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert f"hpcjax {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "usage", "about"),
    [
        (["list"], "[PAPER]\n", "List systems"),
        (["run"], "CONFIG [KEY=VALUE ...]\n", "Run a config."),
        (["report"], "[ID ...]", "Write one HTML page"),
        (["data", "fetch"], "[ID ...]", "Fetch data sets"),
        (["data", "list"], "[--root DIR]", "which are here"),
    ],
)
def test_help_is_the_commands_own_and_shows_what_may_be_left_out(
    args, usage, about, capsys
):
    assert cli.main([*args, "--help"]) == 0
    first, *rest = capsys.readouterr().out.splitlines(keepends=True)
    assert first.startswith(f"usage: hpcjax {' '.join(args)} [-h] ")
    assert usage in first
    assert about in "".join(rest)


def test_version(capsys):
    import hpcjax

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{hpcjax.__version__}\n"


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["rum", "mine/first"], "run"),
        (["run"], "CONFIG"),
        (["run", "mine/first", "--dryrun"], "--dry-run"),
        (["table", "mine/holds", "--format", "pdf"], "latex"),
        (["data", "remove"], "fetch"),
    ],
)
def test_wrong_usage(root, args, part, capsys):
    assert cli.main(args) == 2
    assert part in capsys.readouterr().err


def test_list(root, capsys):
    assert cli.main(["list", "--all"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "mine/first:second" in line)
    assert "Two ways to do it." in line
    assert "a data set" in line
    assert "mine/first:first" in text
    made = [line.split() for line in text.splitlines() if "mine/holds" in line]
    assert made == [
        ["mine/holds", "Answers", t, "0.1", "min"] for t in ("cpu", "model")
    ]
    assert "jorge/" in text
    assert "\x1b" not in text
    assert "…" not in text


def test_list_one_paper(root, capsys):
    assert cli.main(["list", "mine"]) == 0
    text = capsys.readouterr().out
    assert "mine/first:first" in text
    assert "jorge" not in text
    assert cli.main(["list", "mime"]) == 2
    told = capsys.readouterr().err
    assert told == "error: unknown system 'mime'; did you mean 'mine'?\n"


def test_list_shows_files_that_fail(root, capsys):
    roots.write(root, "configs/mine/broken.py", "import no_such_module")
    assert cli.main(["list", "mine"]) == 0
    text = capsys.readouterr().out
    assert "mine/broken: " in text
    assert "no_such_module" in text
    assert "mine/first:first" in text


def test_show(root, capsys):
    assert cli.main(["show", "mine/first", "seed=4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("mine/first:second (experiments.mine.experiment:Config)")
    assert "Expect: nothing." in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["optimizer"][1:] == ["b", "a", "|", "b:", "which."]
    assert rows["seed"][1:] == ["4", "0", "int:", "of", "all."]
    assert rows["optimizer.momentum"][1:3] == ["0.9", "float:"]
    assert rows["first"][1:] == ["optimizer=a"]
    assert rows["second"][1:] == ["(base)"]
    assert "hpcjax run mine/first steps=1" in text
    assert "Needs: a data set" in text


def test_run(root, capsys):
    assert cli.main(["run", "mine/first", "steps=2", "--quiet"]) == 0
    out = capsys.readouterr().out
    (status,) = run_dirs(root)
    assert status.read_text() == "done\n"
    assert f"run        {status.parent.name}\n" in out
    assert f"directory  {status.parent.relative_to(root)}\n" in out
    folder = status.parent
    held = {path.name for path in folder.iterdir()}
    assert held == {
        "config.json",
        "provenance.json",
        "metrics.jsonl",
        "result.nc",
        "checksums.json",
        "log.txt",
        "status",
    }
    assert json.loads((folder / "config.json").read_text())["values"]["steps"] == 2


def test_a_run_that_takes_no_steps_prints_what_it_found(root, capsys):
    many = '("step", [*range(20)], {"long_name": "made up"})'
    returned = f'    return runs.measured({{"whole": 0.123456, "many": {many}}})'
    path = root / "experiments/mine/experiment.py"
    text = path.read_text()
    path.write_text(text[: text.index("    return runs.measured")] + returned)
    assert cli.main(["run", "mine/first"]) == 0
    out, err = capsys.readouterr()
    (status,) = run_dirs(root)
    rows = [line.split() for line in out.splitlines()]
    assert ["whole", "0.1235"] in rows
    assert ["many", "by", "step", "made", "up"] in rows
    assert "6 of 20 values" in out
    assert f'hpcjax.runs.load_result("{status.parent.name}")' in out
    assert err.endswith("mine/first:second: done\n")


def test_run_says_at_once_where_it_runs(root, capsys):
    assert cli.main(["run", "mine/first"]) == 0
    (status,) = run_dirs(root)
    assert capsys.readouterr().err.startswith(f"run {status.parent.name} in ")


def test_run_again_from_its_json_and_resume(root, capsys):
    assert cli.main(["run", "mine/first", "steps=2", "--quiet"]) == 0
    run_id = run_dirs(root)[0].parent.name
    again = ["run", f"runs/{run_id}/config.json", "--quiet"]
    assert cli.main([*again, "seed=5"]) == 0
    assert len(run_dirs(root)) == 2
    assert cli.main([*again, "--resume", run_id, "steps=3"]) == 0
    assert len(run_dirs(root)) == 2
    capsys.readouterr()
    assert cli.main([*again, "--resume", run_id, "steps=3", "seed=6"]) == 2
    assert "seed: 0 -> 6" in capsys.readouterr().err
    assert cli.main([*again, "--resume", run_id, "--fork", "seed=6"]) == 0
    assert len(run_dirs(root)) == 3


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["run", "mine/frist"], "did you mean 'mine/first'"),
        (["run", "MINE/first"], "did you mean 'mine/first'"),
        (["run", "first"], "unknown config 'first'; did you mean mine/first?"),
        (["run", "mine/first", "stesp=3"], "did you mean 'steps'"),
        (["run", "mine/first", "steps=x"], "steps must be int"),
        (["run", "mine/first", "steps=1", "steps=2"], "given twice"),
        (["run", "mine/first", "steps", "=", "3"], "written key=value"),
        (["run", "mine/first", "optimizer.lr=1"], "belongs to optimizer=a"),
        (["run", "mine/first", "--devices", "0"], "devices must be at least 1"),
        (["run", "mine/first", "--processes", "0"], "processes must be at least 1"),
        (["run", "mine/first", "--processes=-2"], "processes must be at least 1"),
        (["run", "mine/first", "--dry-run", "--processes=0"], "processes must be"),
        (["run", "mine/first", "--restart=-1"], "restart at least 0"),
        (["run", "mine/first", "--resume", "nothing"], "no run 'nothing'"),
        (["run", "mine/first", "--fork"], "fork needs"),
        (["run", "mine/first", "--dry-run", "stesp=3"], "did you mean 'steps'"),
        (["show", "../x"], "config name may hold only"),
        (["table"], "name a table: "),
        (["table", "mine/hold"], "did you mean 'mine/holds'"),
        (["table", "mine/holds", "--tier", "gpu"], "no tier 'gpu'"),
        (["bench", "mine/holds"], "unknown benchmark 'mine/holds'"),
        (["bench", "--minutes", "0"], "minutes must be more than 0: got 0"),
        (["verify", "mine/first"], "no run 'mine/first' in runs"),
        (["report"], "nothing to report"),
        (["data", "fetch"], "name the data sets"),
        (["data", "fetch", "mnits"], "did you mean 'mnist'"),
    ],
)
def test_errors_are_one_line_and_exit_2(root, args, part, capsys):
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not run_dirs(root)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (core.ConfigError, 2),
        (core.DataMissing, 3),
        (core.Diverged, 4),
        (core.CheckpointCorrupt, 5),
        (core.DiskFull, 6),
        (core.Preempted, 75),
        (core.RunBusy, 2),
        (KeyboardInterrupt, 130),
    ],
)
def test_exit_codes(root, monkeypatch, error, code, capsys):
    def fails(*args, **kwargs):
        raise error("[bold]what happened[/bold]" + " and" * 100)

    monkeypatch.setattr(execute, "run", fails)
    assert cli.main(["run", "mine/first"]) == code
    captured = capsys.readouterr()
    if error is not KeyboardInterrupt:
        assert "error: [bold]what happened[/bold] and" in captured.err
    assert captured.err.count("\n") == 1


def test_an_unexpected_error_keeps_its_traceback_and_is_no_failed_claim(
    root, monkeypatch, capsys
):
    def fails(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(execute, "run", fails)
    assert cli.main(["run", "mine/first"]) == 70
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "ZeroDivisionError" in told
    assert "a fault in hpcjax" in told


@pytest.mark.parametrize(
    ("number", "code"),
    [("ENOSPC", 6), ("EFBIG", 6), ("EROFS", 2), ("ENAMETOOLONG", 2), ("EACCES", 2)],
)
def test_what_the_system_refuses_is_a_line(root, monkeypatch, number, code, capsys):
    def fails(*args, **kwargs):
        raise OSError(getattr(errno, number), "no", "/some/file")

    monkeypatch.setattr(execute, "run", fails)
    assert cli.main(["run", "mine/first"]) == code
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "/some/file" in told


@pytest.mark.parametrize("root", ["/etc/passwd/below", "/proc/below"])
def test_a_root_that_cannot_hold_runs_is_told(root, capsys):
    assert cli.main(["run", "train/digits", "train.steps=1", "--root", root]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: no folder can be made at {root}/runs: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("what", [[], ["--runs"], ["--parts"]])
def test_a_folder_that_is_not_there_has_no_list(what, tmp_path, capsys):
    root = str(tmp_path / "none")
    assert cli.main(["list", *what, "--root", root]) == 2
    assert capsys.readouterr().err == f"error: there is no folder {root}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(FileNotFoundError(2, "no", "/x"), 70), (BrokenPipeError(32, "a socket"), 70)],
)
def test_a_fault_of_an_experiment_is_not_taken_for_the_users(
    root, monkeypatch, error, code, capsys
):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(execute, "run", fails)
    assert cli.main(["run", "mine/first"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["run", "mine/first", "steps=2", "optimizer=a", "--devices", "4", "--fork"],
        ["run", "--fork", "--devices", "4", "mine/first", "steps=2", "optimizer=a"],
        ["run", "steps=2", "mine/first", "--fork", "optimizer=a", "--devices=4"],
    ],
)
def test_flags_and_overrides_in_any_order(root, monkeypatch, args):
    seen = {}

    def record(name, overrides, **kwargs):
        seen.update(kwargs, name=name, overrides=overrides)
        made = {"id": "x", "directory": root, "dataset": xr.Dataset()}
        return types.SimpleNamespace(leads=True, **made)

    monkeypatch.setattr(execute, "run", record)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert cli.main([*args, "--root", str(root), "--data", "d"]) == 0
    assert seen == {
        "name": "mine/first",
        "overrides": {"steps": "2", "optimizer": "a"},
        "root": root,
        "resume": None,
        "fork": True,
        "devices": 4,
        "distributed": False,
        "log": (),
        "tags": (),
        "trust": False,
        "profile": False,
        "quiet": False,
    }
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[0] == "--xla_cpu_enable_fast_math=false"
    assert flags[1] == "--xla_force_host_platform_device_count=4"
    assert os.environ["HPCJAX_DATA"] == "d"


def test_dry_run(root, monkeypatch, capsys):
    assert cli.main(["run", "mine/first", "--dry-run", "seed=4"]) == 0
    out = capsys.readouterr().out
    assert "mine/first:second does not train" in out
    assert re.search(r"^seed +4 +0 +int: of all\. *$", out, re.M)
    assert re.search(r"^optimizer.momentum +0.9 +float: decay\. *$", out, re.M)
    assert not run_dirs(root)
    monkeypatch.setattr(plan, "plan_run", lambda *_, devices, **__: devices)
    monkeypatch.setattr(plan, "render_plan", lambda planned: f"for {planned}, in print")
    # Of processes, each has a device unless it is said how many there are.
    for options in (["--devices", "2"], ["--processes", "2"]):
        assert cli.main(["run", "mine/first", "--dry-run", *options]) == 0
        assert "for 2, in print" in capsys.readouterr().out


def test_table(root, capsys):
    assert cli.main(["table", "mine/holds"]) == 0
    out = capsys.readouterr().out
    assert "126" in out
    assert "holds" in out
    assert len(run_dirs(root)) == 1
    assert cli.main(["table", "mine/holds", "mine/fails"]) == 1
    assert "FAILS" in capsys.readouterr().out
    assert len(run_dirs(root)) == 1
    assert cli.main(["table", "mine/holds", "--fresh", "--format", "csv"]) == 0
    assert "the answer" in capsys.readouterr().out
    assert len(run_dirs(root)) == 2


def test_table_check_and_record(root, capsys):
    assert cli.main(["table", "mine/holds", "--check"]) == 2
    assert "no committed result" in capsys.readouterr().err
    assert cli.main(["table", "mine/holds", "--record"]) == 0
    assert (root / "experiments/mine/results/holds.cpu.json").exists()
    assert cli.main(["table", "mine/holds", "--check"]) == 0


def test_the_picture_of_a_table(root, capsys):
    """Of its runs, and of its record without them."""
    assert cli.main(["table", "mine/holds", "--picture", str(root / "a.png")]) == 0
    assert "a.png: " in capsys.readouterr().out
    runs = len(run_dirs(root))
    assert cli.main(["table", "mine/holds", "--record"]) == 0
    shutil.rmtree(root / "runs")
    assert cli.main(["table", "mine/holds", "--picture", str(root / "b.png")]) == 0
    assert capsys.readouterr().out.count("the answer") == 1  # when it was recorded
    assert runs == 1
    assert not (root / "runs").exists()
    one, other = (Image.open(root / name) for name in ("a.png", "b.png"))
    assert one.tobytes() == other.tobytes()
    for ids, place in (
        (["mine/holds"], "a.gif"),
        (["mine/holds", "mine/fails"], "a.png"),
        (["mine/holds"], "gone/a.png"),
    ):
        assert cli.main(["table", *ids, "--picture", str(root / place)]) == 2
        assert "picture" in capsys.readouterr().err


def test_bench(root, monkeypatch, capsys):
    seen = []

    def record(name, **options):
        seen.append((name, options["fresh"]))
        return types.SimpleNamespace(passed=True)

    monkeypatch.setattr(build, "build_table", record)
    monkeypatch.setattr(render, "render_table", lambda result, form: f"as {form}")
    assert cli.main(["bench", "mine/fails", "--format", "md"]) == 0
    assert capsys.readouterr().out == "as md\n"
    assert cli.main(["bench"]) == 0
    assert seen[0] == ("mine/fails", True)
    assert ("mine/fails", True) in seen[1:]
    # What has no record is not measured to be compared with it.
    seen.clear()
    monkeypatch.setattr(table_records, "require_comparable", lambda record: None)
    assert cli.main(["bench", "--check"]) == 0
    assert len(seen) > 10
    assert ("mine/fails", True) not in seen
    told = capsys.readouterr().err
    assert "nothing is committed of" in told
    assert "mine/fails" in told
    monkeypatch.undo()


def test_nothing_is_measured_if_one_table_cannot_be_compared(root, monkeypatch, capsys):
    monkeypatch.setattr(build, "build_table", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["bench", "mine/fails", "loop/overhead", "--check"]) == 2
    assert "no committed result" in capsys.readouterr().err


def test_report(root, monkeypatch, capsys):
    def write(ids, *, root, path, tier):
        return path or pathlib.Path(f"page-of-{tier}", *ids)

    monkeypatch.setattr(report, "write_report", write)
    assert cli.main(["report", "a", "b"]) == 0
    assert cli.main(["report", "a", "--tier", "gpu"]) == 0
    assert cli.main(["report", "--path", "there.html"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["page-of-None/a/b", "page-of-gpu/a", "there.html"]


def test_data(root, capsys):
    assert cli.main(["data", "list"]) == 0
    text = capsys.readouterr().out
    assert "digits" in text
    assert "CC BY" in text
    assert cli.main(["data", "fetch", "digits"]) == 0
    assert "is installed" in capsys.readouterr().out
    assert cli.main(["data", "fetch", "cifar10"]) == 3
    assert "error: " in capsys.readouterr().err


def test_doctor(root, monkeypatch, capsys):
    assert cli.main(["doctor", "--data", str(root)]) == 0
    assert "jaxlib" in capsys.readouterr().out
    from hpcjax.runs import doctor

    wrong = doctor.Check(part="jax", found="", verdict="wrong")
    monkeypatch.setattr(doctor, "examine", lambda root: (wrong,))
    assert cli.main(["doctor"]) == 2


def test_every_command_is_documented():
    for name, command in cli.COMMANDS.items():
        assert command.__doc__, name
