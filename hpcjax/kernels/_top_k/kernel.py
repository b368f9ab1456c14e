"""Selection above a threshold, in Triton; reads the values once."""

import triton
import triton.language as tl


@triton.jit
def select_above(
    x: tl.tensor,
    threshold: tl.tensor,
    places: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Selects the entries of one block.

    Args:
      x: [SIZE]
      threshold: [1]
      places: [blocks * BLOCK], of the selected entries at the front of each block
      values: [blocks * BLOCK], likewise
      counts: [blocks], of the selected entries
      SIZE: of x
      BLOCK: entries of a program
    """
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x + place, mask=place < SIZE, other=0)
    # See `order.magnitudes`.
    order = own.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    chosen = (order >= tl.load(threshold)) & (order > 0)
    ranks = tl.cumsum(chosen.to(tl.int32), 0)
    target = block * BLOCK + ranks - 1
    tl.store(places + target, place, mask=chosen)
    tl.store(values + target, own, mask=chosen)
    tl.store(counts + block, tl.sum(chosen.to(tl.int32), 0))
