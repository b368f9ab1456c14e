import contextlib
import dataclasses
import json
import logging
import pathlib
import re
import signal
import threading
import time

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from hpcjax import metrics, sharding, train
from hpcjax.core import (
    ConfigError,
    DataFormatError,
    Diverged,
    Interrupted,
    Preempted,
    keys,
)
from hpcjax.core.method import Around
from hpcjax.core.objective import Numbers
from hpcjax.runs import results
from hpcjax.runs.metrics import Metrics
from hpcjax.train import loop
from hpcjax.train import watchdog as watchdogs
from hpcjax.train.loop import check_batch
from tests.train import test_step, tiny

NOTHING = contextlib.nullcontext()


def fit(
    task=None,
    *,
    steps=12,
    devices=1,
    seed=0,
    directory=None,
    records=None,
    stop=lambda: 0,
    **options,
):
    config = train.TrainConfig(
        steps=steps, batch_size=16, **{"eval_every": 5, **options}
    )
    records = tiny.Records() if records is None else records
    arguments = {"seed": seed, "mesh": sharding.data_mesh(devices), "recorder": records}
    arguments["stop"] = stop
    if directory is None:
        state = train.fit(task or tiny.task(), config, **arguments)
    else:
        with train.Checkpoints(directory) as checkpoints:
            state = train.fit(
                task or tiny.task(), config, checkpoints=checkpoints, **arguments
            )
    return state, records


def test_every_step_and_every_due_validation_is_recorded_in_order():
    _, records = fit()
    steps = [r["step"] for r in records if "loss" in r]
    validations = [r["step"] for r in records if "val_loss" in r]
    assert steps == list(range(1, 13))
    assert validations == [5, 10, 12]
    places = [r["step"] for r in records]
    assert places == sorted(places)
    assert all(np.diff([r["seconds"] for r in records if "seconds" in r]) >= 0)


def test_training_learns_and_validation_is_exact():
    state, records = fit(steps=60, eval_every=60)
    scores = next(r for r in records if "val_loss" in r)
    source = tiny.dataset().validation
    everything = source.gather(np.arange(len(source)))
    x, y = everything["x"].astype(np.float64), everything["y"]
    params = jax.device_get(state.params)["dense"]
    logits = x @ params["kernel"].astype(np.float64) + params["bias"]
    logits -= logits.max(1, keepdims=True)
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    assert scores["val_loss"] == pytest.approx(nll.mean(), rel=1e-5)
    assert scores["val_error"] == pytest.approx(
        (logits.argmax(1) != y).mean(), rel=1e-6
    )
    assert scores["val_error"] < 0.2


def test_two_runs_of_one_seed_are_the_same_bits_and_of_another_are_not():
    first, second, other = fit()[1], fit()[1], fit(seed=1)[1]
    assert first.values() == second.values()
    assert first.values() != other.values()


@pytest.mark.faults(28)
def test_the_step_is_traced_once_also_after_resuming(tmp_path):
    task, traced = tiny.task(), []
    model = task.model

    def counted(*args, train, **options):
        if train:
            traced.append(args)
        return model.apply(*args, train=train, **options)

    task = task.replace(model=model._replace(apply=counted))
    fit(task, steps=6, directory=tmp_path)
    assert len(traced) == 1
    fit(task.replace(), steps=9, directory=tmp_path)  # as in another process
    assert len(traced) == 2


@pytest.mark.quick("dense-1")
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_an_interrupted_run_continues_bit_for_bit(tmp_path, devices, kind):
    task = tiny.task(optax.adam(0.05)) if kind == "dense" else test_step.sparse_task()
    whole, expected = fit(task, steps=12, devices=devices)
    records = tiny.Records()
    fit(task, steps=7, devices=devices, directory=tmp_path, records=records)
    resumed, _ = fit(
        task, steps=12, devices=devices, directory=tmp_path, records=records
    )
    chex.assert_trees_all_equal(
        jax.device_get(whole.params), jax.device_get(resumed.params)
    )
    chex.assert_trees_all_equal(
        jax.device_get(whole.opt_state), jax.device_get(resumed.opt_state)
    )

    def trained(values):
        return [r for r in values if "loss" in r]

    assert trained(records.values()) == trained(expected.values())


