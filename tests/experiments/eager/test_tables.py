"""eager-SGD's tables and task: what they show of known figures."""

import contextlib
import importlib
import json
import os
import pathlib
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.eager import latency, scaling, tables, throughput, training
from experiments.eager.hyperplane import Hyperplane
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import inject_delays, start_processes
from hpcjax.runs import discover
from tests.experiments import rows
from tests.experiments.rows import verdicts

MODES = list(tables.MODES)
ROOT = pathlib.Path(tables.__file__).parents[2]


def timed(total, fresh=4.5, foretold=None):
    """Runs of three turns; each mode's seconds, the same in all but for a drift."""
    drift = np.array([1.0, 1.1, 1.2])[:, None]
    totals = drift * np.array(total)
    return rows.run(
        {"mode": MODES, "repetition": range(3)},
        total=("repetition mode", totals),
        fresh=("repetition mode", np.full_like(totals, fresh)),
        contributors=("repetition mode", np.full_like(totals, 6)),
        staleness=("repetition mode", np.full_like(totals, 2)),
        foretold=("mode", np.array(foretold or total) * 1.1),
        **{"round": 0.01, "ping": 1e-4, "pong": 1e-3},
    )


def test_throughput_is_compared_turn_by_turn_and_judged():
    given = {name: timed([6.0, 3.0, 2.0]) for name in tables.DELAYS}
    given["no delay"] = timed([1.0, 1.0, 1.2])
    table = tables.throughput(given)
    assert table["faster"].sel(row="one 300 ms, solo") == pytest.approx(3.0)
    found = verdicts(tables.THROUGHPUT, table)
    assert found["solo"] == (pytest.approx(3.0), True)
    assert found["majority"] == (pytest.approx(2.0), True)
    assert found["no delay"] == (pytest.approx(1 / 1.2), True)
    assert found["model"] == (pytest.approx(0.0), True)
    assert found["fresh least"][1]
    assert found["fresh most"][1]
    given["one 200 ms"] = timed([3.0, 2.9, 2.0], foretold=[3.0, 2.9, 3.0])
    given["all 50 to 400 ms"] = timed([6.0, 3.0, 2.0], fresh=5.8)
    given["no delay"] = timed([1.0, 1.0, 1.3])
    found = verdicts(tables.THROUGHPUT, tables.throughput(given))
    assert [name for name, (_, holds) in found.items() if holds] == ["fresh least"]
    assert found["model"][0] == pytest.approx(1 / 3)


def test_a_sleeper_is_judged_by_the_others_time():
    seconds = {
        "awake": [[1.5, 1.5, 1.0], [1.5, 1.5, 1.0], [1.5, 1.5, 9.0]],
        "asleep": [[6.0, 3.0, 1.1], [6.0, 3.0, 1.2], [6.0, 3.0, 1.0]],
    }
    given = {
        name: rows.run({"mode": MODES}, others=("repetition mode", others))
        for name, others in seconds.items()
    }
    table = tables.sleeper(given)
    assert table["left"].sel(row="sync") == pytest.approx(0.25)
    assert verdicts(tables.SLEEPER, table)["solo"] == (
        pytest.approx(1 / 1.1),
        True,
    )
    given["asleep"] *= 1.02
    assert not verdicts(tables.SLEEPER, tables.sleeper(given))["solo"][1]


def test_latency_is_claimed_of_small_messages_only():
    run = rows.run(
        {"mode": MODES, "bytes": [64, 4_194_304]},
        latency=("mode bytes", [[8e-3, 9e-2], [5e-3, 9.5e-2], [2e-3, 1.0]]),
        fresh=("mode bytes", [[8.0, 8.0], [4.5, 6.0], [1.5, 5.0]]),
        ping=("bytes", [1e-4, 2e-3]),
    )
    found = verdicts(tables.LATENCY, tables.latency({"all": run}))
    assert found["solo"] == (pytest.approx(0.4), True)
    assert found["majority"] == (pytest.approx(5 / 8), True)
    assert found["fresh"] == (1.5, True)


