"""Ok-Topk: against numpy, word by word, and whatever the gradients look like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax.collectives import HostGroup, MeshGroup, OkTopkConfig, sparse_all_reduce
from hpcjax.hostcomm import connected
from hpcjax.perf import ring_bytes
from hpcjax.sharding import data_mesh
from tests.collectives.exchanges import on_hosts, on_mesh, program
from tests.hostcomm.threads import in_threads
from tests.oracles import sparse_all_reduce as oracle

EXACT = {"tau": 1, "tau_prime": 1}
BOOKKEEPING = {members: 128 + 8 * members for members in (2, 4, 8)}


def gaussian(seed, steps, members, n):
    """Independent normal numbers."""
    draws = np.random.default_rng(seed).normal(size=(steps, members, n))
    return draws.astype(np.float32)


def whole(seed, steps, members, n, largest=50):
    """Integers, with ties."""
    draws = np.random.default_rng(seed).integers(
        -largest, largest + 1, (steps, members, n)
    )
    return draws.astype(np.float32)


def conserved(given, made):
    """Says how far the sums differ, relative to the sum of magnitudes."""
    worst, carried = 0.0, np.zeros_like(given[0])
    for vectors, step in zip(given, made, strict=True):
        accs = carried + vectors
        left = step.mean.astype(np.float64) * len(accs) + step.residual.sum(0)
        scale = np.maximum(np.abs(accs).sum(0), 1e-30)
        worst = max(
            worst, np.max(np.abs(left - accs.astype(np.float64).sum(0)) / scale)
        )
        carried = step.residual
    return worst


@pytest.mark.slow
@pytest.mark.acceptance("oktopk", 1)
@pytest.mark.parametrize("factor", [1.34, 1.0])
def test_nothing_is_lost_on_eight_devices(factor):
    config = OkTopkConfig(density=0.01, tau_prime=8, capacity_factor=factor)
    given = whole(0, 50, 8, 2000)
    made = on_mesh(config, given)
    assert conserved(given, made) == 0
    assert sum(step.stats.overflow.sum() for step in made) > 0
    given = gaussian(1, 50, 8, 2000)
    assert conserved(given, on_mesh(config, given)) <= 1e-6


def test_the_collective_alone_on_devices_and_between_processes():
    """Exact selections: the oracle's entries; what is left of x is what it has left."""
    n, members, config = 300, 4, OkTopkConfig(density=0.1, capacity_factor=4.0, **EXACT)
    given = gaussian(3, 1, members, n)[0]
    total, rests = oracle.ok_topk(given, 30)

    def on_devices(x):
        made = sparse_all_reduce(MeshGroup("data"), x[0], config)
        left = x[0].at[made.reached].set(0, mode="drop")
        dense = (
            jnp.zeros(n).at[made.entries.indices].add(made.entries.values, mode="drop")
        )
        return dense[None], left[None], made.entries.count[None]

    mapped = jax.shard_map(
        on_devices, mesh=data_mesh(members), in_specs=P("data"), out_specs=P("data")
    )
    dense, left, count = jax.jit(mapped)(given)
    assert count.tolist() == [30] * members

    def rank(transport):
        group, x = HostGroup(transport), given[transport.rank]
        made = sparse_all_reduce(group, x, config)
        # Used again: states are values, and regions are there from the start.
        again = sparse_all_reduce(group, x, config, made.state)
        assert again.state[1].step == 2
        assert again.entries.count == made.entries.count == 30
        whole = np.zeros(n, np.float32)
        whole[made.entries.indices] = made.entries.values
        rest = x.copy()
        rest[made.reached[made.reached < n]] = 0
        return whole, rest

    for number, (whole, rest) in enumerate(in_threads(rank, connected(members))):
        for found, wanted in (
            (dense[number], total),
            (whole, total),
            (left[number], rests[number]),
            (rest, rests[number]),
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x", [jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)])
def test_the_collective_takes_vectors_of_float32(x):
    with pytest.raises(TypeError, match=r"must be float32 \[n\]: got (float|int)32\["):
        sparse_all_reduce(MeshGroup(None), x, OkTopkConfig())


@pytest.mark.slow
def test_a_full_pair_sends_its_largest():
    n, members = 400, 4
    given = np.zeros((1, members, n), np.float32)
    given[0, :, -40:] = np.arange(1, 41)  # all in the last region of an even split
    config = OkTopkConfig(
        density=0.05, capacity_factor=1.0, repartition="even", **EXACT
    )
    (step,) = on_mesh(config, given)
    sent = np.flatnonzero(step.residual[0] == 0) - (n - 40)
    assert set(range(35, 40)) <= set(sent[sent >= 0])
    assert step.stats.overflow.tolist() == [15] * members
    np.testing.assert_array_equal(step.mean[-5:], np.arange(36, 41))


@pytest.mark.slow
def test_full_buffers_bring_new_regions():
    """Large entries move to one place; the next step has regions for it."""
    n, members = 4000, 4
    given = gaussian(21, 4, members, n)
    given[1:, :, -n // 20 :] *= 1000
    config = OkTopkConfig(density=0.01, capacity_factor=1.5, error_feedback=False)
    moved, after = on_mesh(config, given)[1:3]
    starts = [np.asarray(step.state.own.value.start) for step in (moved, after)]
    assert moved.stats.overflow.sum() > 0
    assert bool(moved.state.shared.crowded)
    assert starts[0][1] < n - n // 20 <= starts[1][1]


def test_gathered_sums_are_counted():
    given = gaussian(22, 1, 4, 2000)
    config = OkTopkConfig(density=0.05, global_threshold="gather")
    (step,) = on_hosts(config, given)
    assert (step.words - step.stats.sent_words <= BOOKKEEPING[4]).all()


@pytest.mark.quick("on_mesh")
@pytest.mark.acceptance("oktopk", 2)
@pytest.mark.parametrize("backend", [on_mesh, on_hosts])
def test_exact_steps_equal_an_oracle(backend):
    members, n, k = 4, 400, 8
    config = OkTopkConfig(density=k / n, capacity_factor=float(members), **EXACT)
    for seed in range(20):
        given = whole(seed, 3, members, n, largest=3 if seed % 2 else 40)
        given[1] *= seed % 5 > 0  # sometimes nobody has anything
        rest = np.zeros((members, n), np.float32)
        for vectors, step in zip(given, backend(config, given), strict=True):
            total, rest = oracle.ok_topk(rest + vectors, k)
            np.testing.assert_array_equal(step.mean * members, total)
            np.testing.assert_array_equal(step.residual, rest)


@pytest.mark.parametrize("backend", [on_mesh, on_hosts])
def test_real_numbers_equal_an_oracle(backend):
    members, n, k = 4, 400, 8
    config = OkTopkConfig(density=k / n, capacity_factor=float(members), **EXACT)
    given = gaussian(3, 4, members, n)
    rest = np.zeros((members, n), np.float32)
    for vectors, step in zip(given, backend(config, given), strict=True):
        total, rest = oracle.ok_topk(rest + vectors, k)
        np.testing.assert_array_equal(np.flatnonzero(step.mean), np.flatnonzero(total))
        np.testing.assert_allclose(step.mean * members, total, rtol=1e-6)
        np.testing.assert_allclose(step.residual, rest, rtol=1e-6)


@pytest.mark.quick("on_mesh-0.01", "on_mesh-8.0")
@pytest.mark.parametrize("growth", [1.0, 8.0, 0.01])
@pytest.mark.parametrize("backend", [on_mesh, on_hosts])
def test_thresholds_used_again_follow_the_papers_rules(backend, growth):
    """And are found anew where they would let through far more or less than k."""
    members, n, k = 4, 2000, 40
    config = OkTopkConfig(
        density=k / n, tau=5, tau_prime=8, capacity_factor=float(members)
    )
    given = gaussian(5, 20, members, n)
    given[10:] *= growth
    by_rule = oracle.OkTopk(
        members,
        n,
        k,
        8,
        config.local_correction,
        config.joint_correction,
        limit=(k / members, k * members),
    )
    for vectors, step in zip(given, backend(config, given), strict=True):
        mean = by_rule.average(vectors)
        np.testing.assert_array_equal(np.flatnonzero(step.mean), np.flatnonzero(mean))
        np.testing.assert_allclose(step.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(step.residual, by_rule.rest, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("never-gather")
@pytest.mark.parametrize("search", ["bisect", "histogram", "gather"])
@pytest.mark.parametrize("balance", ["auto", "always", "never"])
def test_every_way_gives_the_same(search, balance):
    given = whole(7, 6, 5, 300)  # a number of members that is no power of two
    made = [
        on_hosts(
            OkTopkConfig(
                density=0.05, tau_prime=3, global_threshold=how, balance=spread
            ),
            given,
        )
        for how, spread in (("bisect", "auto"), (search, balance))
    ]
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one.mean, other.mean)
        np.testing.assert_array_equal(one.residual, other.residual)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"global_threshold": "histogram"}, {"balance": "always"}, {"balance": "never"}],
)
def test_devices_and_hosts_agree(options):
    given = whole(9, 6, 4, 300)
    config = OkTopkConfig(
        density=0.05, tau=2, tau_prime=3, capacity_factor=80.0, **options
    )  # room for everything: what does not fit differs
    for mesh, host in zip(on_mesh(config, given), on_hosts(config, given), strict=True):
        np.testing.assert_array_equal(mesh.mean, host.mean)
        np.testing.assert_array_equal(mesh.residual, host.residual)
        np.testing.assert_array_equal(mesh.stats.selected, host.stats.selected)
        np.testing.assert_array_equal(mesh.stats.kept, host.stats.kept)


