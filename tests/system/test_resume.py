"""Interrupted runs go on bit for bit, by the real command, on eight devices."""

import random
import shutil
import signal

import pytest

from hpcjax.runs import cli, directory
from hpcjax.train.manifest import NAME
from tests.data import writers
from tests.system import killing

pytestmark = pytest.mark.processes

COMMON = ["train.steps=60", "train.checkpoint_every=3", "train.eval_every=7"]
SMALL = {
    "jorge/digits:jorge": [*COMMON, "train.batch_size=32", "model.width=2"],
    "jorge/text:jorge": [
        *COMMON,
        "train.batch_size=16",
        "model.width=8",
        "dataset.context=8",
    ],
    "jorge/text:adamw": [  # whose state is spread over the devices
        *COMMON,
        "train.batch_size=16",
        "model.width=8",
        "dataset.context=8",
        "parallel=zero",
    ],
    "jorge/fashion:sgd": [
        *COMMON,
        "train.batch_size=16",
        "model.width=2",
        "dataset.limit=48",
        "dataset.validation_limit=16",
    ],
}
DIGITS, TEXT, SPREAD, FASHION = SMALL
one = pytest.mark.parametrize("whole", [DIGITS], indirect=True)
two = pytest.mark.parametrize("whole", [DIGITS, SPREAD], indirect=True)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    writers.write_all(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCJAX_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module", params=SMALL)
def whole(request, tmp_path_factory, data):
    """The config's name and the root of its undisturbed run."""
    root = tmp_path_factory.mktemp("whole")
    code, err = killing.Command(root, request.param, SMALL[request.param]).finish()
    assert code == 0, err
    assert killing.metrics(root)[-1]["step"] == 60
    return request.param, root


def overrides(name, changes):
    pairs = dict(change.split("=") for change in [*SMALL[name], *changes])
    return [f"{key}={value}" for key, value in pairs.items()]


def start(root, name, *changes):
    return killing.Command(root, name, overrides(name, changes))


def again(root, name, *changes):
    flags = ["--resume", killing.run_folder(root).name]
    return killing.Command(root, name, overrides(name, changes), *flags)


def check_same(root, undisturbed):
    assert killing.metrics(root) == killing.metrics(undisturbed)
    assert killing.last_leaves(root) == killing.last_leaves(undisturbed)
    assert (killing.run_folder(root) / "status").read_text() == "done\n"


@pytest.mark.faults(1)
@pytest.mark.parametrize("whole", [FASHION], indirect=True)
def test_a_killed_run_goes_on_bit_for_bit(whole, tmp_path):
    kill_and_go_on(whole, tmp_path, kills=1)


# Eleven processes one after the other, each of which loads JAX.
@slow
@pytest.mark.timeout(900)
@pytest.mark.faults(1)
def test_a_run_killed_ten_times_goes_on_bit_for_bit(whole, tmp_path):
    kill_and_go_on(whole, tmp_path, kills=10)


def kill_and_go_on(whole, tmp_path, kills):
    name, undisturbed = whole
    draw = random.Random(name)
    command = start(tmp_path, name)
    for step in sorted(draw.sample(range(1, 40), kills)):
        further = max(step, killing.last_step(tmp_path) + 1)
        command.stop_after(further, draw.uniform(0, 0.02), signal.SIGKILL)
        assert command.finish()[0] == -signal.SIGKILL
        assert (killing.run_folder(tmp_path) / "status").read_text() == "running\n"
        command = again(tmp_path, name)
    code, err = command.finish()
    assert code == 0, err
    assert "taking over" in err
    check_same(tmp_path, undisturbed)


@slow
@pytest.mark.faults(2, 22)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)]
)
@two
def test_a_run_told_to_stop_goes_on_bit_for_bit(whole, tmp_path, number, status):
    """It saves first: checkpoints at intervals are switched off."""
    name, undisturbed = whole
    once = "train.checkpoint_every=0"
    command = start(tmp_path, name, once)
    command.stop_after(10, 0.0, number)
    code, err = command.finish()
    assert code == status, err
    assert "Traceback" not in err
    folder = killing.run_folder(tmp_path)
    run = directory.RunDirectory(folder)
    assert run.status == "preempted"
    assert f"--resume {run.id}" in err
    assert not (folder / "lock").exists()
    (saved,) = killing.checkpoints(tmp_path)
    assert run.records()[-1]["step"] == int(saved.name) >= 10
    assert not list((folder / "checkpoints").glob(".*"))
    code, err = again(tmp_path, name, once).finish()
    assert code == 0, err
    assert "taking over" not in err
    check_same(tmp_path, undisturbed)


