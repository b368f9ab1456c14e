"""Collective operations of all ranks, in numpy, over any transport.

All ranks call them in the same order; calls of different threads need tags of different
kind or round. Sums are made in the array's dtype, in an order that gives every rank the
same bits. P is the number of ranks, n the bytes of an array.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.mailbox import Tag
from hpcjax.hostcomm.transport import Transport

LARGE = 128 * 1024  # bytes from which a ring is taken, of more than two ranks
_EMPTY = np.empty(0, np.uint8)


def barrier(transport: Transport, *, tag: Tag = Tag("barrier")) -> None:
    """Returns once every rank has called it.

    Every rank sends ceil(log2 P) empty arrays (dissemination).

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     barrier(alone)
    """
    for phase in range((transport.size - 1).bit_length()):
        step = 1 << phase
        at = tag._replace(phase=phase)
        transport.send((transport.rank + step) % transport.size, at, _EMPTY)
        transport.receive((transport.rank - step) % transport.size, at)


def broadcast(
    transport: Transport,
    array: np.ndarray | None,
    *,
    root: int = 0,
    tag: Tag = Tag("broadcast"),
) -> np.ndarray:
    """Returns the array of one rank in all.

    (P - 1) n bytes are sent in all, by a binomial tree; ceil(log2 P) steps.

    Args:
      transport: ours.
      array: what the root sends; not looked at elsewhere.
      root: its rank.
      tag: its kind and round are used.

    Raises:
      ConfigError: there is no such rank, or the root has no array.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     broadcast(alone, np.arange(3))
      array([0, 1, 2])
    """
    size = transport.size
    place = (transport.rank - root) % size
    checks.require(0 <= root < size, f"root must be one of {size} ranks", root=root)
    step = 1
    while step <= place:
        step <<= 1
    if place == 0:
        checks.require(array is not None, "the root must have an array", array=array)
        given = np.array(array)
    else:
        given = transport.receive((place - (step >> 1) + root) % size, tag)
    while step + place < size:
        transport.send((place + step + root) % size, tag, given)
        step <<= 1
    return given


def allreduce(
    transport: Transport,
    array: np.ndarray,
    *,
    operation: np.ufunc = np.add,
    method: Literal["auto", "doubling", "ring"] = "auto",
    tag: Tag = Tag("allreduce"),
) -> np.ndarray:
    """Returns the sum of all ranks' arrays in all, the same bits everywhere.

    By recursive doubling, with p the largest power of two in P, the ranks below p send
    n log2 p bytes each; each of the P - p others sends its n to one of them before, and
    gets n back. By a ring every rank sends 2 n (P - 1) / P bytes in 2 (P - 1) steps:
    its array twice, each time without one of P parts.

    Args:
      transport: ours.
      array: of the same shape and dtype in all ranks.
      operation: commutative, elementwise, such as `np.maximum`.
      method: "auto" takes the ring for 128 KiB and more of more than two ranks.
      tag: its kind and round are used.

    Raises:
      ConfigError: an unknown method, or arrays that differ in shape or dtype.

    Examples:
      >>> from concurrent.futures import ThreadPoolExecutor
      >>> from hpcjax.hostcomm import connected
      >>> def rank(transport):
      ...     with transport:
      ...         return allreduce(transport, np.full(2, transport.rank)).tolist()
      >>> with ThreadPoolExecutor(3) as threads:
      ...     list(threads.map(rank, connected(3)))
      [[3, 3], [3, 3], [3, 3]]
    """
    checks.require_choice("method", method, ("auto", "doubling", "ring"))
    if method == "auto":
        large = array.nbytes >= LARGE and transport.size > 2
        method = "ring" if large else "doubling"
    if method == "doubling":
        return _double(transport, array, operation, tag)
    parts = np.array_split(array.reshape(-1), transport.size)
    own = _reduce_around(transport, parts, operation, tag)
    second = tag._replace(phase=tag.phase + 1)
    made = np.concatenate(allgatherv(transport, own, tag=second))
    return made.reshape(array.shape)


def reduce_scatter(
    transport: Transport,
    array: np.ndarray,
    *,
    sizes: Sequence[int] | None = None,
    operation: np.ufunc = np.add,
    tag: Tag = Tag("reduce_scatter"),
) -> np.ndarray:
    """Returns our part of the sum of all ranks' arrays, flat.

    Every rank sends n bytes without those of its own part, in P - 1 steps.

    Args:
      transport: ours.
      array: of the same shape and dtype in all ranks.
      sizes: of the parts, by rank; None: as equal as can be, the first ones larger.
      operation: commutative, elementwise.
      tag: its kind and round are used.

    Raises:
      ConfigError: sizes that are not one per rank or do not add up, or arrays that
        differ.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     reduce_scatter(alone, np.eye(2)).tolist()
      [1.0, 0.0, 0.0, 1.0]
    """
    flat = array.reshape(-1)
    if sizes is None:
        parts = np.array_split(flat, transport.size)
    else:
        fits = len(sizes) == transport.size and sum(sizes) == flat.size
        rule = f"sizes must be {transport.size} and add up to {flat.size}"
        checks.require(fits and min(sizes) >= 0, rule, sizes=list(sizes))
        parts = np.split(flat, list(itertools.accumulate(sizes))[:-1])
    return _reduce_around(transport, parts, operation, tag)


def allgather(
    transport: Transport, array: np.ndarray, *, tag: Tag = Tag("allgather")
) -> np.ndarray:
    """Returns the arrays of all ranks in all, `[P, ...]`; they have the same shape.

    In ceil(log2 P) steps, each with twice as many arrays as the last one (Bruck et al.
    1997): every rank sends P - 1 arrays in few messages. For large ones `allgatherv` is
    as good, and copies less.

    Raises:
      ConfigError: arrays that differ in shape or dtype.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     allgather(alone, np.arange(2))
      array([[0, 1]])
    """
    rank, size = transport.rank, transport.size
    made, phase = np.array(array)[None], tag.phase
    while (held := len(made)) < size:
        at = tag._replace(phase=phase)
        transport.send((rank - held) % size, at, made[: size - held])
        source = (rank + held) % size
        got = transport.receive(source, at)
        _check_alike(source, got, made[: size - held])
        made, phase = np.concatenate([made, got]), phase + 1
    return np.roll(made, rank, axis=0)  # ours, and those of the next ranks


def allgatherv(
    transport: Transport, array: np.ndarray, *, tag: Tag = Tag("allgatherv")
) -> list[np.ndarray]:
    """Returns the arrays of all ranks in all, by rank; each may have its own shape.

    Around a ring in P - 1 steps: every rank sends all arrays but that of the next one.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     allgatherv(alone, np.arange(2))
      [array([0, 1])]
    """
    rank, size = transport.rank, transport.size
    made: dict[int, np.ndarray] = {rank: np.array(array)}
    for step in range(size - 1):
        transport.send((rank + 1) % size, tag, made[(rank - step) % size])
        made[(rank - step - 1) % size] = transport.receive((rank - 1) % size, tag)
    return [made[each] for each in range(size)]


def alltoallv(
    transport: Transport,
    arrays: Sequence[np.ndarray],
    *,
    tag: Tag = Tag("alltoallv"),
) -> list[np.ndarray]:
    """Gives every rank its array of ours; each may have its own shape.

    Every rank sends its arrays but its own one, to one rank after the other: in step s
    to the s-th next, so that no rank gets more than others at a time.

    Args:
      transport: ours.
      arrays: for each rank.
      tag: its kind and round are used.

    Returns:
      What each rank had for us.

    Raises:
      ConfigError: not one array for each rank.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     alltoallv(alone, [np.arange(2)])
      [array([0, 1])]
    """
    rank, size = transport.rank, transport.size
    rule = f"there must be an array for each of {size} ranks"
    checks.require(len(arrays) == size, rule, arrays=len(arrays))
    made: dict[int, np.ndarray] = {rank: np.array(arrays[rank])}
    # All leave before the first is waited for: one late rank delays its own only.
    for step in range(1, size):
        to = (rank + step) % size
        transport.send(to, tag, arrays[to])
    for step in range(1, size):
        source = (rank - step) % size
        made[source] = transport.receive(source, tag)
    return [made[each] for each in range(size)]


def _double(
    transport: Transport, array: np.ndarray, operation: np.ufunc, tag: Tag
) -> np.ndarray:
    """Recursive doubling; both of a pair make a + b or b + a, which are the same."""
    rank, size = transport.rank, transport.size
    power = 1 << (size.bit_length() - 1)
    after = tag._replace(phase=power.bit_length())
    if rank >= power:  # folded onto another one
        transport.send(rank - power, tag, array)
        return transport.receive(rank - power, after)
    made = np.array(array)
    if rank + power < size:
        _add(transport, rank + power, tag, made, operation)
    masks = [1 << phase for phase in range(power.bit_length() - 1)]
    add_over_masks(transport, made, masks, operation, tag._replace(phase=1))
    if rank + power < size:
        transport.send(rank + power, after, made)
    return made


def add_over_masks(
    transport: Transport,
    made: np.ndarray,
    masks: Sequence[int],
    operation: np.ufunc,
    tag: Tag,
) -> None:
    """Adds up, in place, over the ranks that differ from ours in bits of the masks.

    One exchange with rank XOR mask for each mask; its phase is the tag's and up.
    """
    for phase, mask in enumerate(masks, tag.phase):
        at, other = tag._replace(phase=phase), transport.rank ^ mask
        transport.send(other, at, made)
        _add(transport, other, at, made, operation)


def add_by_halves(
    transport: Transport, made: np.ndarray, masks: Sequence[int], tag: Tag
) -> None:
    """Does what `add_over_masks` does, by reduce-scatter and all-gather.

    In groups of S it sends 2 n (S - 1) / S bytes in twice as many messages, the phases
    of which go on from the tag's.
    """
    low, high = 0, made.size
    given: list[tuple[int, int]] = []
    for phase, mask in enumerate(masks, tag.phase):
        at, other = tag._replace(phase=phase), transport.rank ^ mask
        middle = (low + high) // 2
        halves = (low, middle), (middle, high)
        (low, high), theirs = halves[:: -1 if transport.rank & mask else 1]
        transport.send(other, at, made[slice(*theirs)])
        _add(transport, other, at, made[low:high], np.add)
        given.append(theirs)
    for back, (begin, end) in enumerate(reversed(given), 1):
        at = tag._replace(phase=tag.phase + len(masks) + back - 1)
        other = transport.rank ^ masks[-back]
        transport.send(other, at, made[low:high])
        made[begin:end] = transport.receive(other, at)
        low, high = min(low, begin), max(high, end)


def _reduce_around(
    transport: Transport, parts: list[np.ndarray], operation: np.ufunc, tag: Tag
) -> np.ndarray:
    """Part r goes around the ring from rank r + 1 to r, each adding its own to it."""
    rank, size = transport.rank, transport.size
    made = np.array(parts[(rank - 1) % size])
    for step in range(size - 1):
        transport.send((rank + 1) % size, tag, made)
        made = np.array(parts[(rank - step - 2) % size])
        _add(transport, (rank - 1) % size, tag, made, operation)
    return made


def _add(
    transport: Transport,
    source: int,
    tag: Tag,
    made: np.ndarray,
    operation: np.ufunc,
) -> None:
    got = transport.receive(source, tag)
    _check_alike(source, got, made)
    operation(got, made, out=made)


def _check_alike(source: int, got: np.ndarray, ours: np.ndarray) -> None:
    checks.require(
        got.shape == ours.shape and got.dtype == ours.dtype,
        f"arrays must be the same in all ranks, rank {source}'s is not",
        theirs=f"{got.dtype}{got.shape}",
        ours=f"{ours.dtype}{ours.shape}",
    )
