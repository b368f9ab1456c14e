"""Two edge-disjoint Hamiltonian cycles of a torus; imports no JAX.

A torus of r × c members has an edge from (i, j) to its right, (i, j + 1), and one
down, (i + 1, j), indices modulo r and c: 2rc edges, half of them for each cycle, so
that rings around both use every link in both directions.

References:
  Hoefler et al., HammingMesh, SC 2022, appendix D (the closed form); Kotzig, 1973, that
  every product of two cycles has such a decomposition.
"""

import functools
import math

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from hpcjax.core import checks, errors

# Colours of the edges: which cycle they are of.
_FIRST, _SECOND = 0, 1
_UPHILL = 0.02  # how often the search takes a swap that makes more cycles
_TRIALS = 20_000


@functools.lru_cache(maxsize=64)
def hamiltonian_cycles(rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """Returns two cycles through all members that share no edge.

    Where cols divides rows and gcd(rows, cols − 1) = 1, the first cycle goes along row
    i from column i (cols − 1), and down at its end; the second has the edges that are
    left. Else the edges are coloured by a random search with a fixed seed.

    Args:
      rows: r, at least 2; even if cols is 2.
      cols: c, likewise.

    Returns:
      Both cycles, members i · cols + j in the order of a walk.

    Raises:
      ConfigError: an odd number times 2, of which there are none, or less than 2.

    Examples:
      >>> hamiltonian_cycles(2, 2)
      ((0, 1, 3, 2), (1, 0, 2, 3))
    """
    least, most = min(rows, cols), max(rows, cols)
    rule = "two Hamiltonian cycles need at least 2x2 members, and no odd number times 2"
    good = least > 2 or (least == 2 and most % 2 == 0)
    checks.require(good, rule, rows=rows, cols=cols)
    if cols == 2:
        return _zigzag(rows)
    if rows == 2 or (rows < cols and cols % rows == 0):
        turned = hamiltonian_cycles(cols, rows)
        return tuple(
            tuple(m % rows * cols + m // rows for m in walk) for walk in turned
        )
    if rows % cols == 0 and math.gcd(rows, cols - 1) == 1:
        right, down = _closed_form(rows, cols)
    else:
        right, down = _search(rows, cols)
    return _walk(right, down, _FIRST), _walk(right, down, _SECOND)


def ring_cycles(rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """Returns the cycles around which rings of a torus go: two, or one.

    There is one where `hamiltonian_cycles` has no two: down the first column and up the
    second, or around the only row or column.

    Examples:
      >>> ring_cycles(3, 2), ring_cycles(1, 3)
      (((0, 2, 4, 5, 3, 1),), ((0, 1, 2),))
    """
    checks.require_count(1, rows=rows, cols=cols)
    least, most = min(rows, cols), max(rows, cols)
    if least == 1:
        return (tuple(range(most)),)
    if least == 2 and most % 2:
        grid = np.arange(rows * cols).reshape(rows, cols)
        long = grid if cols == 2 else grid.T
        return ((*long[:, 0].tolist(), *long[::-1, 1].tolist()),)
    return hamiltonian_cycles(rows, cols)


def _zigzag(rows: int) -> tuple[tuple[int, ...], ...]:
    """Returns the cycles of rows × 2, whose members have two links to the other column.

    Each crosses over in every row; the first goes down in the right column where the
    second does in the left.
    """
    first = [2 * i + (j if i % 2 == 0 else 1 - j) for i in range(rows) for j in (0, 1)]
    return tuple(first), tuple(m ^ 1 for m in first)


def _closed_form(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the colours of the edges to the right and down, `[rows, cols]`."""
    right = np.full((rows, cols), _FIRST)
    down = np.full((rows, cols), _SECOND)
    row = np.arange(rows)
    # The walk leaves row i in the column before the one where it has entered.
    end = (row * (cols - 1) + cols - 1) % cols
    right[row, end], down[row, end] = _SECOND, _FIRST
    return right, down


def _search(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns colours by swaps in unit squares that begin with rows and columns.

    Where both horizontal edges of a square have one colour and both vertical ones the
    other, swapping them leaves every member with two edges of each colour. Edges of two
    cycles are then of one; those of one cycle are of one still, or of two. Swaps that
    join cycles of both colours come first. A swap stays if there are no more cycles
    than before, and now and then if there are.
    """
    right = np.full((rows, cols), _FIRST)
    down = np.full((rows, cols), _SECOND)
    draws = np.random.default_rng(0)
    labels = _label(right, down)
    for _ in range(_TRIALS):
        if _count(labels) == 2:
            return right, down
        square = _choose(right, down, labels, draws)
        _swap(right, down, square)
        found = _label(right, down)
        if _count(found) <= _count(labels) or draws.random() < _UPHILL:
            labels = found
        else:
            _swap(right, down, square)
    raise errors.ConfigError(
        f"no two Hamiltonian cycles of {rows}x{cols} were found in {_TRIALS} trials"
    )


def _choose(
    right: np.ndarray, down: np.ndarray, labels: np.ndarray, draws: np.random.Generator
) -> tuple[int, int]:
    """Returns one of the squares that can be swapped and join most cycles."""
    below, beside = np.roll(right, -1, axis=0), np.roll(down, -1, axis=1)
    can = (right == below) & (down == beside) & (right != down)
    # The number of a member's cycle of each colour, [2, rows, cols]: the edges of a
    # square's two rows begin in (i, j) and (i + 1, j), those of its columns in (i, j)
    # and (i, j + 1).
    flat = np.where(right == _FIRST, labels[0], labels[1])
    steep = np.where(down == _FIRST, labels[0], labels[1])
    joins = (flat != np.roll(flat, -1, axis=0)).astype(int)
    joins += steep != np.roll(steep, -1, axis=1)
    best = np.flatnonzero(can & (joins == joins[can].max()))
    i, j = divmod(int(draws.choice(best)), right.shape[1])
    return i, j


def _swap(right: np.ndarray, down: np.ndarray, square: tuple[int, int]) -> None:
    """Swaps the colours of a square's edges, in place."""
    i, j = square
    both = [i, (i + 1) % len(right)], [j, (j + 1) % right.shape[1]]
    right[both[0], j], down[i, both[1]] = down[i, j], right[i, j]


def _label(right: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Returns the number of each member's cycle of both colours, `[2, rows, cols]`."""
    found = [
        csgraph.connected_components(_graph(right, down, colour))[1]
        for colour in (_FIRST, _SECOND)
    ]
    return np.stack(found).reshape(2, *right.shape)


def _count(labels: np.ndarray) -> int:
    """Returns how many cycles both colours have."""
    return int(labels[0].max() + labels[1].max() + 2)


def _graph(right: np.ndarray, down: np.ndarray, colour: int) -> sparse.csr_array:
    """Returns the adjacency of the edges of a colour."""
    rows, cols = right.shape
    member = np.arange(rows * cols).reshape(rows, cols)
    beside, below = np.roll(member, -1, axis=1), np.roll(member, -1, axis=0)
    own = right == colour, down == colour
    start = np.concatenate([member[own[0]], member[own[1]]])
    end = np.concatenate([beside[own[0]], below[own[1]]])
    both = np.concatenate([start, end]), np.concatenate([end, start])
    ones = np.ones(2 * len(start), np.int8)
    return sparse.csr_array((ones, both), shape=(member.size, member.size))


def _walk(right: np.ndarray, down: np.ndarray, colour: int) -> tuple[int, ...]:
    """Returns the members in the order of the only cycle of a colour."""
    graph = _graph(right, down, colour)
    before, member, walk = -1, 0, []
    while not walk or member != 0:
        walk.append(member)
        one, other = graph.indices[graph.indptr[member] : graph.indptr[member + 1]]
        before, member = member, int(other if one == before else one)
    return tuple(walk)