@pytest.mark.quick("1-15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", [1, 5])
def test_a_run_told_to_stop_saves_and_goes_on_bit_for_bit(tmp_path, number, when):
    whole, expected = fit(steps=12)
    records = tiny.Records()

    def stop():
        return number if records and records[-1]["step"] >= when else 0

    error = Interrupted if number == signal.SIGINT else Preempted
    with pytest.raises(error, match=rf"{number.name}: stopped after step") as caught:
        fit(directory=tmp_path, records=records, stop=stop, checkpoint_every=0)
    assert type(caught.value) is error
    last = max(r["step"] for r in records if "loss" in r)
    assert last <= when + 2
    with train.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [last]
    resumed, _ = fit(steps=12, directory=tmp_path, records=records)
    chex.assert_trees_all_equal(
        jax.device_get(whole.params), jax.device_get(resumed.params)
    )
    after = [r for r in records.values() if set(r) > {"step"}]
    assert after == [r for r in expected.values() if set(r) > {"step"}]


def test_a_request_at_the_last_step_finds_the_run_finished(tmp_path):
    records = tiny.Records()

    def stop():
        return signal.SIGTERM if records and records[-1]["step"] >= 11 else 0

    state, _ = fit(steps=12, directory=tmp_path, records=records, stop=stop)
    assert int(state.step) == 12


@pytest.mark.faults(6)
def test_the_last_step_is_always_saved(tmp_path):
    fit(steps=7, directory=tmp_path, checkpoint_every=3)
    with train.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3, 6, 7]


def test_a_finished_run_is_not_run_again(tmp_path):
    first, _ = fit(steps=5, directory=tmp_path)
    again, records = fit(steps=5, directory=tmp_path)
    assert not [r for r in records if "loss" in r]
    chex.assert_trees_all_equal(
        jax.device_get(first.params), jax.device_get(again.params)
    )


@pytest.mark.faults(12)
def test_a_batch_that_devices_cannot_share_is_refused():
    with pytest.raises(ConfigError, match=r"batch_size must divide by the 7 devices"):
        fit(devices=7)


@pytest.mark.faults(12)
@hypothesis.given(
    batch_size=st.integers(1, 40),
    devices=st.integers(1, 8),
    accumulate=st.integers(1, 5),
    examples=st.integers(0, 20),
    held_out=st.integers(0, 3),
)
def test_every_batch_is_shared_evenly_or_refused_with_what_was_given(
    batch_size, devices, accumulate, examples, held_out
):
    """Batches smaller than the devices or than the data set, and empty data sets."""
    task = tiny.task()
    source = tiny.dataset()._replace(
        train=tiny.Points(examples), validation=tiny.Points(held_out)
    )
    config = train.TrainConfig(steps=1, batch_size=batch_size, accumulate=accumulate)
    rows, left = divmod(batch_size, devices)
    refusal = None
    if not (examples and held_out):
        refusal = "at least one example for (train|validation): got none"
    elif left:
        refusal = f"divide by the {devices} devices.*: got {batch_size}"
    elif rows % accumulate:
        refusal = f"divide the {rows} examples of a device: got {accumulate}"
    expected = pytest.raises(ConfigError, match=refusal) if refusal else NOTHING
    with expected:
        check_batch(task.replace(dataset=source), config, sharding.data_mesh(devices))


@pytest.mark.faults(12)
def test_more_devices_than_examples_train_and_score_all_of_them(caplog):
    few = tiny.dataset()._replace(train=tiny.Points(3), validation=tiny.Points(2))
    state, records = fit(tiny.task().replace(dataset=few), steps=2, devices=8)
    assert "batch_size=16 is more than the 3 examples" in caplog.text
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert np.isfinite([r["val_loss"] for r in records if "val_loss" in r]).all()


