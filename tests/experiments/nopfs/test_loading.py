"""Files, processes and the simulator of NoPFS's table, in small."""

import numpy as np
import pytest

from experiments.nopfs import loading, policies
from hpcjax import data

SMALL = {
    "files": 200,
    "bytes": 20_000,
    "batch_size": 40,
    "epochs": 4,
    "rate": 4e6,
    "latency": 5e-3,
    "consume_rate": 2e6,
    "staging": 40,
}


def small(reading, **changes):
    return loading.Config(reading=reading, **SMALL | changes)


@pytest.mark.acceptance("nopfs", 8)
def test_the_simulator_says_of_a_short_run_what_the_table_claims_of_a_long_one():
    found = {name: loading.predict(small(name)) for name in ("clairvoyant", "naive")}
    ahead, own = (loading.predict(small(n)) for n in ("read_ahead", "own_memory"))
    ideal = 4 * 200 * 20_000 / 4 / 2e6
    lost = {name: each["seconds"] - ideal for name, each in found.items()}
    assert lost["clairvoyant"] < 0.6 * (ahead["seconds"] - ideal) < lost["naive"]
    assert found["clairvoyant"]["seconds"] < own["seconds"] < ahead["seconds"]
    assert found["clairvoyant"]["storage_reads"] < own["storage_reads"] < 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.acceptance("nopfs", 8)
def test_a_short_run_of_real_processes_loses_less_and_gets_the_same_batches():
    found = {
        name: loading.run(small(name), None)
        for name in ("naive", "read_ahead", "clairvoyant")
    }
    ours = found["clairvoyant"]
    assert ours["lost"] < 0.6 * found["read_ahead"]["lost"]
    assert ours["storage_reads"] < 0.8
    for each in found.values():
        assert each["digest"] == ours["digest"]
        assert each["digest"] != each["digest_reversed"]


def test_the_control_keeps_the_same_records_in_every_worker():
    cfg = policies.Config(files=40, batch_size=8, epochs=3)
    order = data.shuffled_epochs(40, 3, 0).reshape(-1, 8)
    stream = data.AccessStream(order, 40, 4)
    classes = [
        data.StorageClass("RAM", 10 * cfg.bytes, np.inf),
        data.StorageClass("SSD", 50 * cfg.bytes, 1.0),
    ]
    made = policies.plan_by_number(stream, cfg, classes)
    for held in made.held:
        assert [sorted(records) for records in held] == [[*range(10)], [*range(10, 40)]]
