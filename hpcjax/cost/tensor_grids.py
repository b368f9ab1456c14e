"""Which grid of devices sends the fewest words when every matrix is cut."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import Model
from hpcjax.core.patterns import matches_any
from hpcjax.core.shards import axes_of_spec
from hpcjax.sharding.cuts import count_parts, cut_further
from hpcjax.sharding.mesh import DEPTH_AXIS
from hpcjax.sharding.tensor3d import (
    COL_AXIS,
    Grid,
    MatrixLayer,
    cut_matrices,
    list_matrices,
)

Scheme = Literal["tensor3d", "megatron", "optimus2d", "colossal3d"]
# Weights, gradients and two moments in float32.
_BYTES_PER_PARAMETER = 16


class Planned(NamedTuple):
    """A grid and what it sends.

    Attributes:
      grid: the devices.
      words: that a device sends in a step, by axis.
    """

    grid: Grid
    words: dict[str, float]

    @property
    def total(self) -> float:
        """The words along all axes."""
        return sum(self.words.values())


def comm_volume(
    layers: Model | Sequence[MatrixLayer],
    rows: int,
    grid: Grid,
    scheme: Scheme = "tensor3d",
) -> dict[str, float]:
    """Returns the words that a device sends in a training step, by mesh axis.

    With rings an all-reduce of w words over p devices sends 2 w (p − 1) / p, a gather
    or reduce-scatter of w words in all half of that. For a layer of k inputs and n
    outputs, of B rows on G devices, m = B G_r G_c / G of them on each:

    - "tensor3d": y is a sum over rows, of m n / G_c words on each device, and its
      all-reduce sends 2 m n (G_r − 1) / (G_r G_c); dx is one over columns, of m k / G_r
      words. Together 2 B / G ((G_r − 1) n + (G_c − 1) k), of a transposed layer with
      G_r and G_c exchanged.
    - "megatron": that with G_r = 1 and all of G_r G_c for G_c.
    - "optimus2d": 3 (q − 1) / q (m k + k n) / q with q² = G_r G_c and m rows, for three
      products of which two operands each are sent.
    - "colossal3d": (q − 1) / q (3 m k + 3 k n + 2 m n) / q² with q³ = G_r G_c; slopes
      of outputs are gathered once for both products of the backward pass.

    Along `depth` matrices are gathered twice, and their gradients reduced and
    scattered; along `data` gradients are all-reduced.

    Of a language model that is counted for all its parameters, as they are cut, of
    which biases and what is in no stack are gathered once; and besides its matrices'
    sums, its head's included, m words or so of each token: the look-up sums m H / G_r
    over columns, and the loss 4 m; each of a norm's moments is summed over rows, and so
    is its slope. Where `remat` computes blocks again all of a forward pass is sent once
    more, but for what "collectives" keeps. A few words are left out, such as those of
    metrics.

    Args:
      layers: the matrices, or a language model, with "tensor3d".
      rows: B, of the whole batch, such as sequences times their length.
      grid: the devices.
      scheme: see above.

    Raises:
      ConfigError: an unknown scheme, devices that make no square or cube, or a model
        that the grid does not cut.

    Examples:
      >>> layer = MatrixLayer(inputs=4, outputs=8, transposed=False, count=1)
      >>> comm_volume([layer], 16, Grid(row=2, col=2))
      {'data': 0.0, 'depth': 0.0, 'row': 64.0, 'col': 32.0}
    """
    if isinstance(layers, Model):
        rule = "scheme must be tensor3d for a model; megatron is a grid with row=1"
        checks.require(scheme == "tensor3d", rule, scheme=scheme)
        return _count_model(_describe(layers), rows, grid)
    parts = grid.row * grid.col
    own = rows / (grid.data * grid.depth)
    weights = sum(each.count * each.inputs * each.outputs for each in layers) / parts
    found = {
        "data": 2 * _share(grid.data) * weights / grid.depth,
        "depth": 3 * _share(grid.depth) * weights,
    }
    if scheme in ("tensor3d", "megatron"):
        row, col = (1, parts) if scheme == "megatron" else (grid.row, grid.col)
        unit = 2 * own / parts
        rowwise, colwise = grid_features(layers)
        return found | {
            "row": unit * (row - 1) * rowwise,
            "col": unit * (col - 1) * colwise,
        }
    if scheme not in ("optimus2d", "colossal3d"):
        raise ConfigError(
            f"scheme must be tensor3d, megatron, optimus2d or colossal3d: got {scheme}"
        )
    power = 2 if scheme == "optimus2d" else 3
    side = round(parts ** (1 / power))
    rule = f"scheme={scheme} takes row * col devices that are a number to the {power}"
    checks.require(side**power == parts, rule, row=grid.row, col=grid.col)
    sent = sum(each.count * _operands(each, own, cube=power == 3) for each in layers)
    return found | {scheme: _share(side) * sent / side ** (power - 1)}


def _share(devices: int) -> float:
    return (devices - 1) / devices


def _operands(layer: MatrixLayer, rows: float, *, cube: bool) -> float:
    """Returns the words of what is sent for a layer's products, of all devices."""
    x, w = rows * layer.inputs, layer.inputs * layer.outputs
    return 3 * (x + w) + (2 * rows * layer.outputs if cube else 0)