@pytest.mark.faults(12)
def test_a_validation_set_without_weight_has_no_mean(caplog, tmp_path):
    """Labels that are all ignored, say."""
    task = tiny.task()

    def unlabelled(outputs, batch):
        found = task.objective(outputs, batch)
        return found._replace(count=0.0 * found.count) if "weight" in batch else found

    records = Metrics(tmp_path / "metrics.jsonl")
    fit(task.replace(objective=unlabelled), steps=2, eval_every=1, records=records)
    scores = [r["val_loss"] for r in records.read() if "val_loss" in r]
    assert np.isnan(scores).tolist() == [True, True]
    assert "step 1: the validation is not finite: ['val_error', " in caplog.text


class Poisoned(tiny.Points):
    """Points of which some are infinite."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.inputs[list(bad)] = np.inf


def poisoned_task(bad):
    dataset = tiny.dataset()._replace(train=Poisoned(bad))
    return tiny.task().replace(dataset=dataset)


@pytest.mark.faults(10)
def test_one_bad_example_costs_one_step_an_epoch_and_names_the_parameter(caplog):
    with caplog.at_level(logging.WARNING):
        state, _ = fit(poisoned_task({11}), steps=12)  # two epochs of six batches
    assert int(state.skipped) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    skipped = [m for m in caplog.messages if "skipped" in m]
    where = "not finite: gradient dense/bias and 5 more"
    assert [m.partition(" skipped: ")[2] for m in skipped] == [where, where]


@pytest.mark.faults(10)
def test_bad_steps_in_a_row_end_the_run_and_keep_its_checkpoints(tmp_path, caplog):
    task = tiny.task()
    fit(task, steps=4, directory=tmp_path)
    with pytest.raises(Diverged, match=r"3 consecutive steps.*dense/bias and 5 more;"):
        fit(poisoned_task(set(range(96))), steps=30, directory=tmp_path, max_skipped=3)
    with train.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [4]
    first, *others = [m for m in caplog.messages if "skipped" in m]
    assert first.endswith("gradient dense/bias and 5 more")
    assert others == [f"step {5 + n} skipped: {n + 1} in a row" for n in (1, 2)]


@pytest.mark.faults(10)
def test_bad_steps_are_counted_across_a_stop(tmp_path):
    """So that a run that is stopped again and again ends none the later."""
    bad, options = poisoned_task(set(range(96))), {"checkpoint_every": 1}
    fit(bad, steps=2, directory=tmp_path, max_skipped=5, **options)
    fit(bad, steps=4, directory=tmp_path, max_skipped=5, **options)
    with pytest.raises(Diverged, match=r"5 consecutive steps.*the last step 5"):
        fit(bad, steps=30, directory=tmp_path, max_skipped=5, **options)
    # A good step between them ends the row.
    fit(tiny.task(), steps=5, directory=tmp_path, **options)
    with pytest.raises(Diverged, match="the last step 10"):
        fit(bad, steps=30, directory=tmp_path, max_skipped=5, **options)


def cut_lines(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:3]))


def change_digit(path):
    text = path.read_text()
    at = text.index('"loss": ') + len('"loss": 0.')
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


@pytest.mark.quick("unlink")
@pytest.mark.parametrize("damage", [cut_lines, change_digit, pathlib.Path.unlink])
def test_a_run_does_not_go_on_without_its_records(tmp_path, damage):
    kept = tmp_path / "metrics.jsonl"
    options = {"directory": tmp_path / "checkpoints", "checkpoint_every": 3}
    fit(steps=8, records=Metrics(kept), **options)
    whole = kept.read_bytes()
    with kept.open("a") as file:
        file.write('{"step": 9, "lo')  # what a kill leaves
    damage(kept)
    with pytest.raises(DataFormatError, match=r"records .* when the checkpoint was"):
        fit(steps=12, records=Metrics(kept), **options)
    kept.write_bytes(whole)
    fit(steps=12, records=Metrics(kept), **options)
    steps = [r["step"] for r in Metrics(kept).read() if "loss" in r]
    assert steps == list(range(1, 13))


def cut_after_five(path):
    lines = path.read_text().splitlines(True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))


def spoil_five(path):
    path.write_text(path.read_text().replace('{"step": 5', '{"step"; 5', 1))


def change_five(path):
    path.write_text(path.read_text().replace('{"step": 5', '{"step":  5', 1))


@pytest.mark.faults(7)
@pytest.mark.parametrize("damage", [cut_after_five, spoil_five, change_five])
def test_a_run_goes_on_from_the_newest_checkpoint_with_its_records(
    tmp_path, damage, caplog
):
    kept, whole = tmp_path / "metrics.jsonl", fit()[1]
    options = {"directory": tmp_path / "checkpoints", "checkpoint_every": 3}
    fit(steps=8, records=Metrics(kept), **options)
    damage(kept)
    fit(records=Metrics(kept), **options)
    found = tiny.Records(Metrics(kept).read())
    scores = [[r for r in each.values() if len(r) > 1] for each in (found, whole)]
    assert scores[0] == scores[1]
    (warning,) = [text for text in caplog.messages if "fell back" in text]
    assert warning.startswith("fell back to step 3, steps 4 to 8 are taken again: ")
    assert warning.count("when the checkpoint was saved") == 1
    assert "bytes" not in warning


def test_an_older_checkpoint_knows_its_records_too(tmp_path):
    """Of records that were rewound and written again, the first ones are the same."""
    kept, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    options = {"directory": folder, "checkpoint_every": 3}
    fit(steps=8, records=Metrics(kept), **options)
    for newest in ("8", "6"):
        next(folder.joinpath(newest).rglob("*/d/*")).unlink()
    fit(steps=12, records=Metrics(kept), **options)
    steps = [r["step"] for r in Metrics(kept).read() if "loss" in r]
    assert steps == list(range(1, 13))


def explosive(at: int) -> optax.GradientTransformation:
    """Gradient descent whose state, or update, overflows at one step."""

    def init(params):
        # Infinity from the start on is somebody's "no loss seen yet".
        return {"count": jnp.zeros(()), "best": jnp.inf, "energy": jnp.ones(())}

    def update(updates, state, params=None, **extra_args):
        burst = jnp.where(state["count"] == at, jnp.inf, 1.0)
        new = state | {"count": state["count"] + 1, "energy": burst}
        return jax.tree.map(lambda u: -0.1 * u, updates), new

    return optax.GradientTransformation(init, update)


def test_state_that_stops_being_finite_is_not_kept(tmp_path, caplog):
    """Gradients are finite here: only the state overflows, and would be saved."""
    task = tiny.task(explosive(at=4))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(Diverged, match=r"3 consecutive.*opt_state.*energy"),
    ):
        fit(task, directory=tmp_path, checkpoint_every=1, max_skipped=3)
    with train.Checkpoints(tmp_path) as checkpoints:
        state = train.state_shapes(task, sharding.data_mesh(1))
        restored = checkpoints.restore(state).state
        assert checkpoints.steps()[-1] >= 4
    leaves = jax.tree.leaves((restored.params, restored.opt_state[1]["energy"]))
    assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_updates_that_overflow_change_nothing():
    """Finite gradients times a finite rate: the parameters would become infinite."""
    task = tiny.task(optax.chain(optax.scale(-1e30), optax.scale(1e30)))
    with pytest.raises(Diverged, match=r"the last step 2 in params dense/bias and 1 m"):
        fit(task, max_skipped=2)


@pytest.mark.faults(16)
def test_an_exception_in_the_data_thread_reaches_the_loop():
    class Broken(tiny.Points):
        def gather(self, indices):
            raise OSError("disk on fire")

    task = tiny.task().replace(dataset=tiny.dataset()._replace(train=Broken()))
    with pytest.raises(OSError, match="disk on fire"):
        fit(task)


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"eval_every": -1}, {"checkpoint_every": -1}, {"keep": 0}]
)
def test_impossible_lengths_are_refused(bad):
    name = next(iter(bad))
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        train.TrainConfig(**bad)


@pytest.mark.faults(29)
def test_no_array_outlives_the_steps():
    state, _ = fit(steps=5)
    before = len(jax.live_arrays())
    del state
    state, _ = fit(steps=60)
    assert len(jax.live_arrays()) <= before
    assert int(state.step) == 60


def test_language_labels_are_weighted_by_row():
    logits = jnp.zeros((2, 3, 5)).at[0, :, 1].set(9.0)
    batch = {"y": jnp.ones((2, 3), jnp.int32), "weight": jnp.asarray([1.0, 0.0])}
    totals = metrics.label_totals(logits, batch)
    assert float(totals.count) == 3
    assert float(totals.sums["error"]) == 0
    expected = 3 * np.log(1 + 4 * np.exp(-9.0))
    assert float(totals.sums["loss"]) == pytest.approx(expected, rel=1e-3)


def test_the_time_of_a_run_is_accounted_for(tmp_path):
    """All of the loop's time is in one of the parts, slow data in that of data."""

    class Slow(tiny.Points):
        def gather(self, indices):
            time.sleep(0.2)
            return super().gather(indices)

    task = tiny.task().replace(dataset=tiny.dataset()._replace(train=Slow()))
    began = time.perf_counter()
    _, records = fit(task, steps=12, directory=tmp_path, checkpoint_every=5)
    whole = time.perf_counter() - began
    told = [r for r in records if any(name.startswith("spent_") for name in r)]
    # As soon as it is known: before the first step, after validations, after saves.
    assert [r["step"] for r in told] == [0, 5, 5, 10, 10, 12, 12]
    assert set(told[0]) == {"step", "shapes", "compile_seconds", "spent_init_seconds"}
    assert told[0]["spent_init_seconds"] > told[0]["compile_seconds"]
    split = results.time_split(results.history(records, "measured"))
    assert all(seconds > 0 for what, seconds in split.items() if what != "lost")
    training = max(r["seconds"] for r in records if "seconds" in r)
    assert split["compute"] + split["data"] == pytest.approx(training)
    assert sum(split.values()) <= whole
    assert split["data"] > 3 * split["compute"]


