"""What pruning saves: weights, storage, operations; and accuracy for what is left."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import checks, trees

GAP_BITS = range(1, 17)


class Density(NamedTuple):
    """How much is kept.

    Attributes:
      kept: number of non-zero parameters, of those that are not pruned too.
      size: number of parameters.
      layers: `{path: (kept, size)}` of the pruned ones.
    """

    kept: int
    size: int
    layers: dict[str, tuple[int, int]]


class Storage(NamedTuple):
    """Bits of one pruned parameter in several forms.

    Attributes:
      bits: `{form: bits}` of "dense", "bitmap", "coo", "csr" and "delta".
      best: the form of the fewest bits.
      crossover: the density below which one form or another takes fewer bits than
        dense storage, for bitmaps and coordinates.
    """

    bits: dict[str, int]
    best: str
    crossover: dict[str, float]


def density_report(params: Any, masks: Any) -> Density:
    """Returns how much of parameters is kept.

    Examples:
      >>> params = {"bias": np.ones(2), "kernel": np.ones((2, 2))}
      >>> density_report(params, {"bias": None, "kernel": np.eye(2, dtype=bool)})
      Density(kept=4, size=6, layers={'kernel': (2, 4)})
    """
    size = trees.num_params(params)
    layers = {
        path: (int(np.sum(mask)), int(np.size(mask)))
        for path, mask in trees.flatten(masks).items()
    }
    gone = sum(whole - kept for kept, whole in layers.values())
    return Density(size - gone, size, layers)


def storage_report(masks: Any, bits: int = 32) -> dict[str, Storage]:
    """Returns what each pruned parameter takes, by its path.

    Of n weights, z of them kept, with b bits each: dense n·b; a bitmap n + z·b;
    coordinates z·(b + ⌈log₂ n⌉); compressed rows z·(b + ⌈log₂ columns⌉) + (rows + 1)·
    ⌈log₂(z + 1)⌉; gaps of d bits (z + f)·(b + d), where a gap of 2^d zeros or more is
    bridged by f zeros that are stored. d is the best one; rows are the last axis but
    one and all before it.

    Args:
      masks: a tree of masks.
      bits: b.
    """
    checks.require_count(1, bits=bits)
    return {
        path: _storage(np.asarray(mask), bits)
        for path, mask in trees.flatten(masks).items()
    }


def _storage(mask: np.ndarray, bits: int) -> Storage:
    n, z = mask.size, int(mask.sum())
    columns = mask.shape[-1] if mask.ndim else 1
    rows = n // max(1, columns)
    index = _width(n)
    found = {
        "dense": n * bits,
        "bitmap": n + z * bits,
        "coo": z * (bits + index),
        "csr": z * (bits + _width(columns)) + (rows + 1) * _width(z + 1),
        "delta": min(_delta_bits(mask, bits, width) for width in GAP_BITS),
    }
    crossover = {"bitmap": max(0.0, 1 - 1 / bits), "coo": bits / (bits + index)}
    return Storage(found, min(found, key=found.__getitem__), crossover)


def _width(count: int) -> int:
    """Returns ⌈log₂ count⌉, the bits that number so many things."""
    return max(0, count - 1).bit_length()


def _delta_bits(mask: np.ndarray, bits: int, width: int) -> int:
    places = np.flatnonzero(mask)
    gaps = np.diff(places, prepend=-1) - 1
    stored = len(places) + int(np.sum(gaps >> width))
    return stored * (bits + width)


def forward_flops(dense: Mapping[str, float], masks: Any) -> float:
    """Returns the operations of a forward pass that skips what is pruned.

    Args:
      dense: operations of each layer's product in the dense network, by the path of its
        kernel; all operations are proportional to the kernel's density.
      masks: a tree of masks.

    Raises:
      ConfigError: a pruned kernel has no operations given.
    """
    found = {path: float(np.mean(mask)) for path, mask in trees.flatten(masks).items()}
    lost = sorted(set(found) - set(dense))
    checks.require(not lost, "every pruned parameter needs its operations", none=lost)
    return sum(flops * found.get(path, 1.0) for path, flops in dense.items())


def training_flops(sparse: float, dense: float, every: int | None = None) -> float:
    """Returns the operations of a training step, on average.

    Three forward passes' worth of the sparse network; where every ΔT steps one has a
    dense gradient, as RigL's, (3·f_S·ΔT + 2·f_S + f_D)/(ΔT + 1).

    Args:
      sparse: f_S, of a forward pass.
      dense: f_D, of that of the dense network.
      every: ΔT; None if no gradient is dense.

    References:
      Evci et al., Rigging the Lottery, ICML 2020, appendix H.

    Examples:
      >>> training_flops(1.0, 10.0), training_flops(1.0, 10.0, every=9)
      (3.0, 3.9)
    """
    checks.require_finite(0, sparse=sparse, dense=dense)
    if every is None:
        return 3 * sparse
    checks.require_count(1, every=every)
    return (3 * sparse * every + 2 * sparse + dense) / (every + 1)


def efficiency(accuracy: float, kept: int, *, hard: bool = False) -> float:
    """Returns accuracy for each parameter that is kept, E = accuracy / kept.

    Args:
      accuracy: between 0 and 1.
      kept: number of parameters that are not zero.
      hard: 1/(1 − accuracy) in place of the accuracy: the last points are hardest.

    References:
      Hoefler et al., Sparsity in Deep Learning, JMLR 2021, for the idea.

    Examples:
      >>> efficiency(0.75, 10), efficiency(0.75, 10, hard=True)
      (0.075, 0.4)
    """
    top = 1.0 if not hard else math.nextafter(1.0, 0)
    checks.require(
        0 <= accuracy <= top, "accuracy must be in [0, 1]", accuracy=accuracy
    )
    checks.require_count(1, kept=kept)
    return (1 / (1 - accuracy) if hard else accuracy) / kept


def slack(
    accuracies: Mapping[float, float], dense: float, tolerance: float = 0.0
) -> float:
    """Returns the largest compression whose accuracy is within `tolerance` of dense.

    Args:
      accuracies: `{compression: accuracy}`, where compression is size / kept.
      dense: the dense network's accuracy.
      tolerance: how much less is allowed, such as 0.005.

    Returns:
      The compression; 1 if there is none.

    Examples:
      >>> slack({5.0: 0.97, 10.0: 0.96, 20.0: 0.9}, dense=0.965, tolerance=0.005)
      10.0
    """
    good = [c for c, accuracy in accuracies.items() if accuracy >= dense - tolerance]
    return max(good, default=1.0)