class _Described(NamedTuple):
    """A language model: its matrices and its parameters' shapes.

    Attributes:
      model: itself.
      layers: its matrices.
      shapes: of its parameters.
      stacked: regexes of its stacks.
    """

    model: Model
    layers: tuple[MatrixLayer, ...]
    shapes: Any
    stacked: tuple[str, ...]


def _describe(model: Model) -> _Described:
    layers = list_matrices(model)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    deep = (layer.path for layer in model.layers if layer.options["depth"])
    stacked = {f"^{re.escape(path.partition('/')[0])}/" for path in deep}
    return _Described(model, layers, shapes, tuple(stacked))


def _count_model(told: _Described, rows: int, grid: Grid) -> dict[str, float]:
    """Returns the words of a whole language model; see `comm_volume`."""
    sizes, own = grid._asdict(), rows / (grid.data * grid.depth)
    held = cut_matrices(told.model, told.shapes, grid)
    leaves = trees.flatten(told.shapes)
    found = comm_volume(told.layers, rows, grid)
    found |= {"data": 0.0, "depth": 0.0}
    width = leaves["embed/table"].shape[-1]
    found["col"] += 2 * _share(grid.col) * own * (width / grid.row + 4)
    further = cut_further(told.shapes, held, sizes, DEPTH_AXIS, told.stacked)
    repeated = told.model.decoder.again if told.model.decoder else ()
    for path, leaf in leaves.items():
        part = leaf.size / count_parts(held.get(path, PartitionSpec()), sizes)
        parted = DEPTH_AXIS in axes_of_spec(further.get(path, PartitionSpec()))
        more, kind = matches_any(repeated, path), path.rpartition("/")[2]
        if kind == "scale":
            moments = 1 + (path.replace("scale", "bias") in leaves)
            sums = (4 + 2 * more) * moments * math.prod(leaf.shape[:-1])
            found["row"] += sums * _share(grid.row) * own
        elif kind == "kernel" and more:
            over, cut = ("row", "col")[:: -1 if held[path][-2] == COL_AXIS else 1]
            outputs = leaf.size / leaf.shape[-2] / sizes[cut]
            found[over] += 2 * _share(sizes[over]) * own * outputs
        again = matches_any(told.stacked, path) and (more or kind != "bias")
        found["depth"] += (2 + (parted and again)) * _share(grid.depth) * part
        found["data"] += 2 * _share(grid.data) * part / (grid.depth if parted else 1)
    return found


