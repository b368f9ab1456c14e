"""Every exchange: devices against hosts, sums against numpy, states and errors."""

import dataclasses
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import collectives, optim, sharding
from hpcjax.collectives import (
    DenseConfig,
    GaussianKConfig,
    GTopkConfig,
    HalfConfig,
    HostGroup,
    MeshGroup,
    MsTopKConfig,
    OkTopkConfig,
    PowerSgdConfig,
    RandomKConfig,
    SignConfig,
    TopKConfig,
    TopkDsaConfig,
    TorusConfig,
    entries_wanted,
)
from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import connected
from hpcjax.perf import ring_bytes
from tests.collectives.exchanges import on_hosts, on_mesh, program
from tests.hostcomm.threads import in_threads
from tests.oracles import sparse_all_reduce as oracle

DENSITY = 0.05
SPARSE = {
    "top_k": TopKConfig(density=DENSITY),
    "gaussian_k": GaussianKConfig(density=DENSITY),
    "ms_top_k": MsTopKConfig(density=DENSITY),
    "regional": TopkDsaConfig(density=DENSITY, capacity_factor=4.0),
    "regional_dense": TopkDsaConfig(density=0.3, capacity_factor=4.0),
    "global": GTopkConfig(density=DENSITY, exact_residual=True),
    "random_k": RandomKConfig(density=DENSITY),
}
CONSERVING = SPARSE | {
    "half": HalfConfig(),
    "signs": SignConfig(error_feedback=True),
    "ok_topk": OkTopkConfig(density=DENSITY, tau=2, tau_prime=3, capacity_factor=80.0),
}
ALL = CONSERVING | {
    "dense": DenseConfig(),
    "votes": SignConfig(),
    "warm_up": TopKConfig(density=DENSITY, dense_steps=2),
    "lossy": GTopkConfig(density=DENSITY),
    "torus": TorusConfig(),
    "rows_columns": TorusConfig(algorithm="rows_columns"),
}
MEMBERS, LENGTH = 4, 300
# Words beside entries: 31 counts and more in an exact step of Ok-Topk; short vectors go
# by recursive doubling, two times n words instead of 1.5.
BOOKKEEPING = {"ok_topk": 128 + 8 * MEMBERS, "dense": 160, "half": 90, "warm_up": 160}


def numbers(seed=1, steps=4, members=MEMBERS, n=LENGTH):
    """Integers, with ties."""
    draws = np.random.default_rng(seed).integers(-50, 51, (steps, members, n))
    return draws.astype(np.float32)


@pytest.mark.quick("dense", "signs", "random_k", "top_k", "ok_topk")
@pytest.mark.parametrize("name", ALL)
def test_devices_and_hosts_agree(name):
    given = numbers()
    mesh, host = on_mesh(ALL[name], given), on_hosts(ALL[name], given)
    for one, other in zip(mesh, host, strict=True):
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-6, atol=1e-6)
        if one.residual is not None:
            np.testing.assert_allclose(one.residual, other.residual, atol=1e-4)
        for field in one.stats._fields:
            same = getattr(one.stats, field), getattr(other.stats, field)
            np.testing.assert_array_equal(*same, err_msg=field)
        # What a rank has sent is what it says, and some counts and flags.
        extra = other.words - other.stats.sent_words
        assert (extra >= 0).all()
        assert (extra <= BOOKKEEPING.get(name, 40)).all()


@pytest.mark.quick("half", "signs", "random_k")
@pytest.mark.parametrize("name", CONSERVING)
def test_what_is_not_sent_is_kept(name):
    given, carried = numbers(2), np.zeros((MEMBERS, LENGTH))
    for vectors, step in zip(given, on_mesh(CONSERVING[name], given), strict=True):
        left = step.mean.astype(np.float64) * MEMBERS + step.residual.sum(0)
        np.testing.assert_allclose(left, (carried + vectors).sum(0), atol=2e-3)
        carried = step.residual
        assert step.stats.lost.sum() == 0


