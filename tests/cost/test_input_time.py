"""Simulated input against closed forms, bandwidths, and what must be less than what."""

import numpy as np
import pytest

from hpcjax import cost, data
from hpcjax.core.errors import ConfigError

EXAMPLES, EPOCHS, WORKERS, BATCH = 240, 5, 4, 24
SIZE, STORAGE, TRAINING = 1000, 40e3, 20e3
STREAM = data.AccessStream(
    data.shuffled_epochs(EXAMPLES, EPOCHS, 0).reshape(-1, BATCH), EXAMPLES, WORKERS
)
SIZES = np.full(EXAMPLES, SIZE)
STEPS, ROWS = EPOCHS * EXAMPLES // BATCH, BATCH // WORKERS
SYSTEM = cost.InputSystem(
    storage_rate=STORAGE,
    consume_rate=TRAINING,
    classes=(data.StorageClass("memory", EXAMPLES * SIZE // 5, np.inf),),
    network_rate=1e6,
    preprocess_rate=50e3,
    threads=4,
    staging=3 * ROWS,
)


def simulate(policy, system=SYSTEM, **more):
    return cost.simulate_input(policy, STREAM, SIZES, system, **more)


@pytest.mark.acceptance("nopfs", 7)
def test_the_perfect_and_the_naive_policy_are_their_closed_forms():
    perfect = simulate("perfect")
    assert perfect.total == pytest.approx(STEPS * ROWS * SIZE / TRAINING, rel=1e-9)
    assert perfect.stall == 0
    rates = {1: 15e3, 2: 25e3, 4: 36e3}  # four read at once
    naive = simulate("naive", SYSTEM._replace(storage_rate=rates, latency=0.003))
    each = SIZE / (36e3 / WORKERS) + 0.003 + SIZE / 50e3 + SIZE / TRAINING
    assert naive.total == pytest.approx(STEPS * ROWS * each, rel=1e-9)
    assert naive.epochs.sum() == pytest.approx(naive.total, rel=1e-9)
    assert naive.bytes == {
        "storage": EPOCHS * EXAMPLES * SIZE,
        "neighbours": 0,
        "memory": 0,
    }


@pytest.mark.acceptance("nopfs", 7)
def test_reading_ahead_is_as_fast_as_the_storage_but_for_filling_it():
    system = SYSTEM._replace(consume_rate=1e9, preprocess_rate=np.inf)
    ahead = simulate("read_ahead", system)
    limit = EPOCHS * EXAMPLES * SIZE / STORAGE
    fill = SYSTEM.staging * WORKERS * SIZE / STORAGE
    assert limit <= ahead.total <= limit + fill


@pytest.mark.acceptance("nopfs", 7)
@pytest.mark.parametrize("policy", ["naive", "read_ahead", "data_store", "clairvoyant"])
def test_no_link_is_faster_than_it_is(policy):
    room = data.StorageClass("memory", EXAMPLES * SIZE, np.inf)
    slow = SYSTEM._replace(classes=(room,), network_rate=8e3)
    times = simulate(policy, slow)
    assert times.bytes["storage"] / times.total <= STORAGE * (1 + 1e-9)
    assert times.bytes["neighbours"] / WORKERS / times.total <= 8e3 * (1 + 1e-9)
    again = simulate(policy, slow)
    assert again.total == times.total
    read = sum(times.bytes.values())
    assert read >= EPOCHS * EXAMPLES * SIZE


def test_what_leaves_one_worker_shares_its_link():
    """One keeps all: what it lets out bounds all, what comes in bounds each of them."""
    nothing = np.array([], int)
    plan = data.Plan(((np.arange(EXAMPLES),), *[(nothing,)] * 3), EXAMPLES)
    room = data.StorageClass("memory", EXAMPLES * SIZE, np.inf)
    system = SYSTEM._replace(classes=(room,), storage_rate=1e6, consume_rate=1e6)
    out, into = (
        simulate("clairvoyant", system._replace(**{end: 8e3}), placement=plan)
        for end in ("send_rate", "network_rate")
    )
    sent = out.bytes["neighbours"]
    assert 0.9 * 8e3 <= sent / out.total <= 8e3 * (1 + 1e-9)
    assert out.total > 2.5 * into.total


def test_one_worker_with_one_thread_is_a_loop_by_hand():
    """Memory for all: the first epoch at the storage's pace, the rest at training's."""
    order = data.shuffled_epochs(12, 3, 0).reshape(-1, 4)
    stream = data.AccessStream(order, 12, 1)
    system = cost.InputSystem(
        storage_rate=10.0,
        consume_rate=30.0,
        classes=(data.StorageClass("memory", 120, np.inf),),
        staging=8,
    )
    times = cost.simulate_input("clairvoyant", stream, np.full(12, 10), system)
    # One staging thread and the one that fills the memory share the storage; records
    # come one a second, the last of epoch 1 at 12 s, and a batch of 4 takes 4/3 s.
    assert times.epochs[0] == pytest.approx(12 + 4 / 3, abs=1.1)
    assert times.epochs[1:].sum() == pytest.approx(8.0, abs=1.1)
    assert times.bytes["storage"] == 120


@pytest.mark.parametrize("threads", [1, 3])
def test_a_slow_ssd_is_read_no_faster_than_it_reads(threads):
    ssd = data.StorageClass("SSD", EXAMPLES * SIZE, 5e3, threads)
    system = SYSTEM._replace(classes=(ssd,), threads=1, preprocess_rate=np.inf)
    times = simulate("data_store", system)
    # After the first epoch a thread takes `threads` · size / rate for each record.
    records = (EPOCHS - 1) * EXAMPLES / WORKERS
    assert times.total >= 0.9 * records * threads * SIZE / 5e3


def test_a_data_store_is_as_fast_as_the_class_that_has_room():
    ram = data.StorageClass("RAM", 10 * SIZE, np.inf)
    ssd = data.StorageClass("SSD", EXAMPLES * SIZE, 2e3)
    fast = simulate(
        "data_store", SYSTEM._replace(classes=(ssd._replace(read_rate=1e9),))
    )
    slow = simulate("data_store", SYSTEM._replace(classes=(ram, ssd)))
    assert slow.total > 1.5 * fast.total


def test_who_keeps_nothing_reads_each_record_anew():
    order = np.array([[0, 0, 0, 0]] * 3)  # all that is read is on its way already
    stream = data.AccessStream(order, 1, 1)
    system = SYSTEM._replace(staging=12)
    times = cost.simulate_input("read_ahead", stream, np.array([SIZE]), system)
    assert times.bytes["storage"] == 12 * SIZE


def test_what_is_kept_and_asked_for_saves_time():
    perfect = simulate("perfect").total
    ours = simulate("clairvoyant")
    own = simulate("clairvoyant", neighbours=False)
    ahead = simulate("read_ahead")
    assert perfect < ours.total < own.total < ahead.total
    assert ours.bytes["storage"] < own.bytes["storage"] < ahead.bytes["storage"]
    assert own.bytes["neighbours"] == 0


def test_first_touch_is_a_data_store_whose_memory_is_full():
    """Both keep what is read first, one by a plan, the other as it comes."""
    room = data.StorageClass("memory", EXAMPLES * SIZE // WORKERS, np.inf)
    store, planned = (
        simulate(policy, SYSTEM._replace(classes=(room,)), placement="first_touch")
        for policy in ("data_store", "clairvoyant")
    )
    assert store.bytes["storage"] == EXAMPLES * SIZE
    assert planned.bytes["storage"] == pytest.approx(EXAMPLES * SIZE, rel=0.01)
    assert planned.total == pytest.approx(store.total, rel=0.02)


@pytest.mark.parametrize(
    ("network", "neighbours", "fastest"),
    [
        (1e6, True, "first_touch"),
        (6e3, True, "frequency"),
        (1e6, False, "frequency"),
    ],
)
def test_frequency_pays_where_neighbours_are_slow(network, neighbours, fastest):
    system = SYSTEM._replace(network_rate=network)
    chosen = cost.choose_placement(STREAM, SIZES, system, neighbours=neighbours)
    assert chosen == fastest


def test_a_plan_can_be_given():
    nothing = data.Plan(((np.array([], int),),) * WORKERS, EXAMPLES)
    times = simulate("clairvoyant", placement=nothing)
    assert times.total == pytest.approx(simulate("read_ahead").total, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate("best"), "policy must be one of"),
        (lambda: simulate("data_store"), "must hold all 240000 bytes"),
        (
            lambda: simulate("read_ahead", SYSTEM._replace(staging=ROWS - 1)),
            "staging must hold a batch of 6 records of a worker: got staging=5",
        ),
        (
            lambda: simulate(
                "clairvoyant",
                SYSTEM._replace(classes=(data.StorageClass("SSD", 9, 0.0),)),
            ),
            "a class must have a read_rate",
        ),
        (
            lambda: simulate("clairvoyant", placement=data.Plan(((),), EXAMPLES)),
            "a plan must be of the workers and classes: got workers=4, classes=1",
        ),
        (
            lambda: cost.simulate_input("naive", STREAM, 0 * SIZES, SYSTEM),
            "sizes must be positive",
        ),
        (
            lambda: simulate("naive", SYSTEM._replace(storage_rate={})),
            "storage_rate must be a rate",
        ),
        (
            lambda: simulate("naive", SYSTEM._replace(consume_rate=0.0)),
            "consume_rate must be positive: got consume_rate=0",
        ),
        (
            lambda: simulate("naive", SYSTEM._replace(storage_rate={1: 1.0, 2: -1.0})),
            "storage_rate2 must be positive",
        ),
        (
            lambda: simulate("naive", SYSTEM._replace(staging=0)),
            "staging must be an integer",
        ),
        (
            lambda: cost.simulate_input("naive", STREAM, SIZES[:3], SYSTEM),
            "sizes must hold one for each record",
        ),
    ],
)
def test_systems_that_cannot_be_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
