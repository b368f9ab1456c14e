"""A table in the host's memory, in the loop: nothing is lost, and runs are ordinary."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, data, models, optim, perf, train
from hpcjax.collectives import OkTopkConfig
from hpcjax.core import ConfigError, Model, Totals, trees
from hpcjax.runs.training import TrainingConfig
from hpcjax.train import RowCacheConfig
from hpcjax.train.row_cache import list_row_leaves
from tests.train import tiny

BATCH, STEPS = 8, 12
CLICKS = data.ClicksConfig(examples=120, tables=3, rows=40, dense=2, hot=0.1)
SMALL = RowCacheConfig(lookahead=3, capacity=60, piece=8)
POLICIES = ("lookahead", "static_hot", "lru", "none")


@functools.cache
def dataset():
    return CLICKS.load()


def counting():
    """A model whose table has a gradient of 1 / BATCH for each look-up."""

    def init(key):
        del key
        return {"table": jnp.zeros((sum(dataset().tables), 2))}, {}

    def apply(params, state, x, *, train, key=None, taps=None):
        return params["table"][x["ids"]].sum((1, 2)), state

    return Model(init, apply)


def total(outputs, batch):
    weight = batch.get("weight", jnp.ones_like(outputs))
    return Totals({"loss": (outputs * weight).sum()}, weight.sum())


def sgd(rate):
    """A config of plain SGD, which no part is."""

    class Plain:
        def make(self, steps):
            del steps
            return optax.sgd(rate)

    return Plain()


def task(state, optimizer, model, objective=None, devices=1):
    method = train.compose(
        model,
        dataset(),
        optimizer,
        state=state,
        batch_size=BATCH,
        steps=STEPS,
        devices=devices,
    )
    return train.supervised(model, method, dataset(), objective)


@functools.cache
def clicks(state, devices=1):
    """A task whose programs all tests share."""
    own, config = dataset(), models.DlrmConfig(width=4, bottom=(5,), top=(6,))
    model = config.make(own.inputs, own.outputs, core.Policy(), **own.given)
    return task(state, optim.RowAdagradConfig(lr=0.1), model, devices=devices)


def fit(made, folder, steps=STEPS, devices=1):
    """Trains, with pauses after steps 5 and 10; returns records and last state."""
    records, mesh = tiny.Records(), made.mesh(devices)
    config = train.TrainConfig(
        steps=steps, batch_size=BATCH, eval_every=4, checkpoint_every=5
    )
    given = {"seed": 0, "mesh": mesh, "recorder": records}
    with train.Checkpoints(folder) as checkpoints:
        state = train.fit(made, config, checkpoints=checkpoints, **given)
    return records, jax.device_get(dataclasses.replace(state, key=None))


def metrics(records):
    """Returns the metrics of records by step, without what the cache tells."""
    return {
        (name, record["step"]): value
        for record in records
        for name, value in record.items()
        if name.endswith(("loss", "error", "skipped", "auc"))
    }


def lookups(steps):
    stream = data.batches(dataset().train, BATCH, 0)
    ids = np.concatenate([stream[n]["x"]["ids"].ravel() for n in range(steps)])
    return np.bincount(ids, minlength=sum(dataset().tables))


@pytest.mark.quick("lookahead")
@pytest.mark.parametrize("policy", POLICIES)
def test_no_update_of_any_row_is_lost(policy, tmp_path):
    """In whole numbers, through pauses after steps 5 and 10 and three validations."""
    near = int(policy in ("static_hot", "lru"))
    state = dataclasses.replace(SMALL, policy=policy, prefetch=near)
    made = task(state, sgd(float(BATCH)), counting(), total)
    records, last = fit(made, tmp_path)
    assert last.params["table"].tolist() == [[-n, -n] for n in lookups(STEPS)]
    held_out = dataset().validation.ids
    for record in records:
        if "val_loss" in record:
            sums = -2.0 * lookups(record["step"])[held_out].sum(1)
            assert record["val_loss"] == sums.mean()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of the whole table, and where its checkpoints are."""
    folder = tmp_path_factory.mktemp("whole")
    return *fit(clicks(None), folder), folder


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A run through a cache, and where its checkpoints are."""
    folder = tmp_path_factory.mktemp("cached")
    return *fit(clicks(SMALL), folder), folder


def check_close(found, expected):
    ours, theirs = metrics(found[0]), metrics(expected[0])
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, abs=1e-5), key
    ours, theirs = (trees.flatten(each[1]) for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        np.testing.assert_allclose(ours[path], leaf, atol=1e-5, err_msg=path)


def test_a_run_is_that_of_the_whole_table(cached, whole):
    """Losses, validations, parameters and Adagrad's sums of all rows."""
    check_close(cached, whole)
    tables = [trees.flatten(cached[1])[path] for path in list_row_leaves(cached[1])]
    assert [leaf.shape for leaf in tables] == [(120, 4), (120,)]


