"""Clusters of heads, against scikit-learn and scipy and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster import hierarchy
from scipy.spatial import distance
from sklearn.cluster import KMeans

from hpcjax import inference
from hpcjax.core import ConfigError
from hpcjax.inference.head_clusters import inertia, squared_distances

PROBLEMS = 50


def partition(labels):
    """Labels by the lowest member of each cluster."""
    first = {}
    return [
        first.setdefault(label, len(first)) for label in np.asarray(labels).tolist()
    ]


def problems(heads, clusters):
    """Gaussian rows, and heads among them as first centres."""
    rng = np.random.default_rng(heads)
    rows = rng.normal(size=(PROBLEMS, heads, 25))
    chosen = [rng.choice(heads, clusters, replace=False) for _ in range(PROBLEMS)]
    return rows, np.stack([rows[i, chosen[i]] for i in range(PROBLEMS)])


def runs_empty(rows, centres):
    """Whether a step of Lloyd's leaves a cluster without a row."""
    for _ in range(300):
        labels = distance.cdist(rows, centres).argmin(1)
        if len(set(labels)) < len(centres):
            return True
        centres = np.stack([rows[labels == c].mean(0) for c in range(len(centres))])
    return False


@pytest.mark.slow
@pytest.mark.acceptance("chai", 3)
@pytest.mark.parametrize(("heads", "clusters"), [(9, 4), (32, 6)])
def test_kmeans_is_scikit_learns(heads, clusters):
    rows, centres = problems(heads, clusters)
    with jax.enable_x64(True):
        arrays = jnp.asarray(rows), jnp.asarray(centres)
        found = inference.cluster_heads(arrays[0], clusters, initial=arrays[1])
        errors = jax.vmap(lambda x, of: inertia(squared_distances(x, x), of))(
            arrays[0].reshape(PROBLEMS, heads, -1), found.assign
        )
    compared = 0
    for i in range(PROBLEMS):
        if runs_empty(rows[i], centres[i]):
            continue
        peer = KMeans(
            clusters,
            init=centres[i],
            n_init=1,
            tol=0,
            max_iter=300,
            algorithm="lloyd",
        ).fit(rows[i])
        assert found.assign[i].tolist() == partition(peer.labels_)
        assert float(errors[i]) == pytest.approx(peer.inertia_, rel=1e-9)
        compared += 1
    assert compared > 0.9 * PROBLEMS


@pytest.mark.acceptance("chai", 3)
def test_permuted_heads_are_permuted_partitions():
    rows, centres = (jnp.asarray(each) for each in problems(9, 4))
    order = np.random.default_rng(1).permutation(9)
    straight = inference.cluster_heads(rows, 4, initial=centres).assign
    permuted = inference.cluster_heads(rows[:, order], 4, initial=centres).assign
    for i in range(PROBLEMS):
        assert permuted[i].tolist() == partition(np.asarray(straight)[i, order])