def test_published_merges_lose_what_they_count():
    lost, missing = 0, 0.0
    for seed in range(3):
        given = numbers(seed, steps=1)
        (step,) = on_mesh(ALL["lossy"], given)
        left = step.mean.astype(np.float64) * MEMBERS + step.residual.sum(0)
        missing += np.abs(left - given[0].sum(0)).sum()
        lost += step.stats.lost.sum()
    assert lost > 0
    assert missing > 0


def test_top_k_equals_an_oracle():
    (given,), (step,) = numbers(3, 1), on_mesh(SPARSE["top_k"], numbers(3, 1))
    k, total = int(DENSITY * LENGTH), np.zeros(LENGTH)
    for vector, rest in zip(given, step.residual, strict=True):
        own = oracle.top(vector, k)
        total[own] += vector[own]
        vector[own] = 0
        np.testing.assert_array_equal(rest, vector)
    np.testing.assert_array_equal(step.mean * MEMBERS, total)


def test_regions_add_up_as_gathering_does():
    for density in (DENSITY, 0.3):
        given = numbers(4)
        config = TopkDsaConfig(density=density, capacity_factor=4.0)
        regional = on_mesh(config, given)
        gathered = on_hosts(TopKConfig(density=density), given)
        for one, other in zip(regional, gathered, strict=True):
            np.testing.assert_array_equal(one.mean, other.mean)
            np.testing.assert_array_equal(one.residual, other.residual)


def test_merges_keep_the_largest_of_two():
    """Two members: one merge, so that the result is that of an exact joint top-k."""
    (given,), k = numbers(5, 1, members=2), int(DENSITY * LENGTH)
    (step,) = on_mesh(SPARSE["global"], given[None])
    total, rest = oracle.ok_topk(given, k)
    np.testing.assert_array_equal(step.mean * 2, total)
    np.testing.assert_array_equal(step.residual.sum(0), rest.sum(0))


@pytest.mark.acceptance("gradcomp-utility", 1)
def test_sampled_entries_are_added_up_by_index():
    given = numbers(9, 1)
    (step,) = on_mesh(SPARSE["ms_top_k"], given)
    sent = np.where(step.residual == 0, given[0], 0)
    np.testing.assert_array_equal(step.mean * MEMBERS, sent.sum(0))
    assert (np.sum(sent != 0, axis=1) <= int(DENSITY * LENGTH)).all()


BYTES = {
    "dense": (DenseConfig(), lambda n, k, p: 8 * n * (p - 1) / p),
    "half": (HalfConfig(), lambda n, k, p: 4 * n * (p - 1) / p),
    "top_k": (TopKConfig(density=0.01), lambda n, k, p: 8 * k * (p - 1)),
    "ms_top_k": (MsTopKConfig(density=0.01), lambda n, k, p: 8 * k * (p - 1)),
    "random_k": (RandomKConfig(density=0.01), lambda n, k, p: 8 * k * (p - 1) / p),
    "signs": (SignConfig(), lambda n, k, p: n * (p - 1) / 8),
}


