"""Clusters of attention heads with similar attention maps, and their representatives.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.keys import derive

_STEPS = 50  # most Lloyd steps of a k-means
_METHODS = ("kmeans", "agglomerative")
_REPRESENTATIVES = ("lowest", "medoid")


class Membership(NamedTuple):
    """The cluster of each head, and the representative of each cluster.

    No cluster is empty. Clusters are numbered in the order of their lowest heads, so
    that cluster 0 contains head 0.

    Attributes:
      assign: `[batch, heads]`, a cluster in [0, clusters), int32.
      rep: `[batch, clusters]`, a head of the cluster, int32.
    """

    assign: Int[Array, "batch heads"]
    rep: Int[Array, "batch clusters"]


def cluster_heads(
    features: Float[Array, "batch heads *features"],
    clusters: int,
    *,
    method: str = "kmeans",
    key: jax.Array | None = None,
    initial: Float[Array, "batch clusters *features"] | None = None,
    groups: int = 1,
    representative: str = "lowest",
) -> Membership:
    """Clusters the heads of one layer by their features, for each request.

    `"kmeans"` runs Lloyd's algorithm from the centres of k-means++, or from `initial`,
    until no head changes its cluster, for at most 50 steps. After each step, an empty
    cluster gets the head that is farthest from its own centre (the lowest of equals)
    among the clusters of two or more heads. So there are always `clusters` of them,
    even of equal heads. `"agglomerative"` repeatedly merges the two clusters with the
    smallest mean cosine distance between their heads.

    All requests draw with the same key, so that the result for a request does not
    depend on its batch. The function works under `jit` and `vmap`.

    Args:
      features: of each head, such as attention maps `[batch, heads, w, w]`.
      clusters: k, static.
      method: `"kmeans"` or `"agglomerative"`.
      key: draws the first centres; needed by `"kmeans"` without `initial`.
      initial: the first centres.
      groups: number of groups of neighbouring heads that are clustered separately, into
        clusters / groups each, such as the heads that share a key head.
      representative: `"lowest"` for the lowest head of a cluster, `"medoid"` for the
        head with the smallest sum of squared distances to the others (the lowest of
        equals).

    Raises:
      ConfigError: clusters is not in [1, heads]; groups does not divide clusters and
        heads; no key; an unknown method or representative; centres of a wrong shape.

    Examples:
      >>> rows = jnp.array([[[0.0], [5.0], [0.1], [5.2]]])
      >>> membership = cluster_heads(rows, 2, key=jax.random.key(0))
      >>> membership.assign.tolist(), membership.rep.tolist()
      ([[0, 1, 0, 1]], [[0, 1]])
    """
    batch, heads = features.shape[:2]
    _check_counts(heads, clusters, groups)
    _check_choice("method", method, _METHODS)
    _check_choice("representative", representative, _REPRESENTATIVES)
    if method == "kmeans" and key is None and initial is None:
        raise ConfigError("kmeans needs a key, or initial centres")
    rows = _flatten_features(features).reshape(batch, groups, heads // groups, -1)
    if initial is not None:
        expected = (batch, clusters, *features.shape[2:])
        if method != "kmeans" or initial.shape != expected:
            raise ConfigError(
                f"initial must be centres {expected} for kmeans: got {initial.shape} "
                f"for {method}"
            )
        initial = _flatten_features(initial).reshape(
            batch, groups, clusters // groups, -1
        )
    own = clusters // groups
    return _merge_groups(_cluster(rows, initial, key, own, method, representative))


def static_membership(
    features: Float[Array, "texts heads *features"], clusters: int, **options: Any
) -> Membership:
    """Clusters heads once for all requests, by their mean features over texts.

    Args:
      features: of the heads of one layer, in each text.
      clusters: k.
      **options: of `cluster_heads`.

    Returns:
      A membership with a batch of one.

    Examples:
      >>> texts = jnp.array([[[0.0], [1.0], [0.2]], [[0.0], [1.0], [0.0]]])
      >>> static_membership(texts, 2, method="kmeans", key=jax.random.key(0)).assign
      Array([[0, 1, 0]], dtype=int32)
    """
    return cluster_heads(jnp.mean(features, 0, keepdims=True), clusters, **options)


def random_membership(
    key: jax.Array, batch: int, heads: int, clusters: int, *, groups: int = 1
) -> Membership:
    """Draws random clusters for each request, a baseline that ignores features.

    First each cluster gets one random head, so that none is empty; then every other
    head gets a uniformly drawn cluster.

    Args:
      key: of the draw.
      batch: number of requests.
      heads: H.
      clusters: k.
      groups: as in `cluster_heads`.

    Raises:
      ConfigError: as `cluster_heads` does.

    Examples:
      >>> membership = random_membership(jax.random.key(0), 2, 6, 3)
      >>> sorted(set(membership.assign[0].tolist())), membership.rep.shape
      ([0, 1, 2], (2, 3))
    """
    _check_counts(heads, clusters, groups)
    own_clusters, own_heads = clusters // groups, heads // groups

    def draw(key: jax.Array) -> Membership:
        order = jax.random.permutation(derive(key, "order"), own_heads)
        shape = (own_heads,)
        drawn = jax.random.randint(derive(key, "cluster"), shape, 0, own_clusters)
        drawn = drawn.at[:own_clusters].set(jnp.arange(own_clusters))
        assign = _renumber(jnp.zeros_like(drawn).at[order].set(drawn))
        return Membership(assign, jnp.argmax(_members(assign, own_clusters), axis=1))

    return _merge_groups(
        jax.vmap(jax.vmap(draw))(jax.random.split(key, (batch, groups)))
    )


class KeySlots(NamedTuple):
    """Slots of a cache for the key heads that representatives read.

    Attributes:
      slot: the slot with the key head of each cluster, `[batch, clusters]`.
      head: the key head in each slot, `[batch, slots]`; slots from `used` on are spare.
      used: number of slots that are read, `[batch]`.
    """

    slot: Int[Array, "batch clusters"]
    head: Int[Array, "batch slots"]
    used: Int[Array, " batch"]


def key_slots(rep: Int[Array, "batch clusters"], heads: int, kv_heads: int) -> KeySlots:
    """Assigns slots to the key heads that a representative reads, in grouped attention.

    Query head h reads key head ⌊h · kv_heads / heads⌋. There are min(clusters,
    kv_heads) slots, enough for any membership. The key heads are in ascending order.

    Args:
      rep: representative query heads.
      heads: H, number of query heads.
      kv_heads: number of key heads; divides `heads`.

    Raises:
      ConfigError: kv_heads does not divide heads.

    Examples:
      >>> slots = key_slots(jnp.array([[0, 4, 5]]), 6, 3)
      >>> slots.slot.tolist(), slots.head.tolist(), slots.used.tolist()
      ([[0, 1, 1]], [[0, 2, 1]], [2])
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"kv_heads must divide heads: got kv_heads={kv_heads}, heads={heads}"
        )
    read = rep // (heads // kv_heads)
    needed = jnp.any(read[..., None] == jnp.arange(kv_heads), axis=1)
    # The slot of a needed key head is the number of needed ones before it; the stable
    # sort puts the needed ones first, in order, which is the inverse.
    slot = jnp.cumsum(needed, axis=1, dtype=jnp.int32) - 1
    head = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    return KeySlots(
        slot=jnp.take_along_axis(slot, read, axis=1),
        head=head[:, : min(rep.shape[1], kv_heads)],
        used=jnp.sum(needed, axis=1, dtype=jnp.int32),
    )