@pytest.mark.acceptance("chai", 3)
@pytest.mark.parametrize("method", ["kmeans", "agglomerative"])
def test_equal_heads_make_as_many_clusters_as_asked(method):
    rows = jnp.ones((2, 9, 25))
    found = inference.cluster_heads(rows, 4, method=method, key=jax.random.key(0))
    for assign, rep in zip(*map(np.asarray, found), strict=True):
        assert sorted(set(assign.tolist())) == [0, 1, 2, 3]
        assert assign[rep].tolist() == [0, 1, 2, 3]
    if method == "kmeans":
        # Each empty cluster takes the lowest head of those with company.
        again = inference.cluster_heads(rows, 4, initial=jnp.ones((2, 4, 25)))
        assert again.assign[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.quick("9")
@pytest.mark.acceptance("chai", 3)
@pytest.mark.parametrize("heads", [9, 32])
def test_agglomerative_is_scipys(heads):
    rows, _ = problems(heads, 2)
    with jax.enable_x64(True):
        arrays = jnp.asarray(rows)
        for clusters in (1, 2, heads // 2, heads):
            found = inference.cluster_heads(arrays, clusters, method="agglomerative")
            for i in range(PROBLEMS):
                tree = hierarchy.linkage(distance.pdist(rows[i], "cosine"), "average")
                labels = hierarchy.fcluster(tree, clusters, "maxclust")
                assert found.assign[i].tolist() == partition(labels)


@pytest.mark.quick("lowest-agglomerative")
@pytest.mark.parametrize("method", ["kmeans", "agglomerative"])
@pytest.mark.parametrize("representative", ["lowest", "medoid"])
def test_representatives(method, representative):
    rows, _ = problems(32, 6)
    rows = jnp.asarray(rows, jnp.float32)
    options = {"method": method, "key": jax.random.key(3)}
    found = inference.cluster_heads(rows, 6, **options, representative=representative)
    for i in range(PROBLEMS):
        assign = np.asarray(found.assign[i])
        assert assign.tolist() == partition(assign)
        for cluster, rep in enumerate(found.rep[i].tolist()):
            members = np.flatnonzero(assign == cluster)
            expected = members[0]
            if representative == "medoid":
                inside = np.asarray(rows[i], float)[members]
                total = distance.cdist(inside, inside, "sqeuclidean").sum(1)
                expected = members[total.argmin()]
            assert rep == expected


def test_a_cluster_that_runs_empty_takes_the_farthest_head():
    rows = jnp.array([[[0.0], [1.0], [2.0], [9.0], [10.0]]])
    # Nobody is near 100; of those nearest to 0 it is 10 that is farthest from it.
    found = inference.cluster_heads(rows, 2, initial=jnp.array([[[0.0], [100.0]]]))
    assert found.assign.tolist() == [[0, 0, 0, 1, 1]]
    found = inference.cluster_heads(
        rows, 3, initial=jnp.array([[[0.0], [100.0], [9.5]]])
    )
    assert found.assign.tolist() == [[0, 0, 1, 2, 2]]


def test_maps_are_rows_and_requests_do_not_depend_on_each_other():
    rng = np.random.default_rng(0)
    maps = jnp.asarray(rng.normal(size=(4, 9, 5, 5)), jnp.float32)
    key = jax.random.key(1)
    whole = inference.cluster_heads(maps, 4, key=key)
    flat = inference.cluster_heads(maps.reshape(4, 9, 25), 4, key=key)
    last = inference.cluster_heads(maps[3:], 4, key=key)
    assert (flat.assign == whole.assign).all()
    assert last.assign[0].tolist() == whole.assign[3].tolist()
    assert len({str(row) for row in whole.assign.tolist()}) > 1


def test_layers_are_mapped_over():
    rng = np.random.default_rng(0)
    layers = jnp.asarray(rng.normal(size=(3, 2, 9, 25)), jnp.float32)
    cluster = functools.partial(inference.cluster_heads, clusters=4)

    def one(rows, key):
        return cluster(rows, key=key)

    keys = jax.random.split(jax.random.key(0), 3)
    found = jax.jit(jax.vmap(one))(layers, keys)
    for layer in range(3):
        alone = cluster(layers[layer], key=keys[layer])
        assert (alone.assign == found.assign[layer]).all()
        assert (alone.rep == found.rep[layer]).all()


def test_first_centres_are_far_apart():
    """Of three tight pairs k-means++ nearly never takes both heads of one."""
    rows = jnp.array([[0.0], [0.01], [5.0], [5.01], [9.0], [9.01]])
    for seed in range(20):
        found = inference.cluster_heads(rows[None], 3, key=jax.random.key(seed))
        assert found.assign.tolist() == [[0, 0, 1, 1, 2, 2]]


@pytest.mark.slow
def test_heads_are_clustered_within_their_groups():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(2, 12, 25)), jnp.float32)
    for options in ({"key": jax.random.key(0)}, {"method": "agglomerative"}):
        found = inference.cluster_heads(rows, 6, groups=3, **options)
        for group in range(3):
            part = inference.cluster_heads(
                rows[:, 4 * group : 4 * group + 4], 2, **options
            )
            inside = found.assign[:, 4 * group : 4 * group + 4]
            assert (inside - 2 * group == part.assign).all()
            rep = found.rep[:, 2 * group : 2 * group + 2]
            assert (rep - 4 * group == part.rep).all()