def test_training_is_compared_seed_by_seed():
    """Sync halves its loss to 1, to 2 in step 2; majority in step 1, solo never."""
    loss = [[8.0, 4.0, 2.0, 1.0], [8.0, 2.0, 1.5, 1.01], [8.0, 5.0, 4.0, 3.0]]
    seconds = [[0.0, 1.0, 2.0, 3.0], [0.0, 0.5, 1.0, 1.5], [0.0, 0.1, 0.2, 0.3]]
    runs = rows.run(
        {"mode": MODES},
        seeds=(0, 1, 2),
        loss=("mode step", loss),
        seconds=("mode step", seconds),
        total=("mode", [3.0, 1.5, 0.3]),
        staleness=("mode", [0.0, 1.0, 2.0]),
    )
    table = tables.hyperplane({"all": runs, "newest": runs})
    assert np.isinf(table["sooner"].sel(row="all, solo"))
    found = verdicts(tables.HYPERPLANE, table)
    assert found["loss"] == (pytest.approx(1.01), True)
    assert found["sooner"] == (pytest.approx(0.25), True)
    assert found["staleness"] == (1.0, True)


@pytest.mark.acceptance("eager-sgd", 9)
def test_the_simulated_table_holds():
    configs = {f"P={p}": scaling.Config(processes=p, runs=5) for p in tables.SIZES}
    found = {name: scaling.run(cfg, None) for name, cfg in configs.items()}
    assert all(run.attrs["source"] == "simulated" for run in found.values())
    table = tables.scaling({n: run.expand_dims(seed=[0]) for n, run in found.items()})
    found = verdicts(tables.SCALING, table)
    assert all(holds for _, holds in found.values())
    # Sync pays the delay in every step.
    delays = inject_delays("random_one", 200, 8, delay=0.2)
    assert table["seconds"].sel(row="P=8, sync") > delays.max(1).sum()


def test_shards_are_of_one_map_and_each_of_its_own_points():
    task = Hyperplane(dims=20, points=4000, batch=40, noise=0.1)
    shards = [task.shard(3, rank, 4) for rank in range(4)]
    truth = task.truth(3)
    for x, y in shards:
        assert x.shape == (1000, 21)
        assert (x[:, -1] == 1).all()
        assert np.std(y - x @ truth) == pytest.approx(0.1, rel=0.1)
    assert np.unique([x[0, 0] for x, _ in shards]).size == 4
    with pytest.raises(ConfigError, match="whole batches, and these a multiple of 3"):
        task.shard(3, 0, 3)