def squared_distances(
    rows: Float[Array, "rows features"], others: Float[Array, "others features"]
) -> Float[Array, "rows others"]:
    """Returns the squared Euclidean distances between two sets of rows."""
    # Not as ‖x‖² + ‖y‖² - 2xy: rows may be nearly equal, and the terms would cancel.
    return jnp.sum(jnp.square(rows[:, None] - others[None]), axis=-1)


def inertia(
    distances: Float[Array, "heads heads"], assign: Int[Array, " heads"]
) -> Float[Array, ""]:
    """Returns Σ_c (1 / 2n_c) Σ_{i,j in c} d_ij for squared distances d.

    This is Σ_i ‖x_i − centre of its cluster‖², which k-means minimises: for n points it
    is (1 / 2n) Σ_ij ‖x_i − x_j‖².
    """
    same = assign[:, None] == assign
    return jnp.sum(jnp.where(same, distances, 0) / (2 * jnp.sum(same, axis=1)))


def draw_centres(
    distances: Float[Array, "heads heads"], key: jax.Array, count: int
) -> Int[Array, " count"]:
    """Draws heads as first centres by k-means++.

    Each is drawn with a probability proportional to its squared distance from the
    nearest centre drawn before; if all these are 0, head 0 is taken. The draws do not
    depend on `count`, so that the first k of them are the centres for k clusters.
    """

    def draw(number: jax.Array, chosen: jax.Array) -> jax.Array:
        taken = jnp.arange(count) < number
        near = jnp.min(jnp.where(taken, distances[:, chosen], jnp.inf), axis=1)
        # Before the first draw all distances are infinite: heads are equally likely.
        weight = jnp.where(number == 0, 1, near)
        head = jax.random.categorical(derive(key, "spread", number), jnp.log(weight))
        return chosen.at[number].set(head.astype(chosen.dtype))

    return jax.lax.fori_loop(0, count, draw, jnp.zeros(count, jnp.int32))