class Stuck(tiny.Points):
    """Points that do not come any more once `served` batches have."""

    def __init__(self, served: int, released: threading.Event, **options: int) -> None:
        super().__init__(**options)
        self.left, self.released = served, released

    def gather(self, indices):
        self.left -= 1
        if self.left < 0:
            assert self.released.wait(60), "nobody has noticed"
        return super().gather(indices)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_run_that_is_stuck_is_found_wherever_it_is(
    tmp_path, monkeypatch, capfd, part
):
    """Before its first step, and in its second validation."""
    released, exits = threading.Event(), []

    def leave(status):
        exits.append((status, (tmp_path / "0").read_text()))
        released.set()

    monkeypatch.setattr(watchdogs, "_TICK", 0.01)
    monkeypatch.setattr(watchdogs, "_LAST_WORDS", 0.0)
    monkeypatch.setattr(watchdogs.os, "_exit", leave)
    stuck = {
        "train": Stuck(0, released),
        "validation": Stuck(4, released, count=37, seed=1),
    }[part]
    task = tiny.task().replace(dataset=tiny.dataset()._replace(**{part: stuck}))
    least = {"train": 0.01, "validation": 1.0}[part]
    config = train.TrainConfig(steps=10, batch_size=16, eval_every=5)
    with watchdogs.Watchdog(tmp_path, 0, least) as watched:
        train.fit(
            task,
            config,
            seed=0,
            mesh=sharding.data_mesh(1),
            recorder=tiny.Records(),
            watchdog=watched,
        )
    place = {"train": "0\n", "validation": "10 1\n"}[part]
    assert exits == [(7, place)]
    what, step = {"train": ("step", 0), "validation": ("validation", 10)}[part]
    found = rf"error: {what} stands still for .* process 0 is behind at {step}\n"
    assert re.search(found, capfd.readouterr().err)


