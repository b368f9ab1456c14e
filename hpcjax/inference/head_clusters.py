"""Which heads of a layer attend alike: clusters of heads, one of each its speaker.

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

_STEPS = 50
_METHODS = ("kmeans", "agglomerative")
_REPRESENTATIVES = ("lowest", "medoid")


class Membership(NamedTuple):
    """Which cluster each head is in, and which head speaks for each cluster.

    No cluster is empty. They are numbered by their lowest heads: cluster 0 has head 0.

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
    """Clusters the heads of one layer by what they attend to, for each request.

    `"kmeans"` takes Lloyd's steps, at most 50, until no head moves, from centres that
    k-means++ draws or from `initial`. After each step an empty cluster takes the head
    farthest from its centre, the lowest of equals, out of clusters of two or more: so
    equal heads still make `clusters` of them. `"agglomerative"` merges the two closest
    by the mean cosine distance of their heads.

    What comes out for a request does not depend on the others of the batch: all draw
    with the same key. Works under `jit` and `vmap`, such as over layers of equal
    `clusters`.

    Args:
      features: a row for each head, such as its attention map `[batch, heads, w, w]`.
      clusters: k, static.
      method: `"kmeans"` or `"agglomerative"`.
      key: draws the first centres; needed by `"kmeans"` without `initial`.
      initial: the first centres.
      groups: heads are clustered within so many groups of equal size, one behind the
        other, clusters / groups in each: those that share a key head.
      representative: `"lowest"` head of a cluster, or its `"medoid"`, the head of the
        least sum of squared distances to the others, the lowest of equals.

    Raises:
      ConfigError: clusters is not in [1, heads]; groups does not divide both; no key;
        an unknown method or representative; centres that do not fit.

    Examples:
      >>> rows = jnp.array([[[0.0], [5.0], [0.1], [5.2]]])
      >>> found = cluster_heads(rows, 2, key=jax.random.key(0))
      >>> found.assign.tolist(), found.rep.tolist()
      ([[0, 1, 0, 1]], [[0, 1]])
    """
    batch, heads = features.shape[:2]
    _check_counts(heads, clusters, groups)
    _check_choice("method", method, _METHODS)
    _check_choice("representative", representative, _REPRESENTATIVES)
    if method == "kmeans" and key is None and initial is None:
        raise ConfigError("kmeans needs a key, or initial centres")
    rows = _rows(features).reshape(batch, groups, heads // groups, -1)
    if initial is not None:
        expected = (batch, clusters, *features.shape[2:])
        if method != "kmeans" or initial.shape != expected:
            raise ConfigError(
                f"initial must be centres {expected} for kmeans: got {initial.shape} "
                f"for {method}"
            )
        initial = _rows(initial).reshape(batch, groups, clusters // groups, -1)
    each = clusters // groups
    return _joined(_cluster(rows, initial, key, each, method, representative))


def static_membership(
    features: Float[Array, "texts heads *features"], clusters: int, **options: Any
) -> Membership:
    """Clusters heads once for all requests, by their mean features over texts.

    Args:
      features: of one layer, a row for each head in each text.
      clusters: k.
      options: those of `cluster_heads`.

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
    """Draws a membership for each request: a baseline that looks at no head.

    A head of each cluster is drawn without replacement, the others' clusters evenly.

    Args:
      key: of the draw.
      batch: requests.
      heads: H.
      clusters: k.
      groups: as of `cluster_heads`.

    Raises:
      ConfigError: as by `cluster_heads`.

    Examples:
      >>> found = random_membership(jax.random.key(0), 2, 6, 3)
      >>> sorted(set(found.assign[0].tolist())), found.rep.shape
      ([0, 1, 2], (2, 3))
    """
    _check_counts(heads, clusters, groups)
    each, inside = clusters // groups, heads // groups

    def draw(key: jax.Array) -> Membership:
        order = jax.random.permutation(derive(key, "order"), inside)
        drawn = jax.random.randint(derive(key, "cluster"), (inside,), 0, each)
        drawn = drawn.at[:each].set(jnp.arange(each))
        assign = _canonical(jnp.zeros_like(drawn).at[order].set(drawn))
        return Membership(assign, jnp.argmax(_members(assign, each), axis=1))

    return _joined(jax.vmap(jax.vmap(draw))(jax.random.split(key, (batch, groups))))


class KeySlots(NamedTuple):
    """Where the key heads are kept that representatives need.

    Attributes:
      slot: `[batch, clusters]`, in which slot a cluster's key head is.
      head: `[batch, slots]`, the key head in each slot; those behind `used` are spare.
      used: `[batch]`, how many slots are needed.
    """

    slot: Int[Array, "batch clusters"]
    head: Int[Array, "batch slots"]
    used: Int[Array, " batch"]


def key_slots(rep: Int[Array, "batch clusters"], heads: int, kv_heads: int) -> KeySlots:
    """Keeps key head g of a grouped model if the representative of a cluster reads it.

    Head h reads key head ⌊h · kv_heads / heads⌋. min(clusters, kv_heads) slots are
    enough for any membership; kept heads lie in them by number.

    Args:
      rep: the representatives.
      heads: H.
      kv_heads: divides heads.

    Raises:
      ConfigError: kv_heads does not divide heads.

    Examples:
      >>> found = key_slots(jnp.array([[0, 4, 5]]), 6, 3)
      >>> found.slot.tolist(), found.head.tolist(), found.used.tolist()
      ([[0, 1, 1]], [[0, 2, 1]], [2])
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"kv_heads must divide heads: got kv_heads={kv_heads}, heads={heads}"
        )
    read = rep // (heads // kv_heads)
    needed = jnp.any(read[..., None] == jnp.arange(kv_heads), axis=1)
    slot = jnp.cumsum(needed, axis=1, dtype=jnp.int32) - 1
    head = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    return KeySlots(
        slot=jnp.take_along_axis(slot, read, axis=1),
        head=head[:, : min(rep.shape[1], kv_heads)],
        used=jnp.sum(needed, axis=1, dtype=jnp.int32),
    )


def within_cluster_error(
    features: Float[Array, "batch heads *features"], assign: Int[Array, "batch heads"]
) -> Float[Array, " batch"]:
    """Returns Σ_h ‖x_h − centre of its cluster‖², what k-means makes small.

    Examples:
      >>> rows = jnp.array([[[0.0], [2.0], [7.0]]])
      >>> within_cluster_error(rows, jnp.array([[0, 0, 1]])).tolist()
      [2.0]
    """
    apart = jax.vmap(lambda rows: between(rows, rows))(_rows(features))
    return jax.vmap(inertia)(apart, assign)


def between(
    rows: Float[Array, "rows features"], others: Float[Array, "others features"]
) -> Float[Array, "rows others"]:
    """Returns squared distances; from differences, as rows are nearly equal."""
    return jnp.sum(jnp.square(rows[:, None] - others[None]), axis=-1)


def inertia(
    apart: Float[Array, "heads heads"], assign: Int[Array, " heads"]
) -> Float[Array, ""]:
    """Returns Σ_c (1 / 2n_c) Σ_{i,j in c} apart_ij, `within_cluster_error` of rows."""
    same = assign[:, None] == assign
    return jnp.sum(jnp.where(same, apart, 0) / (2 * jnp.sum(same, axis=1)))


def spread(
    apart: Float[Array, "heads heads"], key: jax.Array, count: int
) -> Int[Array, " count"]:
    """Draws heads as first centres by k-means++; the first k of them are those for k.

    Each is drawn with a probability in proportion to its squared distance to the
    nearest of those before; where all are 0 it is head 0 again.
    """

    def draw(number: jax.Array, chosen: jax.Array) -> jax.Array:
        taken = jnp.arange(count) < number
        near = jnp.min(jnp.where(taken, apart[:, chosen], jnp.inf), axis=1)
        weight = jnp.where(number == 0, 1, near)
        head = jax.random.categorical(derive(key, "spread", number), jnp.log(weight))
        return chosen.at[number].set(head.astype(chosen.dtype))

    return jax.lax.fori_loop(0, count, draw, jnp.zeros(count, jnp.int32))


def settle(
    apart: Float[Array, "heads heads"],
    first: Float[Array, "heads slots"],
    count: int | Int[Array, ""],
) -> Int[Array, " heads"]:
    """Takes Lloyd's steps until no head changes its cluster.

    A step needs no centre, only squared distances between heads: ‖x_h − centre of c‖²
    = mean_{j in c} apart_hj − ½ mean_{i,j in c} apart_ij.

    Args:
      apart: squared distances between heads.
      first: squared distances to the first centres.
      count: clusters; slots behind them stay empty. At most as many as heads.
    """
    slots = first.shape[1]

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        _, assign, number = state
        own = _members(assign, slots).T.astype(apart.dtype)
        size = jnp.maximum(jnp.sum(own, axis=0), 1)
        mean = jnp.matmul(apart, own, precision="highest") / size
        within = jnp.sum(own * mean, axis=0) / (2 * size)
        return assign, _nearest_none_empty(mean - within, count), number + 1

    def moving(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        before, assign, number = state
        return jnp.any(before != assign) & (number < _STEPS)

    assign = _nearest_none_empty(first, count)
    start = (jnp.full_like(assign, -1), assign, jnp.int32(0))
    return jax.lax.while_loop(moving, step, start)[1]


def _nearest_none_empty(
    distance: Float[Array, "heads slots"], count: int | Int[Array, ""]
) -> Int[Array, " heads"]:
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


def _merge(apart: Float[Array, "heads heads"], count: int) -> Int[Array, " heads"]:
    """Merges the two closest clusters by average linkage until `count` are left.

    A cluster has the number of its lowest head.
    """
    heads = len(apart)

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        apart, size, assign = state
        pair = jnp.unravel_index(jnp.argmin(apart), apart.shape)
        low, high = jnp.minimum(*pair), jnp.maximum(*pair)
        both = size[low] * apart[low] + size[high] * apart[high]
        mean = both / (size[low] + size[high])
        apart = apart.at[low].set(mean).at[:, low].set(mean)
        apart = apart.at[high].set(jnp.inf).at[:, high].set(jnp.inf)
        size = size.at[low].add(size[high])
        assign = jnp.where(assign == high, low, assign).astype(assign.dtype)
        return apart, size, assign

    none = jnp.where(jnp.eye(heads, dtype=bool), jnp.inf, apart)
    numbers = jnp.arange(heads, dtype=jnp.int32)
    start = (none, jnp.ones(heads, apart.dtype), numbers)
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
    def one(rows: jax.Array, initial: jax.Array | None) -> tuple:
        apart = between(rows, rows)
        if method == "agglomerative":
            assign = _merge(_cosine_distance(rows), clusters)
        elif initial is None:
            assert key is not None
            centres = spread(apart, key, clusters)
            assign = settle(apart, apart[:, centres], clusters)
        else:
            assign = settle(apart, between(rows, initial), clusters)
        assign = _canonical(assign)
        members = _members(assign, clusters)
        if representative == "lowest":
            return assign, jnp.argmax(members, axis=1)
        same = assign[:, None] == assign
        total = jnp.sum(jnp.where(same, apart, 0), axis=1)
        return assign, jnp.argmin(jnp.where(members, total, jnp.inf), axis=1)

    return jax.vmap(jax.vmap(one))(rows, initial)


def _cosine_distance(rows: Float[Array, "heads f"]) -> Float[Array, "heads heads"]:
    norm = jnp.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / jnp.maximum(norm, jnp.finfo(rows.dtype).tiny)
    return 1 - jnp.matmul(unit, unit.T, precision="highest")


def _rows(features: Float[Array, "batch rows *features"]) -> jax.Array:
    dtype = jnp.promote_types(features.dtype, jnp.float32)
    return features.astype(dtype).reshape(*features.shape[:2], -1)


def _members(assign: Int[Array, " heads"], count: int) -> Bool[Array, "count heads"]:
    return assign == jnp.arange(count)[:, None]


def _canonical(assign: Int[Array, " heads"]) -> Int[Array, " heads"]:
    """Numbers clusters by their lowest heads."""
    lowest = jnp.argmax(assign[:, None] == assign, axis=1)
    rank = jnp.cumsum(lowest == jnp.arange(len(assign))) - 1
    return rank[lowest]


def _joined(found: Any) -> Membership:
    """Numbers the clusters and heads `[batch, groups, ...]` of groups through."""
    assign, rep = found
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
