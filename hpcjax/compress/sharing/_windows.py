"""Where the windows of layers lie in their group's store.

Sources:
  The order of "aligned" windows is that of the authors' code (BryanPlummer/SSN).
"""

import collections
from collections.abc import Sequence


def place_aligned(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], numbers: int
) -> list[int]:
    """Returns the start of each window, such that layers of one shape share them whole.

    Layers of the most frequent shape come first. Windows of one size lie side by side,
    and begin again at 0 where the store ends. A new size begins behind the first window
    of each size before it.

    Args:
      shapes: of the layers.
      sizes: of their windows.
      numbers: in the store, no fewer than in any window.

    Examples:
      >>> place_aligned([(60,), (60,)], [60, 60], 100)
      [0, 0]
    """
    frequency = collections.Counter(shapes)
    ordered = sorted(
        range(len(shapes)), key=lambda i: _rank(shapes[i], shapes, frequency)
    )
    starts = [0] * len(shapes)
    counters: dict[int, int] = {}
    behind = 0  # the first windows of all sizes so far
    for i in ordered:
        size = sizes[i]
        if size not in counters:
            counters[size] = -(-behind // size)
            if counters[size] >= numbers // size:
                counters[size] = behind = 0
            behind += size
        if (counters[size] + 1) * size > numbers:
            counters[size] = 0
        starts[i] = counters[size] * size
        counters[size] += 1
    return starts


def place_circular(sizes: Sequence[int], numbers: int) -> list[int]:
    """Returns starts such that each window begins where the one before it ended.

    A window may go on at the store's beginning. Every number of the store is used if
    there are enough windows, and none twice more often than another.

    Examples:
      >>> place_circular([60, 60], 100)
      [0, 60]
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = (end + size) % numbers
    return starts


def _rank(
    shape: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    frequency: collections.Counter[tuple[int, ...]],
) -> tuple[int, int]:
    """Ranks a shape by its frequency, then by where it first occurs."""
    return -frequency[shape], list(shapes).index(shape)