@pytest.mark.quick("dense", "signs", "half")
@pytest.mark.acceptance("gradcomp-utility", 3)
@pytest.mark.parametrize("name", BYTES)
def test_programs_send_what_the_formulas_say(name):
    config, formula = BYTES[name]
    n, members = 200_000, 4
    state, step = program(config, members, n)
    compiled = step.lower(np.zeros((members, n), np.float32), state).compile()
    expected = formula(n, n // 100, members)
    assert 4 * config.make().words({"w": np.zeros(n)}, members) == expected
    assert abs(ring_bytes(compiled, members) / expected - 1) <= 0.01


def test_votes_are_the_majoritys():
    given = numbers(10, 1)
    (step,) = on_mesh(SignConfig(), given)
    votes = np.where(given[0] >= 0, 1, -1).sum(0)
    np.testing.assert_array_equal(step.mean, np.sign(votes))
    assert (step.mean == 0).any()


@pytest.mark.acceptance("oktopk", 9)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("backend", [on_mesh, on_hosts])
@pytest.mark.parametrize("name", ALL)
def test_numbers_that_are_not_finite_change_nothing(name, bad, backend):
    given = numbers(15, 3)
    given[1, 2, 17] = bad  # of one member only
    config = ALL[name]
    made = backend(config, given)
    # A skipped average is one of the first, dense ones all the same.
    fewer = dataclasses.replace(config, dense_steps=max(0, config.dense_steps - 1))
    skipped = backend(fewer, given[[0, 2]])
    assert made[1].stats.nonfinite.tolist() == [1] * MEMBERS
    assert not made[1].mean.any()
    np.testing.assert_array_equal(made[1].residual, made[0].residual)
    np.testing.assert_array_equal(made[2].mean, skipped[1].mean)
    np.testing.assert_array_equal(made[2].residual, skipped[1].residual)
    assert made[2].stats.nonfinite.sum() == 0


def test_a_nan_among_many_numbers_is_found():
    """XLA's extremes of 4096 numbers and more are on a CPU those without NaN."""
    given = numbers(steps=1, n=5000)
    given[0, 2, 17] = np.nan
    (made,) = on_mesh(HalfConfig(), given)
    assert made.stats.nonfinite.tolist() == [1] * MEMBERS
    assert not made.mean.any()


@pytest.mark.quick("warm_up")
@pytest.mark.acceptance("oktopk", 9)
@pytest.mark.parametrize("name", ["global", "warm_up", "ok_topk"])
def test_a_group_that_leaves_out_a_step_does_not_hold_up_others(name):
    # Two groups of two on one mesh; one value of the first group is not finite, in the
    # first step, so that groups which counted steps differently would part later on.
    exchange = dataclasses.replace(ALL[name], dense_steps=2).make()
    mesh, axes = sharding.make_mesh({"worker": 2, "data": 2}), ("worker", "data")
    given = numbers(6, 4)
    first = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (MEMBERS, *np.shape(leaf))),
        exchange.init({"w": given[0, 0]}),
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    def step(vectors, state):
        own = jax.tree.map(lambda leaf: leaf[0], (vectors, state))
        made = exchange.average(MeshGroup("data"), {"w": own[0]}, own[1])
        return jax.tree.map(lambda leaf: leaf[None], made)

    def run(given):
        means, state = [], jax.device_put(first, NamedSharding(mesh, P(axes)))
        for vectors in given:
            mean, state = step(vectors, state)
            means.append(np.asarray(mean["w"]))
        return np.stack(means), state

    spoilt = given.copy()
    spoilt[0, 1, 17] = np.nan
    means, state = run(spoilt)
    assert state.stats.nonfinite.tolist() == [0] * MEMBERS
    assert not means[0, :2].any()
    assert np.isfinite(means).all()
    assert means[1:, :2].any(axis=(1, 2)).all()
    np.testing.assert_array_equal(means[:, 2:], run(given)[0][:, 2:])


HUGE = {
    "power_sgd": PowerSgdConfig(rank=2),
    "signs": SignConfig(error_feedback=True),
    "dense": DenseConfig(),
    "ok_topk": OkTopkConfig(density=0.5),
    "gaussian_k": GaussianKConfig(density=0.1),
}


@pytest.mark.quick("dense", "signs", "power_sgd")
@pytest.mark.acceptance("oktopk", 9)
@pytest.mark.parametrize("name", HUGE)
def test_finite_numbers_whose_sums_are_not_change_nothing(name):
    tx = optim.exchange_gradients(HUGE[name])
    params = {"w": jnp.ones((8, 4))}
    update, state = jax.jit(tx.update), tx.init(params)
    mean, state = update({"w": jnp.full((8, 4), 3e38)}, state)
    assert np.isfinite(mean["w"]).all()
    residual = jax.tree.leaves(state.residual)
    assert all(np.isfinite(leaf).all() for leaf in residual)
    for _ in range(3):
        mean, state = update(params, state)
    assert np.isfinite(mean["w"]).all()


def test_shares_of_halves_do_not_overflow():
    given = np.full((1, 3, 10), 7e4, np.float32)
    (step,) = on_hosts(HalfConfig(), given)
    np.testing.assert_array_equal(step.mean, np.full(10, 65504.0))


def test_density_is_not_rounded_down():
    for n in (100, 2000, 14_728_266):
        for k in range(1, 100):
            assert entries_wanted(k / n, n) == k