def run_lloyd(
    distances: Float[Array, "heads heads"],
    first: Float[Array, "heads slots"],
    count: int | Int[Array, ""],
) -> Int[Array, " heads"]:
    """Runs Lloyd's algorithm until no head changes its cluster.

    Centres are never computed, since a step needs only the squared distances d between
    heads: ‖x_h − centre of c‖² = mean_{j in c} d_hj − ½ mean_{i,j in c} d_ij.

    Args:
      distances: squared distances between heads.
      first: squared distances from heads to the first centres.
      count: number of clusters, at most that of heads; slots from `count` on stay
        empty.
    """
    slots = first.shape[1]

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        _, assign, number = state
        own = _members(assign, slots).T.astype(distances.dtype)
        # Slots from `count` on are empty; 1 avoids 0 / 0.
        size = jnp.maximum(jnp.sum(own, axis=0), 1)
        mean = jnp.matmul(distances, own, precision="highest") / size
        # Σ_{h in c} mean_{j in c} d_hj / (2 n_c), half the mean over pairs.
        within = jnp.sum(own * mean, axis=0) / (2 * size)
        return assign, _assign_nearest(mean - within, count), number + 1

    def moving(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        before, assign, number = state
        return jnp.any(before != assign) & (number < _STEPS)

    assign = _assign_nearest(first, count)
    start = (jnp.full_like(assign, -1), assign, jnp.int32(0))
    return jax.lax.while_loop(moving, step, start)[1]


def _assign_nearest(
    distance: Float[Array, "heads slots"], count: int | Int[Array, ""]
) -> Int[Array, " heads"]:
    """Assigns heads to their nearest centres, then fills empty clusters."""
    slots = distance.shape[1]
    distance = jnp.where(jnp.arange(slots) < count, distance, jnp.inf)
    own = jnp.min(distance, axis=1)

    def fill(cluster: jax.Array, assign: jax.Array) -> jax.Array:
        size = jnp.sum(_members(assign, slots), axis=1)
        head = jnp.argmax(jnp.where(size[assign] >= 2, own, -jnp.inf))
        empty = (size[cluster] == 0) & (cluster < count)
        return jnp.where(empty, assign.at[head].set(cluster), assign)

    nearest_one = jnp.argmin(distance, axis=1).astype(jnp.int32)
    return jax.lax.fori_loop(0, slots, fill, nearest_one)


def _merge_closest(
    distances: Float[Array, "heads heads"], count: int
) -> Int[Array, " heads"]:
    """Merges the two closest clusters, by average linkage, until `count` remain.

    A cluster is represented by the row and column of its lowest head; those of merged
    ones are infinite, so that they are never closest.
    """
    heads = len(distances)

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        distances, size, assign = state
        pair = jnp.unravel_index(jnp.argmin(distances), distances.shape)
        low, high = jnp.minimum(*pair), jnp.maximum(*pair)
        # The mean over all pairs of heads is that of the two means, weighted by size.
        both = size[low] * distances[low] + size[high] * distances[high]
        mean = both / (size[low] + size[high])
        distances = distances.at[low].set(mean).at[:, low].set(mean)
        distances = distances.at[high].set(jnp.inf).at[:, high].set(jnp.inf)
        size = size.at[low].add(size[high])
        assign = jnp.where(assign == high, low, assign).astype(assign.dtype)
        return distances, size, assign

    no_self = jnp.where(jnp.eye(heads, dtype=bool), jnp.inf, distances)
    numbers = jnp.arange(heads, dtype=jnp.int32)
    start = (no_self, jnp.ones(heads, distances.dtype), numbers)
    return jax.lax.fori_loop(0, heads - count, step, start)[2]


@functools.partial(jax.jit, static_argnames=("clusters", "method", "representative"))
def _cluster(
    rows: Float[Array, "batch groups heads features"],
    initial: Float[Array, "batch groups clusters features"] | None,
    key: jax.Array | None,
    clusters: int,
    method: str,
    representative: str,
) -> tuple:
    def cluster_group(rows: jax.Array, initial: jax.Array | None) -> tuple:
        distances = squared_distances(rows, rows)
        if method == "agglomerative":
            assign = _merge_closest(_cosine_distance(rows), clusters)
        elif initial is None:
            assert key is not None
            centres = draw_centres(distances, key, clusters)
            assign = run_lloyd(distances, distances[:, centres], clusters)
        else:
            assign = run_lloyd(distances, squared_distances(rows, initial), clusters)
        assign = _renumber(assign)
        members = _members(assign, clusters)
        if representative == "lowest":
            return assign, jnp.argmax(members, axis=1)
        same = assign[:, None] == assign
        total = jnp.sum(jnp.where(same, distances, 0), axis=1)
        return assign, jnp.argmin(jnp.where(members, total, jnp.inf), axis=1)

    return jax.vmap(jax.vmap(cluster_group))(rows, initial)


def _cosine_distance(rows: Float[Array, "heads f"]) -> Float[Array, "heads heads"]:
    # A row of zeros has no direction: its distance to every other row is 1.
    norm = jnp.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / jnp.maximum(norm, jnp.finfo(rows.dtype).tiny)
    return 1 - jnp.matmul(unit, unit.T, precision="highest")


def _flatten_features(features: Float[Array, "batch rows *features"]) -> jax.Array:
    dtype = jnp.promote_types(features.dtype, jnp.float32)
    return features.astype(dtype).reshape(*features.shape[:2], -1)


def _members(assign: Int[Array, " heads"], count: int) -> Bool[Array, "count heads"]:
    return assign == jnp.arange(count)[:, None]


def _renumber(assign: Int[Array, " heads"]) -> Int[Array, " heads"]:
    """Numbers clusters in the order of their lowest heads."""
    # The first head of each head's cluster, and how many heads up to it are first ones.
    lowest = jnp.argmax(assign[:, None] == assign, axis=1)
    rank = jnp.cumsum(lowest == jnp.arange(len(assign))) - 1
    return rank[lowest]


def _merge_groups(memberships: Any) -> Membership:
    """Joins the memberships of groups, `[batch, groups, …]`, into one of all heads."""
    assign, rep = memberships
    batch, groups, heads = assign.shape
    first = jnp.arange(groups)[:, None]
    assign, rep = assign + first * rep.shape[2], rep + first * heads
    return Membership(
        assign.astype(jnp.int32).reshape(batch, -1),
        rep.astype(jnp.int32).reshape(batch, -1),
    )


def _check_counts(heads: int, clusters: int, groups: int) -> None:
    if not 1 <= clusters <= heads:
        raise ConfigError(
            f"clusters must be in [1, heads]: got clusters={clusters}, heads={heads}"
        )
    if groups < 1 or heads % groups or clusters % groups:
        raise ConfigError(
            f"groups must divide heads and clusters: got groups={groups}, "
            f"heads={heads}, clusters={clusters}"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"no {name} {value!r}{nearest(value, allowed)}")
