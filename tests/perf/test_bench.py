"""The harness, with a clock that is told how long each candidate takes."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hpcjax.core.errors import ConfigError
from hpcjax.perf import bench


class Lab:
    """A fake clock, and candidates that let it run on."""

    def __init__(self):
        self.now, self.calls = 100.0, []

    def clock(self):
        return self.now

    def candidate(self, name, durations):
        durations = iter(durations)

        def thunk():
            self.calls.append(name)
            self.now += next(durations)

        return thunk


def test_every_measurement_is_kept_in_its_round():
    lab = Lab()
    candidates = {
        "a": lab.candidate("a", [9, 9, 1, 2, 3, 4]),
        "b": lab.candidate("b", [9, 9, 10, 20, 30, 40]),
    }
    made = bench.compare(candidates, "a", repetitions=4, warmup=2, clock=lab.clock)
    assert made["seconds"].dims == ("candidate", "repetition")
    np.testing.assert_allclose(made["seconds"].sel(candidate="a"), [1, 2, 3, 4])
    np.testing.assert_allclose(made["seconds"].sel(candidate="b"), [10, 20, 30, 40])
    assert made.attrs == {
        "source": "measured",
        "baseline": "a",
        "warmup": 2,
        "inner": 1,
        "drift": pytest.approx(4 / 3),  # 1, 2 and then 3, 4; 10, 20 and then 30, 40
    }


@pytest.mark.acceptance("how-to-train", 7)
@pytest.mark.parametrize("last", [2.05, 2.2])
def test_times_that_drift_are_told_as_unstable(last, caplog):
    """Interleaved and repeated to the end: 2.5 % are steady, 10 % are not."""
    lab = Lab()
    slower = [9, *[2.0] * 10, *[last] * 10]
    candidates = {
        "steady": lab.candidate("steady", [9, *[1.0] * 20]),
        "other": lab.candidate("other", slower),
    }
    made = bench.compare(
        candidates, "steady", repetitions=20, warmup=1, clock=lab.clock
    )
    assert made.attrs["drift"] == pytest.approx(last / 2 - 1)
    assert ("unstable: the median of other" in caplog.text) == (last > 2.1)


@pytest.mark.acceptance("how-to-train", 7)
def test_the_order_rotates_so_that_each_is_first_equally_often():
    lab = Lab()
    names = "abc"
    candidates = {name: lab.candidate(name, [1] * 6) for name in names}
    bench.compare(candidates, "a", repetitions=6, warmup=0, clock=lab.clock)
    rounds = ["".join(lab.calls[start : start + 3]) for start in range(0, 18, 3)]
    assert rounds == ["abc", "bca", "cab"] * 2


@pytest.mark.slow
def test_inner_calls_are_averaged():
    lab = Lab()
    thunk = lab.candidate("a", [1, 2, 3, 5, 6, 7])
    made = bench.compare(
        {"a": thunk}, "a", repetitions=2, warmup=0, inner=3, clock=lab.clock
    )
    np.testing.assert_allclose(made["seconds"].values, [[2, 6]])


@pytest.mark.slow
def test_results_are_waited_for_before_the_clock_is_read(monkeypatch):
    lab, waited = Lab(), []

    def ready(value):
        waited.append(value)
        lab.now += 1

    monkeypatch.setattr(bench.jax, "block_until_ready", ready)
    made = bench.compare(
        {"a": lambda: "result"}, "a", repetitions=3, warmup=1, clock=lab.clock
    )
    assert waited == ["result"] * 4
    np.testing.assert_allclose(made["seconds"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_while_timing_and_then_as_before(enabled):
    seen = []

    def thunk():
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise RuntimeError("in the candidate")

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="in the candidate"):
            bench.compare({"a": thunk}, "a")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False] * 3


@pytest.mark.slow
@pytest.mark.faults(26)
def test_a_drifting_machine_does_not_move_the_ratio():
    lab = Lab()
    drift = np.linspace(1, 5, 20)
    candidates = {
        "base": lab.candidate("base", drift),
        "twice": lab.candidate("twice", 2 * drift),
    }
    made = bench.compare(candidates, "base", warmup=0, clock=lab.clock)
    found = bench.ratios(made)
    assert found["base"] == (1.0, 1.0, 1.0, 20)
    np.testing.assert_allclose(found["twice"][:3], 2.0)
    assert found["twice"].rounds == 20


def dataset(values):
    lab = Lab()
    candidates = {
        "base": lab.candidate("base", [1.0] * len(values)),
        "other": lab.candidate("other", values),
    }
    return bench.compare(
        candidates, "base", repetitions=len(values), warmup=0, clock=lab.clock
    )


@pytest.mark.slow
def test_the_interval_is_that_of_resampled_medians():
    draw = np.random.default_rng(5)
    values = draw.lognormal(size=25)
    found = bench.ratios(dataset(values), seed=1)["other"]
    assert found.median == pytest.approx(np.median(values))
    resampled = draw.choice(values, size=(20_000, 25))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    ordered = np.sort(values)
    spacing = np.diff(ordered).max()  # medians jump between neighbours
    assert abs(found.low - low) <= spacing
    assert abs(found.high - high) <= spacing
    assert found.low <= found.median <= found.high
    assert bench.ratios(dataset(values), seed=1)["other"] == found
    wider = bench.ratios(dataset(values), seed=1, confidence=0.999)["other"]
    assert wider.low < found.low < found.high < wider.high


@pytest.mark.slow
def test_impossible_settings_are_refused():
    thunks = {"baseline": lambda: 0}
    with pytest.raises(ConfigError, match="did you mean 'baseline'"):
        bench.compare(thunks, "basline")
    for setting in ({"repetitions": 0}, {"warmup": -1}, {"inner": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(setting))} must be"):
            bench.compare(thunks, "baseline", **setting)
    with pytest.raises(ConfigError, match="at least 2 repetitions: got 1"):
        bench.ratios(dataset([1.0]))
    with pytest.raises(ConfigError, match=r"confidence must be in \(0, 1\): got 95\.0"):
        bench.ratios(dataset([1.0, 2.0]), confidence=95.0)


def test_a_stepper_carries_donated_state_and_leaves_the_callers():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    count = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec("d")))
    state = {"count": count, "key": jax.random.key(0), "host": 3}

    @jax.jit
    def plain(state, batch):
        return {**state, "count": state["count"] + batch}, state["count"].sum()

    donating = jax.jit(plain, donate_argnums=0)
    call = bench.stepper(donating, state, jnp.float32(2.0))
    for turn in range(3):
        now, total = call()
        np.testing.assert_array_equal(now["count"], np.full(8, 2.0 * (turn + 1)))
        assert float(total) == 8 * 2.0 * turn
    assert now["count"].sharding.is_equivalent_to(count.sharding, 1)
    np.testing.assert_array_equal(state["count"], np.zeros(8))  # not donated


@pytest.mark.faults(26)
def test_compilation_is_timed_apart_and_not_from_the_cache(tmp_path):
    ticks = iter([10.0, 12.5, 0.0, 1.0])
    before = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        made = bench.compile_seconds(
            lambda x: x * 2 + 0.123, shape, clock=ticks.__next__
        )
        assert made.seconds == 2.5
        assert list(tmp_path.iterdir()) == []
        again = bench.compile_seconds(jax.jit(jnp.sin), shape, clock=ticks.__next__)
        assert again.seconds == 1.0
        jax.jit(lambda x: x * 3 + 0.321).lower(shape).compile()
        assert list(tmp_path.iterdir()) != []  # the cache works again
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        bench.compilation_cache.reset_cache()
    np.testing.assert_allclose(made.program(jnp.ones(3)), 2.123, rtol=1e-6)


def test_calls_of_a_chain_wait_for_each_other_and_hold_no_constants():
    """Their operands are arguments of the program, and no call is left out."""
    x, rows = jnp.ones((2, 3)), [jnp.full((3, 4), 2.0), jnp.full((3, 4), 3.0)]
    seen = []

    def call(x, operands, number):
        seen.append(number)
        return x @ operands[number % 2]

    thunk = bench.chain_calls(call, x, rows, 5)
    np.testing.assert_allclose(thunk(), x)
    thunk()
    assert seen == [0, 1, 2, 3, 4]  # traced once
    huge = bench.chain_calls(lambda x, _, number: jnp.full((2, 1), 1e30), x, rows, 2)
    np.testing.assert_allclose(huge(), 3.0)


@pytest.mark.slow
def test_what_takes_a_measurement_may_be_told():
    seconds = {"a": 2.0, "b": 3.0}
    thunks = {name: (lambda taken=taken: taken) for name, taken in seconds.items()}
    made = bench.compare(thunks, "a", repetitions=2, take=lambda thunk: thunk())
    assert made["seconds"].values.tolist() == [[2.0, 2.0], [3.0, 3.0]]
