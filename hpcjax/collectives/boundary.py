"""Boundary rows: what parts of a table, one on each device, need of each other's rows.

Who needs which rows is known before, so every device's list is in the program. Pairs
of parts, the longest first, are put into rounds in which each sends and receives at
most once; a round is one permutation, as long as its longest pair. One all-to-all of
blocks that are all padded to the longest pair, and an all-gather of all rows, are what
that is to be compared with.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from hpcjax.core import checks
from hpcjax.core.varying import require_axes, vary

Pair = tuple[int, int]
"""A part that sends, and one that receives."""
BoundaryScheme = Literal["halo", "all_to_all", "allgather"]
BOUNDARY_SCHEMES = ("halo", "all_to_all", "allgather")


class Round(NamedTuple):
    """One collective.

    Attributes:
      rows: of its own that each part sends, [parts, length]; row 0 where it has fewer.
      pairs: who sends to whom; all do in an all-to-all and an all-gather.
    """

    rows: Int[np.ndarray, "parts length"]
    pairs: tuple[Pair, ...]


class Boundary(NamedTuple):
    """The collectives of an exchange, for all parts; `plan_boundary` makes it.

    Attributes:
      scheme: how rows are sent.
      rounds: one after another; what arrives in them lies in that order.
      arriving: rows that a part has before its own, after the exchange.
    """

    scheme: BoundaryScheme
    rounds: tuple[Round, ...]
    arriving: int


def plan_boundary(
    needs: Mapping[Pair, Int[np.ndarray, " rows"]],
    sizes: Int[np.ndarray, " parts"],
    scheme: BoundaryScheme = "halo",
) -> tuple[Boundary, dict[Pair, Int[np.ndarray, " rows"]]]:
    """Returns an exchange, and where the rows of each pair arrive.

    Args:
      needs: the rows of one part that another one needs, each once; by (who has them,
        who needs them).
      sizes: rows of each part.
      scheme: "halo" in rounds, "all_to_all" padded to the longest pair, "allgather" of
        all rows.

    Raises:
      ConfigError: an unknown scheme, a pair of one part or of parts that are not there,
        or rows that a part does not have, or twice.

    Examples:
      >>> needs = {(0, 1): np.array([2, 5]), (2, 1): np.array([3])}
      >>> plan, places = plan_boundary(needs, np.array([6, 6, 6]))
      >>> plan.arriving, places[0, 1].tolist(), places[2, 1].tolist()
      (3, [0, 1], [2])
    """
    checks.require_choice("scheme", scheme, BOUNDARY_SCHEMES)
    parts = len(sizes)
    for (source, target), rows in needs.items():
        good = source != target and {source, target} <= {*range(parts)}
        checks.require(
            good, f"pairs are of two of {parts} parts", pair=(source, target)
        )
        good = bool(np.all((rows >= 0) & (rows < sizes[source])))
        rule = f"rows must be among the {sizes[source]} of part {source}, each once"
        checks.require(good and len(np.unique(rows)) == len(rows), rule, rows=rows)
    needs = {pair: rows for pair, rows in needs.items() if len(rows)}
    if not needs:
        return Boundary(scheme, (), 0), {}
    longest = max(map(len, needs.values()))
    if scheme == "allgather":
        most = int(np.max(sizes))
        every = np.tile(np.arange(most, dtype=np.int32), (parts, 1))
        places = {pair: pair[0] * most + rows for pair, rows in needs.items()}
        return Boundary(scheme, (Round(every, ()),), parts * most), places
    if scheme == "all_to_all":
        sent = np.zeros((parts, parts, longest), np.int32)
        for (source, target), rows in needs.items():
            sent[source, target, : len(rows)] = rows
        places = {p: p[0] * longest + np.arange(len(rows)) for p, rows in needs.items()}
        whole = Round(sent.reshape(parts, -1), ())
        return Boundary(scheme, (whole,), parts * longest), places
    rounds, places, start = [], {}, 0
    for pairs in _fill_rounds({pair: len(rows) for pair, rows in needs.items()}):
        sent = np.zeros((parts, len(needs[pairs[0]])), np.int32)
        for pair in pairs:
            sent[pair[0], : len(needs[pair])] = needs[pair]
            places[pair] = start + np.arange(len(needs[pair]))
        rounds.append(Round(sent, tuple(pairs)))
        start += sent.shape[1]
    return Boundary(scheme, tuple(rounds), start), places


def _fill_rounds(lengths: Mapping[Pair, int]) -> list[list[Pair]]:
    """Returns pairs, longest first, in the first rounds where both sides are free."""
    rounds: list[list[Pair]] = []
    for pair in sorted(lengths, key=lambda pair: (lengths[pair], pair[::-1]))[::-1]:
        for others in rounds:
            if all(pair[0] != o[0] and pair[1] != o[1] for o in others):
                others.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def gather_rows(
    x: Shaped[Array, "own ..."], boundary: Boundary, axis: str
) -> Shaped[Array, "all ..."]:
    """Returns the rows that arrive at this device, then its own; inside `shard_map`.

    The transpose sends slopes of what arrived back, to be added. Places of padding have
    some row of the sender, or zeros.

    Args:
      x: this device's rows; those after the sizes of the plan are never sent.
      boundary: the exchange.
      axis: of the mesh, on which a device's place is its part.

    Raises:
      ConfigError: no such axis, another number of devices than of parts, or too few
        rows.
    """
    require_axes(axis, "an exchange of boundary rows")
    devices, found = lax.axis_size(axis), []
    for rows, pairs in boundary.rounds:
        rule = "an exchange of boundary rows needs a device for each part"
        checks.require(devices == len(rows), rule, parts=len(rows), devices=devices)
        rule = "a device must have the rows that it sends"
        checks.require(len(x) > rows.max(), rule, rows=len(x), last=int(rows.max()))
        x = vary(x, axis)
        if boundary.scheme == "allgather":
            found.append(lax.all_gather(x[: rows.shape[1]], axis, tiled=True))
            continue
        sent = x[jnp.asarray(rows)[lax.axis_index(axis)]]
        if boundary.scheme == "all_to_all":
            found.append(lax.all_to_all(sent, axis, 0, 0, tiled=True))
        else:
            found.append(lax.ppermute(sent, axis, pairs))
    return jnp.concatenate([*found, x]) if found else x
