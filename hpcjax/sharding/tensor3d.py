"""Tensor3D: matrices cut in two dimensions, whose products need no redistribution.

A matrix is cut in rows over one axis of a grid and in columns over the other; the next
one the other way round, so that a product's outputs are cut as the next one's inputs.
Of a language model that is a rule for the meanings of axes: what is `embed` is cut over
`row`, and heads, inner features and vocabulary over `col`.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import DATA_AXIS, Parallel
from hpcjax.core.model import Decoder, LayerSpec, Model
from hpcjax.core.patterns import check_stacked
from hpcjax.core.shards import Specs
from hpcjax.sharding.cuts import cut_decoder, cut_further
from hpcjax.sharding.mesh import DEPTH_AXIS
from hpcjax.sharding.zero import split_model

ROW_AXIS, COL_AXIS = "row", "col"
RULES = {
    "embed": ROW_AXIS,
    **dict.fromkeys(("heads", "kv", "ff", "vocab"), COL_AXIS),
}
# Further cuts are of the largest dimension of a part.
_PARTED = (ROW_AXIS, COL_AXIS)


class Grid(NamedTuple):
    """Sizes of a mesh, the last axis of the nearest neighbours.

    Attributes:
      data: devices that share out the batch, each with all of the model.
      depth: that share out the batch and hold parts of each part.
      row: parts of a matrix's one dimension.
      col: of its other one.
    """

    data: int = 1
    depth: int = 1
    row: int = 1
    col: int = 1

    @classmethod
    def of(cls, devices: int, row: int, col: int, depth: int) -> "Grid":
        """Returns the grid of all devices.

        Raises:
          ConfigError: the sizes do not divide the devices.

        Examples:
          >>> Grid.of(8, row=2, col=2, depth=1)
          Grid(data=2, depth=1, row=2, col=2)
        """
        rule = "row * col * depth must divide the devices"
        good = devices % (row * col * depth) == 0
        checks.require(good, rule, devices=devices, row=row, col=col, depth=depth)
        return cls(devices // (row * col * depth), depth, row, col)


class MatrixLayer(NamedTuple):
    """A dense layer as a grid cuts it.

    Attributes:
      inputs: features.
      outputs: features.
      transposed: whether inputs are cut over `col` and outputs over `row`.
      count: how many such layers there are.
    """

    inputs: int
    outputs: int
    transposed: bool
    count: int


def list_matrices(model: Model) -> tuple[MatrixLayer, ...]:
    """Returns the dense layers of a model, as `spread_matrices` cuts them.

    Those that take the same inputs, such as query, key and value, are one. A head that
    is tied to the table is one, too.

    Raises:
      ConfigError: a model that cannot be cut so, or is no language model: of a chain
        the first layer sums no slopes, and the last one sums whole outputs.
    """
    if model.decoder is None:
        raise ConfigError("what is sent is known of language models alone")
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    specs = cut_matrices(model, shapes, Grid())
    found: dict[str, MatrixLayer] = {}
    for layer in model.layers:
        group = re.sub(r"(query|key|value|up|gate)$", "*", layer.path)
        before = found[group].outputs if group in found else 0
        found[group] = MatrixLayer(
            inputs=layer.options["inputs"],
            outputs=before + layer.options["outputs"],
            transposed=specs[f"{layer.path}/kernel"][-2] == COL_AXIS,
            count=layer.options["depth"] or 1,
        )
    if "head" not in found:
        vocabulary, width = trees.flatten(shapes)["embed/table"].shape
        found["head"] = MatrixLayer(width, vocabulary, transposed=False, count=1)
    return tuple(found.values())


def spread_matrices(
    model: Model, grid: Grid, *, zero: bool = False, stacked: tuple[str, ...] = ()
) -> Parallel:
    """Returns how a model is spread over a grid of devices.

    Args:
      model: a language model of dense layers, or a chain of dense layers and of
        functions between them that work on each number by itself, which is not checked.
      grid: the devices.
      zero: whether the optimizer's state is cut over `data`, too.
      stacked: regexes of parameters whose first axis is a stack of layers.

    Raises:
      ConfigError: a model that cannot be cut so, or sizes that the grid does not
        divide.

    References:
      Singh, Sating and Bhatele, Communication-minimizing Asynchronous Tensor
      Parallelism, arXiv 2305.13525, 2023, sections 3 and 4.
    """
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    check_stacked(stacked, trees.flatten(shapes))
    held = cut_matrices(model, shapes, grid)
    if grid.depth > 1:
        held = cut_further(shapes, held, grid._asdict(), DEPTH_AXIS, stacked)
    stepped = held
    if zero and grid.data > 1:
        stepped = cut_further(shapes, held, grid._asdict(), DATA_AXIS, stacked)

    def mesh_shape(count: int) -> dict[str, int]:
        devices = grid.data * grid.depth * grid.row * grid.col
        rule = f"the model was spread over {devices} devices"
        checks.require(count == devices, rule, devices=count)
        return grid._asdict()

    split = functools.partial(
        split_model, held=held, stacked=stacked, again=True, parted=_PARTED
    )
    return Parallel(mesh_shape, held, stepped, split, axes=(DATA_AXIS, DEPTH_AXIS))


def cut_matrices(model: Model, shapes: Any, grid: Grid) -> Specs:
    """Returns how each parameter is cut over rows and columns of a grid.

    Args:
      model: as for `spread_matrices`.
      shapes: of its parameters.
      grid: the devices.

    Raises:
      ConfigError: as `spread_matrices`.
    """
    if model.decoder is not None:
        return _cut_language_model(model.decoder, shapes, grid)
    # In the order of numbers in their names: layer_10 comes after layer_2.
    layers = sorted(model.layers, key=lambda layer: _numbers(layer.path))
    return _cut_chain(layers, shapes, grid)


def _numbers(path: str) -> list[tuple[int, str]]:
    return [
        (int(text), "") if text.isdigit() else (-1, text)
        for text in re.split(r"(\d+)", path)
    ]


def _cut_language_model(decoder: Decoder, shapes: Any, grid: Grid) -> Specs:
    check_layers(shapes, "parallel=tensor3d")
    return cut_decoder(decoder, shapes, RULES, grid._asdict())


def check_layers(shapes: Any, who: str) -> None:
    """Raises ConfigError for experts, and for layers that change the width."""
    for path in trees.flatten(shapes):
        if re.search(r"(^|/)(experts?|router|project_in|project_out)/", path):
            raise ConfigError(
                f"{who} cuts transformers of which each layer keeps the width, without "
                f"experts: got {path}"
            )


def _cut_chain(layers: Sequence[LayerSpec], shapes: Any, grid: Grid) -> Specs:
    """Cuts dense layers in turns; the outputs of the last one stay whole."""
    _check_chain(layers, shapes)
    found = {}
    for number, layer in enumerate(layers):
        inwards, outwards = _PARTED if number % 2 == 0 else reversed(_PARTED)
        if number == len(layers) - 1:
            outwards = None
        sizes = {inwards: layer.options["inputs"], outwards: layer.options["outputs"]}
        for axis, size in sizes.items():
            if axis and size % getattr(grid, axis):
                raise ConfigError(
                    f"{axis} must divide the features of a layer: got {size}, "
                    f"{axis}={getattr(grid, axis)} ({layer.path})"
                )
        found[f"{layer.path}/kernel"] = PartitionSpec(inwards, outwards)
        if layer.options["use_bias"] and outwards:
            found[f"{layer.path}/bias"] = PartitionSpec(outwards)
    return found


def _check_chain(layers: Sequence[LayerSpec], shapes: Any) -> None:
    """Raises ConfigError unless a model is dense layers, one after the other."""
    known = {
        f"{layer.path}/{name}"
        for layer in layers
        if layer.kind == "dense" and layer.options["depth"] is None
        for name in ("kernel", "bias")
    }
    other = sorted(set(trees.flatten(shapes)) - known)
    if other:
        raise ConfigError(
            "parallel=tensor3d takes language models of dense layers, and chains of "
            f"dense layers alone: got {', '.join(other[:3])}"
        )
    sizes = [(each.options["inputs"], each.options["outputs"]) for each in layers]
    for (_, outputs), (inputs, _), layer in zip(
        sizes, sizes[1:], layers[1:], strict=False
    ):
        if outputs != inputs:
            raise ConfigError(
                "parallel=tensor3d takes layers whose inputs are the outputs of the "
                f"one before: got {inputs} after {outputs} ({layer.path})"
            )