@pytest.mark.slow
def test_what_bfloat16_does_not_hold_is_kept():
    tx = optim.exchange_gradients(TopKConfig(density=0.5))
    given = {"w": jnp.full(4, 1 / 3, jnp.bfloat16)}
    state, done = tx.init(given), np.zeros(4)
    for _ in range(20):
        mean, state = tx.update(given, state)
        done += np.asarray(mean["w"], np.float64)
    left = done + np.asarray(state.residual["w"])
    np.testing.assert_allclose(left, 20 * float(given["w"][0]), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"repartition": "foo"},
        {"global_threshold": "x"},
        {"balance": "autoo"},
        {"local_correction": (0.5, 2.0, float("inf"), float("nan"))},
        {"joint_correction": (1.0, 2.0, 3.0)},
    ],
)
def test_options_that_cannot_be_are_refused(options):
    # The type checker of the tests is before our own.
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        OkTopkConfig(**options)


@pytest.mark.acceptance("oktopk", 9)
def test_errors_say_what_is_wrong():
    for density in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=f"density.*{density}"):
            OkTopkConfig(density=density)
    tx = optim.exchange_gradients(OkTopkConfig(), "data")
    params = {"dense": {"kernel": jnp.ones(4)}}
    with pytest.raises(
        ConfigError, match=r"exchange of gradients.*inside jax.shard_map"
    ):
        tx.update(params, tx.init(params))
    with pytest.raises(TypeError, match=r"kernel. is int32"):
        tx.init({"dense": {"kernel": jnp.ones(4, jnp.int32)}})
    whole = optim.exchange_gradients(TopKConfig())
    state = whole.init(params)
    with pytest.raises(TypeError, match=r"kernel. is int32"):
        whole.update({"dense": {"kernel": jnp.ones(4, jnp.int32)}}, state)
    leaves = optim.exchange_gradients(TopKConfig(by_leaf=True, error_feedback=False))
    with pytest.raises(ValueError, match="not like that of init"):
        leaves.update({"other": jnp.ones(4)}, leaves.init(params))
    alone = optim.exchange_gradients(OkTopkConfig(), None)
    state = alone.init(params)
    with pytest.raises(ValueError, match=r"dense/kernel: \(4,\).*\(5,\)"):
        alone.update({"dense": {"kernel": jnp.ones(5)}}, state)
    with pytest.raises(ConfigError, match="rank"):
        PowerSgdConfig(rank=0)
    with pytest.raises(ValueError, match=r"2\^m members.*3"):
        on_mesh(SPARSE["global"], numbers(0, 1, members=3))


def test_a_state_that_was_not_entered_is_told():
    tx = optim.exchange_gradients(TopKConfig(density=0.5), "data")
    mesh, params = sharding.data_mesh(2), {"w": jnp.ones(4)}
    state = per_device.expand(tx.init(params), mesh)
    specs = per_device.specs(state)
    forgotten = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)
    )
    with pytest.raises(ConfigError, match=r"the exchange's state .*per_device\.enter"):
        jax.eval_shape(forgotten, params, state)


@pytest.mark.parametrize("dense_steps", [0, 5])
def test_a_number_of_members_is_refused_before_anything_is_sent(dense_steps):
    """Or some would wait for those that have found out."""
    exchange = GTopkConfig(density=0.5, dense_steps=dense_steps).make()
    tree = {"w": np.ones(8, np.float32)}
    nobody = types.SimpleNamespace(size=3, xp=np)
    with pytest.raises(ConfigError, match=r"2\^m members.*3"):
        exchange.average(nobody, tree, exchange.init(tree))


@pytest.mark.slow
@pytest.mark.acceptance("oktopk", 8)
def test_indices_beyond_the_range_of_floats_arrive():
    n = 40_000_000
    places = np.array([2**24 + 1, 2**24 + 3, 39_999_999])
    exchange = OkTopkConfig(density=3 / n, tau=1, tau_prime=1).make()

    def rank(transport):
        given = np.zeros(n, np.float32)
        given[places[transport.rank :: 2]] = 5 + np.arange(3)[transport.rank :: 2]
        state = exchange.init({"w": given})
        mean, _ = exchange.average(HostGroup(transport), {"w": given}, state)
        found = np.flatnonzero(mean["w"])
        return found, mean["w"][found]

    for found, values in in_threads(rank, connected(2)):
        np.testing.assert_array_equal(found, places)
        np.testing.assert_array_equal(values, [2.5, 3.0, 3.5])