def clustered(seed, steps, members, n):
    """All large entries in the last hundredth, the same for all."""
    given = gaussian(seed, steps, members, n)
    given[..., -n // 100 :] *= 1000
    return given


def own_region_empty(seed, steps, members, n):
    """No member has anything in the even region that it adds up."""
    given = gaussian(seed, steps, members, n)
    for member in range(members):
        given[:, member, n * member // members : n * (member + 1) // members] = 0
    return given


def within(step, k, members, *, words, strict, gaussians):
    """Checks one step's words against the bounds of the paper's analysis."""
    c = np.minimum(step.stats.selected, k if strict else step.stats.selected)
    g, share = step.stats.kept, (members - 1) / members
    extra = BOOKKEEPING[members]
    assert (words <= 2 * c + 4 * g * share + extra).all()
    if gaussians:
        most = k if strict else np.maximum(c, g)
        assert (words <= 6 * most * share + extra).all()
    if strict:
        assert (words < 6 * k + extra).all()
    assert (step.stats.received_words > 0).all()
    if strict:
        assert (g <= k).all()


@pytest.mark.slow
@pytest.mark.acceptance("oktopk", 3)
@pytest.mark.parametrize(
    ("members", "strict"), [(2, False), (4, False), (8, False), (8, True)]
)
def test_volume_is_bounded_on_every_step(members, strict):
    n, k = 20_000, 200
    config = OkTopkConfig(
        density=k / n, strict_volume=strict, capacity_factor=2.0 * members
    )
    for make in (gaussian, clustered, own_region_empty):
        given = make(13, 100 if make is gaussian else 12, members, n)
        for step in on_mesh(config, given):
            within(
                step,
                k,
                members,
                words=step.stats.sent_words,
                strict=strict,
                gaussians=make is gaussian,
            )


@pytest.mark.quick("gaussian-2", "clustered-2", "own_region_empty-2")
@pytest.mark.acceptance("oktopk", 3)
@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("make", [gaussian, clustered, own_region_empty])
def test_volume_that_hosts_count_is_bounded(members, make):
    n, k = 20_000, 200
    config = OkTopkConfig(density=k / n, tau=3, tau_prime=2, strict_volume=True)
    for step in on_hosts(config, make(14, 5, members, n)):
        within(
            step,
            k,
            members,
            words=step.words,
            strict=True,
            gaussians=make is gaussian,
        )
        assert (step.stats.sent_words <= step.words).all()


@pytest.mark.slow
@pytest.mark.acceptance("oktopk", 3)
@pytest.mark.parametrize("members", [2, 8])
def test_padded_buffers_stay_within_the_capacity_factor(members):
    n, k, factor = 20_000, 200, 1.34
    state, step = program(OkTopkConfig(density=k / n), members, n)
    text = step.lower(np.zeros((members, n), np.float32), state).compile()
    words, share = ring_bytes(text, members) / 4, (members - 1) / members
    bound = factor * 6 * k * share + 12 * members + BOOKKEEPING[members]
    assert words <= bound
    assert words > 6 * k * share  # padding and bookkeeping are in it
