"""Clustered attention of one query, in Triton."""

import triton
import triton.language as tl


@triton.jit
def attend(
    order: tl.tensor,
    begins: tl.tensor,
    key_heads: tl.tensor,
    positions: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    y: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    TIME: tl.constexpr,
    CLUSTERS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """Attends for the heads of a cluster to a block of positions.

    Args:
      order: int32 [batch, HEADS], heads by cluster
      begins: int32 [batch, CLUSTERS + 1], of each cluster in `order`
      key_heads: int32 [batch, CLUSTERS]
      positions: int32 [batch], of the query
      query: [batch, CLUSTERS, HEAD_DIM]
      keys: [batch, TIME, KEY_HEADS, HEAD_DIM]
      values: [batch, TIME, KV_HEADS, HEAD_DIM]
      y: float32 [batch, splits, HEADS, WIDTH], of one block; not written where the
        query sees none of the block
      largest: float32 [batch, splits, CLUSTERS], of the scores
      total: float32 [batch, splits, CLUSTERS], of the exponentials
      TIME: positions of the cache
      CLUSTERS: maps
      HEADS: query heads
      KEY_HEADS: heads of the keys
      KV_HEADS: heads of the values
      HEAD_DIM: features
      WIDTH: the power of two from HEAD_DIM on
      BLOCK: positions of a program
      SCALE: of the scores
    """
    batch, cluster, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = tl.minimum(tl.load(positions + batch), TIME - 1)
    place = split * BLOCK + tl.arange(0, BLOCK)
    feature = tl.arange(0, WIDTH)
    seen = place <= last
    # Positions behind the query's are not read, which saves their bandwidth.
    tile = seen[:, None] & (feature < HEAD_DIM)[None, :]
    # Caches may have more entries than int32 counts.
    line = (batch.to(tl.int64) * TIME + place)[:, None]
    own = batch * CLUSTERS + cluster
    head = tl.load(key_heads + own)
    k = tl.load(
        keys + (line * KEY_HEADS + head) * HEAD_DIM + feature, mask=tile, other=0
    )
    q = tl.load(query + own * HEAD_DIM + feature, mask=feature < HEAD_DIM, other=0)
    scores = tl.sum(k.to(tl.float32) * q.to(tl.float32)[None, :], 1) * SCALE
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.max(scores, 0)
    # In a block behind the position the highest score is -inf, and exp(-inf + inf) NaN.
    weights = tl.where(seen, tl.exp(scores - highest), 0)
    part = batch * tl.num_programs(2) + split
    tl.store(largest + part * CLUSTERS + cluster, highest)
    tl.store(total + part * CLUSTERS + cluster, tl.sum(weights, 0))
    first = tl.load(begins + batch * (CLUSTERS + 1) + cluster)
    # No heads, hence no reads, in a block behind the position.
    some = split * BLOCK <= last
    end = tl.where(some, tl.load(begins + batch * (CLUSTERS + 1) + cluster + 1), first)
    # The next heads' values are under way while one's are added.
    for i in tl.range(first, end, num_stages=3):
        head = tl.load(order + batch * HEADS + i)
        from_ = (line * KV_HEADS + head // (HEADS // KV_HEADS)) * HEAD_DIM + feature
        v = tl.load(values + from_, mask=tile, other=0).to(tl.float32)
        to = (part * HEADS + head) * WIDTH + feature
        tl.store(y + to, tl.sum(v * weights[:, None], 0))