@pytest.fixture(scope="module")
def killed(whole, tmp_path_factory):
    """A run killed after several checkpoints, to be copied."""
    name, _ = whole
    root = tmp_path_factory.mktemp("killed")
    command = start(root, name)
    command.stop_after(17, 0.0, signal.SIGKILL)
    command.finish()
    assert len(killing.checkpoints(root)) >= 2
    return root


@pytest.fixture
def copied(killed, tmp_path):
    shutil.copytree(killed / "runs", tmp_path / "runs")
    return tmp_path


@slow
@pytest.mark.faults(7)
@two
def test_a_corrupt_checkpoint_is_passed_over(whole, copied):
    name, undisturbed = whole
    *_, before, newest = killing.checkpoints(copied)
    killing.flip_a_bit(newest)
    code, err = again(copied, name).finish()
    assert code == 0, err
    (warning,) = [line for line in err.splitlines() if "fell back" in line]
    assert f"fell back to step {before.name}" in warning
    assert f"step {newest.name}" in warning
    check_same(copied, undisturbed)


def refused(capsys, root, name, *changes):
    """Resumes in this process; for what is found out before training begins."""
    where = ["--root", str(root), "--resume", killing.run_folder(root).name]
    flags = [*where, "--devices", "8", "--quiet"]
    code = cli.main(["run", name, *overrides(name, changes), *flags])
    return code, capsys.readouterr().err


@slow
@pytest.mark.faults(7)
@one
def test_without_a_good_checkpoint_the_run_stops(whole, copied, capsys):
    name, _ = whole
    before = (killing.run_folder(copied) / "metrics.jsonl").read_bytes()
    steps = killing.checkpoints(copied)
    for checkpoint in steps:
        killing.flip_a_bit(checkpoint)
    code, err = refused(capsys, copied, name)
    assert code == 5, err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(f"step {checkpoint.name}" in last for checkpoint in steps)
    assert (killing.run_folder(copied) / "metrics.jsonl").read_bytes() == before


@slow
@pytest.mark.faults(8)
@one
def test_checkpoints_without_manifests_are_no_fresh_start(whole, copied, capsys):
    name, _ = whole
    before = (killing.run_folder(copied) / "metrics.jsonl").read_bytes()
    for checkpoint in killing.checkpoints(copied):
        (checkpoint / NAME).unlink()
    code, err = refused(capsys, copied, name)
    assert code == 5, err
    assert "without a manifest" in err
    assert (killing.run_folder(copied) / "metrics.jsonl").read_bytes() == before


@slow
@pytest.mark.faults(8)
@one
def test_a_checkpoint_without_manifest_loads_only_with_trust(whole, copied):
    name, undisturbed = whole
    for checkpoint in killing.checkpoints(copied):
        (checkpoint / NAME).unlink()
    flags = ["--resume", killing.run_folder(copied).name, "--trust"]
    command = killing.Command(copied, name, overrides(name, ()), *flags)
    code, err = command.finish()
    assert code == 0, err
    check_same(copied, undisturbed)
    sessions = directory.RunDirectory(killing.run_folder(copied)).sessions()
    assert [session["trusted"] for session in sessions] == [False, True]


@slow
@pytest.mark.faults(3)
@one
def test_another_config_is_refused(whole, copied, capsys):
    name, _ = whole
    config = (killing.run_folder(copied) / "config.json").read_bytes()
    code, err = refused(capsys, copied, name, "optimizer.lr=0.25", "train.batch_size=8")
    assert code == 2, err
    assert "optimizer.lr: 0.1 -> 0.25" in err
    assert "train.batch_size: 32 -> 8" in err
    assert "--fork" in err
    assert (killing.run_folder(copied) / "config.json").read_bytes() == config


@slow
@one
def test_fewer_steps_than_taken_are_refused(whole, copied, capsys):
    name, _ = whole
    taken = killing.checkpoints(copied)[-1].name
    code, err = refused(capsys, copied, name, "train.steps=2")
    assert code == 2, err
    assert f"steps must be at least the {taken} that the run has taken" in err