def test_large_indices_fit_the_device_entries():
    """The same without the numbers: entries that one device hands to another."""
    n = 40_000_000
    group, places = MeshGroup(None), jnp.asarray([2**24 + 1, 2**24 + 3, 39_999_999])
    given = collectives.Entries(places, jnp.ones(3), jnp.int32(3))
    sent = group.exchange(given, jnp.asarray([0, n]), 3)
    assert sent.received.indices.tolist() == places.tolist()
    assert group.gather(sent.received, 3)[0].indices.tolist() == places.tolist()


@pytest.mark.faults(12)
@pytest.mark.parametrize("backend", [on_mesh, on_hosts])
@pytest.mark.parametrize("name", ["ok_topk", "regional", "global", "gaussian_k"])
def test_members_with_nothing_take_part(backend, name):
    given = numbers(19, 3)
    given[0] = 0
    given[1, 1:] = 0
    made = backend(CONSERVING.get(name, SPARSE.get(name)), given)
    assert not made[0].mean.any()
    assert not made[0].residual.any()
    left = made[1].mean * MEMBERS + made[1].residual.sum(0)
    np.testing.assert_allclose(left, given[1].sum(0), atol=1e-4)


METHODS = [
    lambda d: OkTopkConfig(density=d, tau=2, tau_prime=2),
    lambda d: OkTopkConfig(density=d, tau_prime=2, repartition="pooled"),
    lambda d: OkTopkConfig(density=d, strict_volume=True, balance="always"),
    lambda d: TopKConfig(density=d),
    lambda d: TopkDsaConfig(density=d),
    lambda d: GaussianKConfig(density=d),
    lambda d: MsTopKConfig(density=d),
    lambda d: RandomKConfig(density=d),
    lambda d: SignConfig(error_feedback=True),
]


@pytest.mark.slow
@pytest.mark.faults(12)
@hypothesis.settings(max_examples=60)
@hypothesis.given(
    method=st.sampled_from(METHODS),
    members=st.integers(1, 5),
    n=st.integers(0, 40),
    density=st.sampled_from([0.01, 0.2, 1.0]),
    largest=st.sampled_from([0, 1, 1000]),
    seed=st.integers(0, 100),
)
def test_any_size_is_conserved(method, members, n, density, largest, seed):
    """Fewer entries than members, one number or none, all zeros, all alike."""
    draws = np.random.default_rng(seed)
    given = draws.integers(-largest, largest + 1, (3, members, n)).astype(np.float32)
    given[1] *= draws.integers(0, 2, (members, 1))
    carried = np.zeros((members, n))
    for vectors, step in zip(given, on_hosts(method(density), given), strict=True):
        left = step.mean.astype(np.float64) * members + step.residual.sum(0)
        np.testing.assert_allclose(left, (carried + vectors).sum(0), atol=1e-2)
        carried = step.residual
        assert step.stats.nonfinite.sum() == 0


@pytest.mark.slow
@pytest.mark.faults(12)
@pytest.mark.parametrize(("members", "n"), [(8, 3), (2, 1)])
def test_devices_outnumber_entries(members, n):
    given = numbers(20, 3, members, n)
    config = OkTopkConfig(density=0.4, tau_prime=2)
    carried = np.zeros((members, n))
    for vectors, step in zip(given, on_mesh(config, given), strict=True):
        left = step.mean * members + step.residual.sum(0)
        np.testing.assert_allclose(left, (carried + vectors).sum(0), atol=1e-3)
        carried = step.residual


def test_steps_are_dense_until_the_method_begins():
    given = numbers(16, 4)
    made = on_mesh(ALL["warm_up"], given)
    for vectors, step in zip(given[:2], made, strict=False):
        np.testing.assert_allclose(step.mean, vectors.mean(0), rtol=1e-6)
        assert not step.residual.any()
    assert np.count_nonzero(made[2].mean) <= MEMBERS * int(DENSITY * LENGTH)
    assert [int(step.state.step) for step in made] == [1, 2, 3, 4]


