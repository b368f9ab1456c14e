"""Every exchange sends the words that it says: counted by it, and by the transport."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
)
from hpcjax.core import ConfigError, parts
from hpcjax.hostcomm import collectives as host_collectives
from hpcjax.hostcomm import connected
from tests.hostcomm.threads import in_threads

TREES = {
    "vector": {"w": (301,)},
    "odd": {"b": (13,), "s": (), "w": (7, 13)},
    "stacks": {
        "blocks": {"bias": (12, 64), "kernel": (12, 64, 64)},
        "head": (33,),
        "none": (0, 3),
        "scale": (),
    },
}
SPLIT = {"by_leaf": True, "min_size": 20}
# What sends as many words whatever the numbers are.
FIXED = {
    "dense": DenseConfig(),
    "dense_by_leaf": DenseConfig(by_leaf=True),
    "dense_in_buckets": DenseConfig(bucket_bytes=300),
    "half": HalfConfig(),
    "half_by_leaf": HalfConfig(**SPLIT),
    "top_k": TopKConfig(density=0.1),
    "top_k_by_leaf": TopKConfig(density=0.1, by_leaf=True),
    "top_k_of_large": TopKConfig(density=0.1, **SPLIT),
    "ms_top_k": MsTopKConfig(density=0.1),
    "ms_top_k_of_large": MsTopKConfig(density=0.1, **SPLIT),
    "random_k": RandomKConfig(density=0.07),
    "random_k_of_large": RandomKConfig(density=0.07, **SPLIT),
    "votes": SignConfig(),
    "signs": SignConfig(error_feedback=True),
    "signs_of_large": SignConfig(error_feedback=True, **SPLIT),
    "torus": TorusConfig(),
    "rows_columns": TorusConfig(algorithm="rows_columns", **SPLIT),
    "low_rank": PowerSgdConfig(rank=4),
    "full_rank": PowerSgdConfig(rank=1000),
}


def numbers(shapes, members, seed=0):
    """A tree of normal numbers for each member."""
    draws = np.random.default_rng(seed)
    return [
        jax.tree.map(
            lambda shape: draws.normal(size=shape).astype(np.float32),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        for _ in range(members)
    ]


def run(config, given):
    """Averages trees of members; the counts of each, and the words that left it."""

    def rank(transport):
        exchange, tree = config.make(), given[transport.rank]
        before = transport.counters()
        state = exchange.average(HostGroup(transport), tree, exchange.init(tree))[1]
        sent = transport.counters().since(before).total_sent().payload
        return state.stats, sent / 4

    stats, words = zip(*in_threads(rank, connected(len(given))), strict=True)
    return jax.tree.map(lambda *each: np.array(each), *stats), np.array(words)


def stated(config, given, **place):
    return config.make().words(given[0], len(given), **place)


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", FIXED)
def test_what_is_said_is_sent(name, tree, members, monkeypatch):
    """All sums go around rings here, so that the transport counts the formula.

    Parts of a ring differ by a word, but not their mean over members. One sum more is
    of a word: whether all numbers are finite.
    """
    monkeypatch.setattr(host_collectives, "LARGE", 0)
    given = numbers(TREES[tree], members)
    stats, left = run(FIXED[name], given)
    words = stated(FIXED[name], given)
    assert left.mean() == pytest.approx(words + 2 * (members - 1) / members)
    # Each array's count is rounded down.
    off = words - stats.sent_words
    assert (off >= 0).all()
    assert (off < len(jax.tree.leaves(given[0]))).all()
    assert (words > 0) == (members > 1)


@pytest.mark.parametrize("members", [2, 4])
def test_stacks_are_many_matrices(members):
    """Drawn as one matrix 64 wide and 768 high, they would be 4 (64 + 768) numbers."""
    config = PowerSgdConfig(rank=4, stacked=("^blocks/",))
    given = numbers({"blocks": {"kernel": (12, 64, 64)}}, members)
    stats, _ = run(config, given)
    assert stated(config, given) == 2 * 12 * 4 * 128 * (members - 1) / members
    np.testing.assert_array_equal(stats.sent_words, stated(config, given))


@pytest.mark.parametrize("members", [1, 2, 4, 8])
@pytest.mark.parametrize("tree", TREES)
def test_the_first_member_takes_part_in_all_merges(tree, members):
    for options in ({}, SPLIT | {"min_size": 1}):
        config = GTopkConfig(density=0.1, **options)
        given = numbers(TREES[tree], members)
        stats, _ = run(config, given)
        link = stats.sent_words + stats.received_words
        assert link[0] == link.max() == stated(config, given)
        assert stats.sent_words.max() == stated(config, given) / 2


@pytest.mark.parametrize("members", [2, 3])
def test_fitted_thresholds_come_near_k(members):
    config = GaussianKConfig(density=0.01)
    given = numbers({"w": (20_000,)}, members)
    stats, _ = run(config, given)
    assert stats.sent_words.mean() == pytest.approx(stated(config, given), rel=0.25)


def placed(members, n, places, values=1.0):
    """Vectors with values at some places, `places(member)`, and next to nothing."""
    given = 1e-6 * np.random.default_rng(1).normal(size=(members, n))
    for member, vector in enumerate(given):
        vector[places(member)] = values
    return [{"w": vector.astype(np.float32)} for vector in given]


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_regions_send_least_where_places_agree_and_most_where_they_do_not(members):
    k, n = 4 * members, 8 * members**2
    config = TopkDsaConfig(density=k / n)
    same = placed(members, n, lambda _: np.arange(k) * (n // k))
    least = stated(config, same, place=0.0)
    assert least == 4 * k * (members - 1) / members
    np.testing.assert_array_equal(run(config, same)[0].sent_words, least)
    apart = placed(members, n, lambda member: np.arange(k) * (n // k) + member)
    most = stated(config, apart)
    assert most == (2 * k + n) * (members - 1) / members
    np.testing.assert_array_equal(run(config, apart)[0].sent_words, most)
    assert stated(config, apart, place=0.5) == (least + most) / 2


@pytest.mark.parametrize("share", [2, 1])
def test_sums_of_many_entries_are_dense_wherever_they_are(share):
    members, n = 4, 64
    config = TopkDsaConfig(density=1 / share)
    given = placed(members, n, lambda _: np.arange(0, n, share))
    words = (2 * n / share + n) * 3 / 4
    for place in (0.0, 1.0):
        assert stated(config, given, place=place) == words
    np.testing.assert_array_equal(run(config, given)[0].sent_words, words)


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_owners_send_least_and_what_lies_in_one_region_most(members):
    k, width = 4 * members, 16 * members
    n, share = members * width, (members - 1) / members
    options = {"density": k / n, "repartition": "even"}
    # All large entries of a member are in its own region; a P-th of them is larger.
    own = placed(
        members,
        n,
        lambda member: member * width + np.arange(k),
        np.where(np.arange(k) < k // members, 2.0, 1.0),
    )
    config = OkTopkConfig(**options)
    assert stated(config, own, place=0.0) == 2 * k * share
    np.testing.assert_array_equal(run(config, own)[0].sent_words, 2 * k * share)
    # The first one's are everywhere, those of the others, which survive, in its region.
    given = placed(members, n, lambda member: np.arange(k) * (1 if member else n // k))
    given[0]["w"] /= 10
    config = OkTopkConfig(balance="always", **options)
    sent = run(config, given)[0].sent_words
    assert sent[0] == sent.max() == stated(config, given) == 6 * k * share


@pytest.mark.slow
def test_devices_count_the_same_words():
    """Members of one device, by `vmap`: what is selected differs, its number not."""
    for name in ("half", "top_k_of_large", "ms_top_k", "signs", "low_rank"):
        exchange, given = FIXED[name].make(), numbers(TREES["odd"], 4)
        state = jax.tree.map(jnp.asarray, exchange.init(given[0]))
        average = jax.vmap(
            lambda x, state=state, exchange=exchange: (
                exchange.average(MeshGroup("members"), x, state)[1].stats.sent_words
            ),
            axis_name="members",
        )
        sent = jax.jit(average)(jax.tree.map(lambda *x: jnp.stack(x), *given))
        off = exchange.words(given[0], 4) - np.asarray(sent)
        assert (off >= 0).all()
        assert (off < 3).all()


def test_all_exchanges_are_looked_at():
    looked_at = {type(config) for config in FIXED.values()}
    looked_at |= {GTopkConfig, GaussianKConfig, TopkDsaConfig, OkTopkConfig}
    assert looked_at == {*parts.classes("exchange").values()}


def test_what_needs_no_encoding_may_leave_early():
    (tree,) = numbers(TREES["stacks"], 1)
    power = PowerSgdConfig(rank=4, stacked=("^blocks/",)).make()
    vectors, left, right = power.transfers(tree, 2)
    assert (vectors.early, left.early, right.early) == (True, False, False)
    assert vectors.words == 12 * 64 + 33 + 1
    assert (left.words, right.words) == (12 * 4 * 64, 12 * 4 * 64)
    split = TopKConfig(by_leaf=True, min_size=50).make().transfers(tree, 2)
    assert [each.words for each in split if each.early] == [33, 1]


def test_what_cannot_be_said():
    (tree,) = numbers(TREES["vector"], 1)
    with pytest.raises(ConfigError, match="members must be"):
        DenseConfig().make().words(tree, 0)
    with pytest.raises(ConfigError, match="place must be in"):
        OkTopkConfig().make().words(tree, 2, place=1.5)
    with pytest.raises(ConfigError, match=r"2\^m members"):
        GTopkConfig().make().words(tree, 6)
    with pytest.raises(ConfigError, match="stacked must match"):
        PowerSgdConfig(stacked=("^blocks/",)).make().words(tree, 2)
