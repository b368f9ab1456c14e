"""What a compiled program sends, along which axes of its mesh, and what fits."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, UnsupportedOp
from hpcjax.perf.hlo import Collective, collectives, peak_memory


def bytes_by_axis(
    compiled: Compiled, mesh: Mesh
) -> dict[tuple[tuple[str, ...], str], int]:
    """Returns the bytes of operands per device of one run, by mesh axes and kind.

    A collective among groups of one device sends nothing, and is left out; XLA on CPU
    keeps such all-reduces.

    Args:
      compiled: a program on the devices of `mesh`.
      mesh: names the axes along which devices of a group differ.

    Returns:
      `{(axes, kind): bytes}`, axes in the order of the mesh.
    """
    totals: Counter[tuple[tuple[str, ...], str]] = Counter()
    for collective in collectives(compiled):
        if axes := axes_of(collective, mesh):
            totals[axes, collective.kind] += collective.total
    return dict(totals)


def ring_bytes(compiled: Compiled, devices: int) -> float:
    """Returns the bytes that one device sends in a run with bandwidth-optimal rings.

    With s bytes of operands on each device of a group of p, a device sends
    2 s (p − 1) / p for an all-reduce, s (p − 1) / p for a reduce-scatter or an
    all-to-all, s (p − 1) for an all-gather, and s for a permute.

    Args:
      compiled: the program.
      devices: p, of collectives among all devices.

    Raises:
      UnsupportedOp: a collective of another kind.
    """
    return sum(
        collective.total
        * sent_per_byte(
            collective.kind, len((collective.groups or [range(devices)])[0])
        )
        for collective in collectives(compiled)
    )


def ring_bytes_by_axis(compiled: Compiled, mesh: Mesh) -> dict[tuple[str, ...], float]:
    """Returns what `ring_bytes` does, by the mesh axes along which it is sent.

    Args:
      compiled: a program on the devices of `mesh`.
      mesh: names the axes.

    Returns:
      `{axes: bytes}`, axes in the order of the mesh.

    Raises:
      UnsupportedOp: as `ring_bytes`.
    """
    totals: dict[tuple[str, ...], float] = defaultdict(float)
    for (axes, kind), size in bytes_by_axis(compiled, mesh).items():
        parts = math.prod(mesh.shape[axis] for axis in axes)
        totals[axes] += size * sent_per_byte(kind, parts)
    return dict(totals)


def sent_per_byte(kind: str, devices: int) -> float:
    """Returns what a device of a group sends for a byte of its operand, with rings."""
    # A device sends all but its own one of p parts. An all-reduce does so twice: it is
    # a reduce-scatter followed by an all-gather of the sums. An all-gather's operand is
    # one part already, which passes p - 1 links.
    share = (devices - 1) / devices
    sent = {
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-to-all": share,
        "all-gather": devices - 1,
        "collective-permute": 1,
    }
    if kind not in sent:
        raise UnsupportedOp(f"what {kind} sends is not known")
    return sent[kind]


def ring_rounds(collective: Collective, mesh: Mesh) -> int:
    """Returns the messages that a device sends one after another, with rings.

    Of p devices p − 1, for an all-reduce twice as many, and for a permute one.

    Args:
      collective: of a program on the devices of `mesh`.
      mesh: names the axes.
    """
    others = math.prod(mesh.shape[axis] for axis in axes_of(collective, mesh)) - 1
    if collective.kind == "collective-permute":
        return min(1, others)
    return others * (2 if collective.kind == "all-reduce" else 1)


def axes_of(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which devices that send to each other differ.

    Args:
      collective: of a program on the devices of `mesh`.
      mesh: names the axes.
    """
    groups = collective.groups or (tuple(range(mesh.size)),)
    differ = [_differences(group, mesh) for group in groups]
    return tuple(
        axis
        for at, axis in enumerate(mesh.axis_names)
        if any(row[at] for row in differ)
    )


def _differences(group: Iterable[int], mesh: Mesh) -> list[bool]:
    """Returns for each axis whether the devices of a group differ along it."""
    places = np.unravel_index(list(group), mesh.devices.shape)
    return [bool((place != place[0]).any()) for place in places]


def largest_model(make: Callable[[int], Compiled], memory: float) -> int:
    """Returns the largest size of which a step fits into memory, by compiling alone.

    Peak memory must not fall with the size. Where it is a straight line, as it is of
    the depth of a stack of layers, few programs are compiled.

    Args:
      make: `make(size)` returns the compiled step of a model of this size, from 1 on.
      memory: bytes of a device.

    Raises:
      ConfigError: not even size 1 fits.
    """
    checks.require(memory >= 1, "memory must be at least a byte", memory=memory)
    peaks = {size: peak_memory(make(size)) for size in (1, 2)}
    if peaks[1] > memory:
        raise ConfigError(f"size 1 takes {peaks[1]} bytes: got memory={memory}")
    low, high = 1, 2
    while peaks[high] <= memory:
        low, high = high, max(_guess(peaks, low, high, memory) + 1, 2 * high)
        peaks[high] = peak_memory(make(high))
    # Two guesses find the end of a straight line; a curve is halved now and then.
    number = 0
    while high - low > 1:
        number += 1
        guess = _guess(peaks, low, high, memory) if number % 3 else (low + high) // 2
        size = min(max(guess, low + 1), high - 1)
        peaks[size] = peak_memory(make(size))
        low, high = (size, high) if peaks[size] <= memory else (low, size)
    return low


def _guess(peaks: dict[int, int], low: int, high: int, memory: float) -> int:
    """Returns the size whose peak is `memory` on the line through two sizes."""
    slope = max((peaks[high] - peaks[low]) / (high - low), 1e-9)
    return low + int(min((memory - peaks[low]) / slope, 2**31))