def test_leaves_by_themselves_and_small_ones_densely():
    config = TopKConfig(density=0.1, by_leaf=True, min_size=10)
    tree = {"big": jnp.arange(20.0), "bias": jnp.arange(3.0), "none": jnp.zeros((0, 2))}
    tx = optim.exchange_gradients(config)
    mean, state = tx.update(tree, tx.init(tree))
    assert np.flatnonzero(mean["big"]).tolist() == [18, 19]
    np.testing.assert_array_equal(mean["bias"], tree["bias"])
    assert float(state.residual["big"].sum()) == sum(range(18))
    assert not state.residual["bias"].any()


@pytest.mark.slow
def test_bfloat16_gradients_keep_their_type_and_float32_residuals():
    tx = optim.exchange_gradients(OkTopkConfig(density=0.5))
    tree = {"w": jnp.asarray([1.0, 3.0], jnp.bfloat16)}
    mean, state = tx.update(tree, tx.init(tree))
    assert mean["w"].dtype == jnp.bfloat16
    assert state.residual["w"].dtype == jnp.float32


@pytest.mark.slow
def test_a_chain_with_an_exchange_learns():
    tx = optax.chain(
        optim.exchange_gradients(OkTopkConfig(density=0.1)), optax.sgd(0.05)
    )
    x = jnp.ones(50)
    state = tx.init(x)
    update = jax.jit(tx.update)
    for _ in range(1000):
        updates, state = update(x, state, x)
        x = optax.apply_updates(x, updates)
    assert float(jnp.abs(x).max()) < 0.05


def test_per_device_state_is_marked():
    state, _ = program(ALL["ok_topk"], MEMBERS, LENGTH)
    assert state.residual.resize == "mean"
    assert state.residual.value["w"].shape == (MEMBERS, LENGTH)
    assert state.own.resize == "reset"
    assert state.own.value.start.shape == (MEMBERS,)
    assert state.shared.threshold.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok_topk", "global"])
def test_vmapped_members_are_a_group(name):
    given = numbers(18, 2)
    exchange = ALL[name].make()
    state = jax.tree.map(jnp.asarray, exchange.init(given[0, 0]))
    states = jax.tree.map(lambda x: jnp.stack([x] * MEMBERS), state)
    average = jax.jit(
        jax.vmap(
            lambda x, state: exchange.average(MeshGroup("members"), x, state),
            axis_name="members",
        )
    )
    for vectors, step in zip(given, on_mesh(ALL[name], given), strict=True):
        mean, states = average(vectors, states)
        np.testing.assert_array_equal(mean[0], step.mean)
        np.testing.assert_array_equal(states.residual, step.residual)


@pytest.mark.slow
def test_fewer_members_go_on_with_new_regions():
    """Neither regions nor thresholds are due in the step after the change."""
    config = OkTopkConfig(density=DENSITY, capacity_factor=80.0)
    given = numbers(17, 2)
    *_, last = on_mesh(config, given)
    state = jax.tree.map(jnp.asarray, last.state)
    fitted = per_device.resize(state, sharding.data_mesh(2))
    assert fitted.residual.value["w"].shape == (2, LENGTH)
    np.testing.assert_allclose(
        fitted.residual.value["w"].mean(0), last.residual.mean(0), rtol=1e-5, atol=1e-5
    )
    _, step = program(config, 2, LENGTH)
    mean, new = step(jnp.asarray(given[0, :2]), fitted)
    starts = np.asarray(new.own.value.start)
    assert starts[0] == 0
    assert 0 < starts[1] < LENGTH
    assert int(new.stats.value.kept[0]) == int(DENSITY * LENGTH)
    left = np.asarray(mean) * 2 + np.asarray(new.residual.value["w"]).sum(0)
    expected = np.asarray(fitted.residual.value["w"]).sum(0) + given[0, :2].sum(0)
    np.testing.assert_allclose(left, expected, atol=1e-3)