def test_its_records_tell_what_has_been_moved(cached):
    told = [record for record in cached[0] if "loss" in record]
    stream = data.batches(dataset().train, BATCH, 0)
    for first, last in ((0, 5), (5, 10), (10, 12)):
        ids = [stream[n]["x"]["ids"] for n in range(first, STEPS)]
        turns = data.lookahead_moves(ids, sum(dataset().tables), SMALL.lookahead)
        moves = [next(turns) for _ in range(1 + last - first)]
        fetched, evicted = (
            sum(len(getattr(move, what)) for move in moves)
            for what in ("fetch", "evict")
        )
        part = told[first:last]
        assert sum(record["rows_fetched"] for record in part) == fetched
        assert sum(record["rows_evicted"] for record in part) == evicted
    assert all(record["wait_seconds"] >= 0 for record in told)
    row = 4 * (4 + 1)  # four numbers, and one of Adagrad
    assert clicks(SMALL).method.facts == {"cache_rows": 60.0, "row_bytes": row}


def cut(folder, place, step=5):
    """Copies a run's checkpoints up to a step: what one that was killed then has."""
    shutil.copytree(folder / f"{step}", place / f"{step}")


def test_a_run_that_was_killed_goes_on_to_the_same_bits(cached, tmp_path):
    cut(cached[2], tmp_path)
    records, last = fit(clicks(SMALL), tmp_path)
    expected = metrics(cached[0])
    assert len(metrics(records)) > 7
    for key, value in metrics(records).items():
        assert value == expected[key]
    for path, leaf in trees.flatten(cached[1]).items():
        np.testing.assert_array_equal(trees.flatten(last)[path], leaf, err_msg=path)


@pytest.mark.parametrize("state", [None, SMALL], ids=["whole", "cached"])
def test_checkpoints_go_on_with_a_cache_and_without(state, cached, whole, tmp_path):
    cut((whole if state else cached)[2], tmp_path)
    records, last = fit(clicks(state), tmp_path)
    taken = [record for record in whole[0] if record["step"] > 5]
    check_close((records, last), (taken, whole[1]))


@pytest.mark.slow
def test_devices_share_a_batch_and_have_the_same_cache(whole, tmp_path):
    check_close(fit(clicks(SMALL, 4), tmp_path, devices=4), whole)


@pytest.mark.slow
def test_what_devices_send_does_not_grow_with_the_cache():
    sent = []
    for capacity in (40, 100):
        made = clicks(dataclasses.replace(SMALL, capacity=capacity), 4)
        mesh = made.mesh(4)
        state = made.method.around.trained(train.state_shapes(made, mesh))
        batch = train.batch_shapes(made, BATCH, mesh)
        step = train.train_step(made, mesh, state).lower(state, batch).compile()
        sent.append(perf.bytes_by_axis(step, mesh))
    assert sent[0] == sent[1]