def test_a_host_acts_around_steps_pauses_before_a_state_is_kept_and_goes_on(tmp_path):
    plain, told = tiny.task(optax.sgd(0.0)), []

    def add(state, amount):
        params = jax.tree.map(lambda leaf: leaf + amount, state.params)
        return dataclasses.replace(state, params=params)

    def start(state, batches):
        assert len(batches[0]["x"]) == 16
        told.append("(")
        return add(state, 8.0)

    def enter(state, batch, number):
        told.append(f"{number}")
        return add(state, 1.0), {**batch, "x": 0 * batch["x"]}

    def leave(state, number):
        told.append(f"-{number}")
        return add(state, 2.0)

    def pause(state):
        told.append(")")
        return add(state, -8.0)

    around = Around(start=start, enter=enter, leave=leave, pause=pause)
    task = plain.replace(method=plain.method._replace(around=around))
    options = {"steps": 6, "eval_every": 2, "checkpoint_every": 3}

    def stop():
        return signal.SIGTERM if "4" in told else 0

    with pytest.raises(Preempted, match="after step 5"):
        fit(task, directory=tmp_path, stop=stop, **options)
    state, records = fit(task, directory=tmp_path, **options)
    assert " ".join(told) == "( 1 -1 2 -2 3 -3 ) ( 4 -4 5 -5 ) ( 6 -6 )"
    # Without inputs and rate a loss is of the bias alone, of which all is added.
    assert [r["loss"] for r in records if "loss" in r] == pytest.approx([np.log(3)])
    kernel = plain.model.init(keys.derive(jax.random.key(0), "init"))[0]["dense"]
    found = state.params["dense"]["kernel"] - kernel["kernel"]
    np.testing.assert_allclose(found, 18, rtol=1e-5)