def test_first_centres_are_shared_out_over_groups():
    rows = jnp.array([[[0.0], [1.0], [5.0], [0.0], [1.0], [5.0]]])
    initial = jnp.array([[[0.0], [4.0], [0.5], [9.0]]])
    found = inference.cluster_heads(rows, 4, initial=initial, groups=2)
    assert found.assign.tolist() == [[0, 0, 1, 2, 2, 3]]
    assert found.rep.tolist() == [[0, 2, 3, 5]]


@pytest.mark.quick("3")
@pytest.mark.parametrize("groups", [1, 3])
def test_random_memberships_have_no_empty_cluster(groups):
    found = inference.random_membership(jax.random.key(0), 500, 9, 6, groups=groups)
    assign = np.asarray(found.assign)
    assert (np.sort(np.asarray(found.rep), axis=1) == np.asarray(found.rep)).all()
    for row in assign:
        assert set(row.tolist()) == set(range(6))
        assert row.tolist() == partition(row)
    if groups == 3:
        assert (assign // 2 == np.arange(9) // 3).all()
        return
    # By symmetry all pairs are together equally often.
    together = (assign[:, :, None] == assign[:, None]).mean(0)[np.triu_indices(9, 1)]
    assert together.std() < 4 * np.sqrt(together.mean() / 500)
    assert together.min() > 0


def test_static_memberships_are_those_of_the_mean():
    rng = np.random.default_rng(0)
    texts = jnp.asarray(rng.normal(size=(7, 9, 5, 5)), jnp.float32)
    found = inference.static_membership(texts, 4, method="agglomerative")
    mean = np.asarray(texts, float).mean(0).reshape(9, 25)
    tree = hierarchy.linkage(distance.pdist(mean, "cosine"), "average")
    labels = hierarchy.fcluster(tree, 4, "maxclust")
    assert found.assign.tolist() == [partition(labels)]


@pytest.mark.quick("8-4-2")
@pytest.mark.parametrize(("heads", "kv_heads", "clusters"), [(9, 3, 6), (8, 4, 2)])
def test_key_heads_are_kept_that_are_read(heads, kv_heads, clusters):
    found = inference.random_membership(jax.random.key(2), 50, heads, clusters)
    slots = inference.key_slots(found.rep, heads, kv_heads)
    assert slots.head.shape == (50, min(clusters, kv_heads))
    rows = zip(found.rep, *slots, strict=True)
    for rep, slot, head, used in (map(np.asarray, row) for row in rows):
        read = rep // (heads // kv_heads)
        assert head[slot].tolist() == read.tolist()
        assert head[:used].tolist() == sorted(set(read.tolist()))


@pytest.mark.parametrize(
    ("clusters", "options", "message"),
    [
        (0, {}, "clusters=0, heads=6"),
        (7, {}, "clusters=7, heads=6"),
        (3, {"groups": 2}, "groups=2, heads=6, clusters=3"),
        (4, {"groups": 4}, "groups=4, heads=6, clusters=4"),
        (3, {"method": "k-means"}, "did you mean 'kmeans'"),
        (3, {"representative": "mean"}, "no representative 'mean'"),
        (3, {"initial": jnp.ones((2, 4, 5))}, r"centres \(2, 3, 5\)"),
        (3, {"key": None}, "needs a key"),
    ],
)
def test_bad_input_is_refused(clusters, options, message):
    options = {"key": jax.random.key(0)} | options
    with pytest.raises(ConfigError, match=message):
        inference.cluster_heads(jnp.ones((2, 6, 5)), clusters, **options)