def test_a_step_that_is_skipped_leaves_rows_as_they_are(tmp_path):
    """And its evictions still happen: later steps have their rows."""

    def bad(outputs, batch):
        totals = total(outputs, batch)
        lost = jnp.max(batch["x"]["dense"]) > limit
        spoilt = jnp.where(lost, jnp.nan, totals.sums["loss"])
        return totals._replace(sums={"loss": spoilt})

    limit = np.sort(dataset().train.dense.max(1))[-2]  # one example of 108
    made = task(SMALL, sgd(float(BATCH)), counting(), bad)
    _, last = fit(made, tmp_path)
    stream = data.batches(dataset().train, BATCH, 0)
    (skipped,) = [n for n in range(STEPS) if stream[n]["x"]["dense"].max() > limit]
    missing = lookups(skipped + 1) - lookups(skipped)
    assert last.params["table"][:, 0].tolist() == (missing - lookups(STEPS)).tolist()


def test_a_step_is_planned_for_the_cache():
    made = clicks(SMALL)
    held = made.method.around.trained(train.state_shapes(made, made.mesh(1)))
    rows = {path: trees.flatten(held)[path].shape[0] for path in list_row_leaves(held)}
    assert list(rows.values()) == [61, 61]


@pytest.mark.parametrize("policy", ["lru", "static_hot"])
def test_rows_of_all_batches_that_are_fetched_ahead_must_fit(policy, tmp_path):
    state = dataclasses.replace(SMALL, policy=policy, prefetch=STEPS, capacity=24)
    made = task(state, sgd(float(BATCH)), counting(), total)
    with pytest.raises(ConfigError, match="the cache must hold"):
        fit(made, tmp_path)


def test_what_cannot_be_cached_is_refused():
    with pytest.raises(ConfigError, match="changes rows that have no gradient"):
        task(SMALL, optim.SgdConfig(), counting())
    rule = r"parameter 'table', such as dlrm, and .* got parameters=\['dense'\]"
    with pytest.raises(ConfigError, match=rule):
        task(SMALL, sgd(0.1), tiny.linear())
    with pytest.raises(ConfigError, match="at least 24, for the ids of a batch: got"):
        task(dataclasses.replace(SMALL, capacity=23), sgd(0.1), counting())
    with pytest.raises(ConfigError, match=r"a link, which has a rate: got .*=0.5"):
        RowCacheConfig(latency=0.5)
    with pytest.raises(ConfigError, match="prefetch is of static_hot, lru and part"):
        RowCacheConfig(prefetch=1)
    with pytest.raises(ConfigError, match="exchange=ok_topk and state=row_cache both"):
        TrainingConfig(exchange=OkTopkConfig(), state=SMALL)
    whole = task(RowCacheConfig(), sgd(0.1), counting())
    assert whole.method.facts["cache_rows"] == 120


def test_all_that_is_moved_for_steps_goes_over_the_link(monkeypatch, tmp_path):
    links = []

    class Link:
        def __init__(self, path, rate, latency):
            assert (rate, latency) == (1e6, 0.5)
            self.bytes, self.take = 0, self.count
            links.append(self)

        def count(self, count):
            self.bytes += count

        def close(self):
            self.take = None

    monkeypatch.setattr(data, "SharedRate", Link)
    slow = dataclasses.replace(SMALL, rate=1e6, latency=0.5)
    made = task(slow, sgd(float(BATCH)), counting(), total)
    records, _ = fit(made, tmp_path, steps=3)
    fetched, evicted = (
        8 * sum(record.get(f"rows_{what}", 0) for record in records)
        for what in ("fetched", "evicted")
    )
    assert links[0].bytes == fetched
    # The pause at the end writes what is in the cache by then.
    assert evicted < links[1].bytes <= fetched
    assert all(link.take is None for link in links)


@pytest.mark.parametrize("by", ["rows", "number"])
def test_rows_whose_draws_depend_on_their_number_are_not_put_on_disk(by):
    def rows(key, start, count):
        drawn = jax.random.normal(core.keys.from_row(key, start, 2), (count, 2))
        return drawn / (count**0.5 if by == "number" else 1)

    state, model = dataclasses.replace(SMALL, store="disk"), counting()
    made = functools.partial(task, state, sgd(0.1), model._replace(rows=rows), total)
    if by == "rows":
        assert made().method.around.score is None
    else:
        with pytest.raises(ConfigError, match="drawn alike however many there are"):
            made()