class Shapes(tiny.Points):
    """Draws batches of several shapes in turn, and holds out one of another."""

    def __init__(self, count):
        super().__init__()
        self.shapes = count

    def sample(self, number, batch_size, seed, shard):
        rows = (number * batch_size + np.arange(batch_size)) % len(self)
        shape = number % self.shapes + 1
        x = np.repeat(self.inputs[rows][:, None], shape, 1)
        return {"x": x, "y": np.repeat(self.labels[rows][:, None], shape, 1)}


@pytest.mark.parametrize("fits", [True, False])
def test_a_step_is_compiled_for_each_of_few_shapes(monkeypatch, fits):
    """Equal examples two or three times over train as they do once."""
    monkeypatch.setattr(loop, "MOST_SHAPES", 3 if fits else 2)
    states = []
    for count in (3, 1):
        objective = dataclasses.replace(tiny.OBJECTIVE, outputs=Numbers(rank=2))
        held_out = Stacked(count=12)
        dataset = tiny.dataset()._replace(train=Shapes(count), validation=held_out)
        task = train.supervised(tiny.linear(), optax.sgd(0.1), dataset, objective)
        if count == 3 and not fits:
            with pytest.raises(ConfigError, match="batches may have 2 shapes in a run"):
                fit(task, steps=6)
            return
        state, records = fit(task, steps=6)
        assert [r["step"] for r in records if "shapes" in r] == [*range(count)]
        assert all(r["compile_seconds"] > 0 for r in records if "shapes" in r)
        states.append(jax.device_get(state.params))
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6),
        *states,
    )


class Stacked(tiny.Points):
    """Examples five times over."""

    def gather(self, indices):
        found = super().gather(indices)
        return {name: np.repeat(each[:, None], 5, 1) for name, each in found.items()}
