"""Training through a cache of rows gives the bits of training the whole table."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

from hpcjax import core, data, models, optim, sharding, train
from hpcjax.core import ConfigError, trees
from hpcjax.train.row_cache import list_row_leaves

BATCH, STEPS, FAR = 16, 60, 50
CLICKS = data.ClicksConfig(
    examples=BATCH * STEPS * 10 // 9, tables=3, rows=40, dense=2, hot=0.1
)
TX = {
    "sgd": optax.sgd(optax.linear_schedule(0.3, 0.01, STEPS)),
    "row_adagrad": optax.chain(optim.scale_by_row_adagrad(), optax.sgd(0.1)),
}


class Trained(NamedTuple):
    losses: list[float]
    rows: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]


@functools.cache
def dataset():
    return CLICKS.load()


@functools.cache
def batches():
    stream = data.batches(dataset().train, BATCH, 0)
    return [stream[number] for number in range(STEPS)]


def ids():
    return [batch["x"]["ids"] for batch in batches()]


CAPACITY = data.rows_needed(ids(), FAR)


@functools.cache
def setting(tx, devices, rows):
    """A step for a table of some rows, which many tests share, and the first state."""
    own = dataset()._replace(tables=rows)
    config = models.DlrmConfig(width=4, bottom=(5,), top=(6,))
    model = config.make(own.inputs, own.outputs, core.Policy(), **own.given)
    task = train.supervised(model, optim.data_parallel(TX[tx]), own)
    mesh = task.mesh(devices)
    like = train.init_state(task, 0, mesh)
    return (
        train.train_step(task, mesh, like),
        mesh,
        lambda: train.init_state(task, 0, mesh),
    )


def finish(losses, state, rows):
    leaves = jax.device_get(trees.flatten(state.params))
    leaves.pop("table")
    return Trained(losses, rows, leaves)


@functools.cache
def whole(tx, devices):
    step, mesh, start = setting(tx, devices, dataset().tables)
    state, losses = start(), []
    for batch in batches():
        state, metrics = step(state, sharding.place_batch(batch, mesh))
        losses.append(float(metrics["loss"]))
    paths = list_row_leaves(state)
    rows = {path: np.asarray(trees.flatten(state)[path]) for path in paths}
    return finish(losses, state, rows)


def cached(tx, devices, streams, *, early=False):
    """Trains parts of the batches, each with moves of its own."""
    first = setting(tx, devices, dataset().tables)[2]()
    rows, state = train.split_rows(first, CAPACITY)
    step, mesh, _ = setting(tx, devices, (CAPACITY + 1,))
    store, losses, warm = data.RowStore(rows), [], 0
    for start, moves in streams:
        with train.RowCache(store, state, piece=8) as cache:
            moving = cache._put, cache._take
            known = [program._cache_size() for program in moving]
            for turn in data.assign_slots(moves, sum(dataset().tables), CAPACITY):
                if early:
                    cache.leave(state, turn)
                if turn.step >= 0:
                    state = cache.enter(state, turn.step)
                    batch = batches()[start + turn.step]
                    x = {**batch["x"], "ids": turn.slots.astype(np.int32)}
                    placed = sharding.place_batch({**batch, "x": x}, mesh)
                    state, metrics = step(state, placed)
                    losses.append(float(metrics["loss"]))
                    warm = step._cache_size() if len(losses) == 2 else warm
                if not early:
                    cache.leave(state, turn)
    assert step._cache_size() == warm
    # JAX keeps them for all caches, of whatever shapes.
    grown = [each._cache_size() - n for each, n in zip(moving, known, strict=True)]
    assert max(grown) <= 1
    assert len(state.params["table"]) == CAPACITY + 1 < sum(dataset().tables)
    return finish(losses, state, store.arrays), store


def lookahead(ahead, every=None, part=slice(None)):
    return data.lookahead_moves(ids()[part], sum(dataset().tables), ahead, every=every)


def check_equal(found, expected):
    assert found.losses == expected.losses
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert set(ours) == set(theirs)
        for path, leaf in theirs.items():
            np.testing.assert_array_equal(ours[path], leaf, err_msg=path)


@pytest.mark.acceptance("bagpipe", 1, 7)
@pytest.mark.parametrize("tx", TX)
@pytest.mark.parametrize(
    ("ahead", "every"), [(0, 1), (1, 1), (2, 1), (7, 1), (7, 6), (FAR, None), (50, 49)]
)
def test_losses_and_tables_are_those_of_the_whole_table_to_the_bit(tx, ahead, every):
    found, store = cached(tx, 1, [(0, lookahead(ahead, every))])
    check_equal(found, whole(tx, 1))
    fetched = sum(len(move.fetch) for move in lookahead(ahead, every))
    assert store.bytes_read == fetched * store.row_bytes == store.bytes_written


@pytest.mark.parametrize("policy", ["lru", "static"])
def test_the_peers_are_right_too(policy):
    if policy == "lru":
        moves = data.lru_moves(ids(), CAPACITY, 1)
    else:
        rows = sum(dataset().tables)
        hot = data.hottest_rows(ids(), rows, CAPACITY)
        moves = data.static_moves(ids(), hot)
    check_equal(cached("sgd", 1, [(0, moves)])[0], whole("sgd", 1))


@pytest.mark.acceptance("bagpipe", 1)
def test_four_trainers_are_as_one():
    found, _ = cached("row_adagrad", 4, [(0, lookahead(7))])
    for other in (whole("row_adagrad", 4), whole("row_adagrad", 1)):
        np.testing.assert_allclose(found.losses, other.losses, atol=1e-5)
        for path, leaf in other.rows.items():
            np.testing.assert_allclose(found.rows[path], leaf, atol=1e-5)


@pytest.mark.acceptance("bagpipe", 7)
def test_training_goes_on_from_the_store():
    parts = [(0, lookahead(7, part=slice(25))), (25, lookahead(3, part=slice(25, 60)))]
    check_equal(cached("row_adagrad", 1, parts)[0], whole("row_adagrad", 1))


@pytest.mark.acceptance("bagpipe", 1)
def test_rows_that_leave_too_early_are_wrong():
    found, _ = cached("sgd", 1, [(0, lookahead(7))], early=True)
    right = whole("sgd", 1)
    assert not np.array_equal(found.rows["params/table"], right.rows["params/table"])


@pytest.mark.parametrize(
    ("tx", "why"),
    [
        (optax.sgd(0.1, momentum=0.9), "changes rows that have no gradient"),
        (optax.adamw(0.1), "changes rows that have no gradient"),
        (optax.adam(0.1), "changes rows that have no gradient"),
        (
            optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1)),
            "changes rows that have no gradient",
        ),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "mixes rows"),
        (optax.chain(optim.clip_global_norm(1.0), optax.sgd(0.1)), "mixes rows"),
    ],
)
def test_optimizers_that_are_not_by_rows_are_refused(tx, why):
    with pytest.raises(ConfigError, match=f"got one that {why}"):
        optim.check_rows_apart(tx)


@pytest.mark.parametrize("tx", [*TX.values(), optax.adagrad(0.1)])
def test_optimizers_by_rows_are_admitted(tx):
    optim.check_rows_apart(tx)


def test_what_is_kept_otherwise_than_by_rows_is_refused():
    state = {"params": {"table": np.zeros((4, 2))}, "opt": {"table": np.zeros((2, 2))}}
    with pytest.raises(ConfigError, match=r"by its rows: got .*opt/table.*\(2, 2\)"):
        list_row_leaves(state)
    with pytest.raises(ConfigError, match=r"'rows' must be by its rows: got \{\}"):
        list_row_leaves(state, "rows")


def test_a_store_that_fails_is_told():
    first = setting("sgd", 1, dataset().tables)[2]()
    rows, state = train.split_rows(first, CAPACITY)

    def fail(count):
        raise OSError("no route")

    store = data.RowStore(rows, reading=fail)
    cache = train.RowCache(store, state, piece=8)
    turn = next(iter(data.assign_slots(lookahead(1), 120, CAPACITY)))
    cache.leave(state, turn)
    with pytest.raises(RuntimeError, match="rows were not moved"):
        cache.enter(state, 0)
    cache.close()


@pytest.mark.parametrize("by_row", [True, False])
def test_adagrad_is_its_definition(by_row):
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(5, 3, 4)).astype(np.float32)
    tx = (optim.scale_by_row_adagrad if by_row else optim.scale_by_adagrad)(eps=1e-3)
    state = tx.init({"table": grads[0]})
    total = np.zeros((3, 1))
    for each in grads:
        update, state = tx.update({"table": each}, state)
        square = np.square(each)
        total = total + (square.mean(1, keepdims=True) if by_row else square)
        expected = each / (np.sqrt(total) + 1e-3)
        np.testing.assert_allclose(update["table"], expected, rtol=1e-5)