def grid_features(layers: Sequence[MatrixLayer]) -> tuple[int, int]:
    """Returns A and C: features that are summed over rows, and over columns.

    The best grid has about G_c / G_r = A / C. Of a transformer's block A is 12 times
    its width, and C 4 times.
    """
    pairs = [
        (each.inputs, each.outputs) if each.transposed else (each.outputs, each.inputs)
        for each in layers
        for _ in range(each.count)
    ]
    return sum(row for row, _ in pairs), sum(col for _, col in pairs)


def best_grid(
    model: Model | Sequence[MatrixLayer],
    rows: int,
    devices: int,
    *,
    memory: float = math.inf,
    parts: int | None = None,
    topk: int = 5,
) -> list[Planned]:
    """Returns the grids that send the fewest words, the best one first.

    Of equals the one with fewer rows comes first. All factors of the devices are tried
    that `sharding.spread_matrices` takes.

    Args:
      model: a language model, all that it sends, or matrices alone; row and col must
        divide their sizes.
      rows: of the whole batch, such as sequences times their length.
      devices: of the grid.
      memory: bytes of a device, for 16 bytes of each parameter.
      parts: row times col; None for any.
      topk: how many are returned.

    Raises:
      ConfigError: no grid fits.

    Examples:
      >>> block = [
      ...     MatrixLayer(inputs=64, outputs=192, transposed=False, count=1),
      ...     MatrixLayer(inputs=64, outputs=64, transposed=True, count=1),
      ...     MatrixLayer(inputs=64, outputs=256, transposed=False, count=1),
      ...     MatrixLayer(inputs=256, outputs=64, transposed=True, count=1),
      ... ]
      >>> best_grid(block, 512, 16, parts=16)[0].grid
      Grid(data=1, depth=1, row=2, col=8)
    """
    checks.require_count(1, rows=rows, devices=devices, topk=topk)
    if isinstance(model, Model):
        told = _describe(model)
        weights = trees.num_params(told.shapes)
        planned = _plan(lambda grid: _count_model(told, rows, grid), devices)
    else:
        weights = sum(each.count * each.inputs * each.outputs for each in model)
        planned = _plan(lambda grid: _count_matrices(model, rows, grid), devices)
    size = _BYTES_PER_PARAMETER * weights
    fitting = [
        each
        for each in planned
        if parts in (None, each.grid.row * each.grid.col)
        and size / (each.grid.row * each.grid.col * each.grid.depth) <= memory
    ]
    if not fitting:
        raise ConfigError(
            f"no grid of {devices} devices fits: got memory={memory:g} bytes for "
            f"{size} bytes of state, parts={parts}"
        )
    return sorted(fitting, key=lambda each: (each.total, each.grid.row))[:topk]


def _plan(count: Callable[[Grid], dict[str, float]], devices: int) -> Iterator[Planned]:
    """Yields the grids that divide all sizes, and what they send."""
    for grid in _grids(devices):
        with contextlib.suppress(ConfigError):
            yield Planned(grid, count(grid))


def _count_matrices(
    layers: Sequence[MatrixLayer], rows: int, grid: Grid
) -> dict[str, float]:
    """Returns the words of matrices; ConfigError if the grid does not divide them."""
    for layer in layers:
        sizes = layer.inputs, layer.outputs
        inwards, outwards = reversed(sizes) if layer.transposed else sizes
        good = inwards % grid.row == 0 and outwards % grid.col == 0
        checks.require(good, "row and col must divide matrices", layer=layer)
    return comm_volume(layers, rows, grid)


def _grids(devices: int) -> list[Grid]:
    def divisors(number: int) -> list[int]:
        return [each for each in range(1, number + 1) if number % each == 0]

    return [
        Grid(data, depth, row, devices // (data * depth * row))
        for data in divisors(devices)
        for depth in divisors(devices // data)
        for row in divisors(devices // (data * depth))
    ]