@pytest.mark.parametrize(
    ("config", "wrong", "words"),
    [
        (training.Config, {"processes": 3}, "a multiple of 3: got points=32768"),
        (latency.Config, {"bytes": ()}, "bytes must be an integer >= 4"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(config, wrong, words):
    with pytest.raises(ConfigError, match=words):
        config(**wrong)


@pytest.mark.parametrize("module", [throughput, training, scaling])
def test_no_config_asks_for_delays_that_it_cannot_hold(module):
    """A recorded table is no text: it is for callers of `inject_delays`."""
    hint = typing.get_type_hints(module.Config)["pattern"]
    for pattern in typing.get_args(hint):
        assert inject_delays(pattern, 3, 4, delay=0.1).shape == (3, 4)


def test_the_expected_loss_is_that_of_many_points():
    task = Hyperplane(dims=20, points=40_000, batch=40_000, noise=0.5)
    x, y = task.shard(0, 0, 1)
    params = jnp.zeros(21)
    loss, grads = task.gradient(1)(params, x, y, 0)
    assert float(loss) == pytest.approx(float(task.excess(0)(params)), rel=0.05)
    np.testing.assert_allclose(grads, x.T @ (x @ np.zeros(21) - y) / len(x), rtol=1e-3)
    assert float(task.excess(0)(task.truth(0))) == pytest.approx(0.125)
    small = Hyperplane(dims=3, points=12, batch=8)
    with pytest.raises(ConfigError):
        small.shard(0, 0, 2)


def test_batches_follow_each_other_epoch_after_epoch():
    task = Hyperplane(dims=3, points=16, batch=8)
    x, y = task.shard(0, 1, 2)
    gradient = task.gradient(2)
    params = jnp.ones(4)
    for step in range(5):
        rows = slice(4 * (step % 2), 4 * (step % 2) + 4)
        loss, _ = gradient(params, x, y, step)
        want = np.mean((x[rows] @ np.ones(4) - y[rows]) ** 2) / 2
        assert loss == pytest.approx(want, rel=1e-5)


MEASURED = {"eager/throughput", "eager/latency", "eager/training"}


@pytest.mark.slow
@pytest.mark.acceptance("eager-sgd", 9)
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(MEASURED))
def test_times_are_of_a_process_for_each_rank(name, monkeypatch):
    """No replay, and no threads in the place of processes."""
    crews = []

    @contextlib.contextmanager
    def watched(*args, **options):
        with start_processes(*args, **options) as crew:
            crews.append({process.pid for process in crew.processes})
            yield crew

    monkeypatch.setattr("hpcjax.hostcomm._launch.start_processes", watched)
    monkeypatch.delattr("hpcjax.averaging._eager_replay.Replay")
    module = importlib.import_module(f"experiments.{name.replace('/', '.')}")
    entry = next(each for each in discover.find_configs(ROOT) if each.name == name)
    cfg = discover.load(name, entry.small(), ROOT).config
    made = module.run(cfg, None)
    (crew,) = crews
    assert len(crew - {os.getpid()}) == cfg.processes
    assert made.attrs["source"] == "measured"


@pytest.mark.acceptance("eager-sgd", 9)
def test_only_what_runs_in_processes_is_called_measured():
    of_processes = tables.THROUGHPUT, tables.SLEEPER, tables.LATENCY, tables.HYPERPLANE
    for table in (*of_processes, tables.SCALING):
        for name, tier in table.tiers.items():
            configs = {each.config.partition(":")[0] for each in tier.runs.values()}
            assert configs <= (MEASURED if name == "cpu" else {"eager/scaling"})
    for path in ROOT.glob("experiments/eager/results/*.json"):
        found = json.loads(path.read_text())
        source = "simulated" if found["tier"] == "model" else "measured"
        assert found["source"] == source


def test_recorded_throughput_is_of_the_default_setup():
    path = ROOT / "experiments/eager/results/throughput.cpu.json"
    found = json.loads(path.read_text())
    assert found["source"] == "measured"
    cfg = throughput.Config()
    assert (cfg.processes, cfg.base, cfg.delay, cfg.limiter) == (8, 0.02, 0.2, 0)
    assert cfg.numbers * 4 == 1_000_000
    assert cfg.steps >= 25
    assert cfg.repetitions >= 3
    cells = found["cells"]
    late = "one 200 ms, "
    assert cells[f"{late}solo.faster"] >= 2.0
    assert cells[f"{late}majority.faster"] >= 1.4
    assert cells["no delay, solo.faster"] >= 0.8
    assert 3.8 <= cells["all 50 to 400 ms, majority.fresh"] <= 5.7
    assert all(claim["holds"] for claim in found["claims"].values())
    given = {run["row"]: run["overrides"] for run in found["runs"]}
    assert given["no delay"].pop("pattern") == "none"
    assert given["one 200 ms"].pop("pattern", "random_one") == "random_one"
    assert given["one 200 ms"].pop("delay", "0.2") == "0.2"
    assert given["no delay"] == given["one 200 ms"] == {"seed": "0"}
    skewed = given["all 50 to 400 ms"]
    assert (skewed["pattern"], skewed["delay"]) == ("linear_skew", "0.05")
    assert int(skewed["steps"]) >= 100
