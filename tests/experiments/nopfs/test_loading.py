"""Files, processes and the simulator of NoPFS's table, in small."""

import pytest

from experiments.nopfs import loading, policies

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


def test_the_planner_chooses_who_keeps_what_by_the_links():
    tiny = {"files": 80, "batch_size": 16, "staging": 16}
    chosen = [
        loading.choose(small("clairvoyant", link=link, **tiny)) for link in (None, 5e5)
    ]
    assert chosen == ["first_touch", "frequency"]
    cfg = policies.Config(files=40, batch_size=8, epochs=3, staging=8)
    made = policies.run(cfg, None)
    assert "data_store" not in made["policy"]
    own = made.drop_sel(policy=["perfect", "auto"])
    assert float(own["seconds"].min()) == made["seconds"].sel(policy="auto")
    assert set(made["ideal"].sel(policy=["naive", "perfect"]).values >= 1) == {True}
