"""Quantizes the layers of a whole network, convolutions and dense ones, with GPTQ.

A convolution is a dense layer over patches of its input (im2col): its kernel is the
matrix `[inputs · height · width, outputs]`, and every output position of every image is
a row of the Hessian's sum. The order is that of the published code, all taps of the
first channel before those of the second.

References:
  Frantar, Ashkboos, Hoefler and Alistarh, GPTQ, ICLR 2023, and its authors' code.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import layers
from hpcjax.compress.blocks import (
    LayerReport,
    check_grid,
    replace_leaves,
    report_matrix,
)
from hpcjax.compress.config import GptqOptions, GridSpec
from hpcjax.compress.gptq import Hessian, hessian_init, hessian_update, solve
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import SEEN, Model, Tap, check_taps
from hpcjax.kernels import QuantizedMatrix, quantized_matrix


class QuantizedNetwork(NamedTuple):
    """A network with quantized layers.

    Attributes:
      params: the parameters, with the dequantized values in place of every named
        kernel, in its shape and dtype.
      matrices: by path, what is stored of each kernel; of a convolution the matrix
        `[inputs · height · width, outputs]`.
      reports: one for each layer, in the order of quantization.
    """

    params: Any
    matrices: Mapping[str, QuantizedMatrix]
    reports: tuple[LayerReport, ...]


def quantize_network(
    model: Model,
    params: Any,
    state: Any,
    inputs: jax.Array,
    paths: Sequence[str],
    spec: GridSpec,
    options: GptqOptions | None = None,
    *,
    batch: int = 32,
    report: Callable[[LayerReport], None] = lambda _: None,
) -> QuantizedNetwork:
    """Quantizes dense layers and convolutions of any network, one after the other.

    The Hessian of a layer is that of the calibration examples in the network whose
    earlier layers are quantized, in evaluation (norms with running statistics).

    Args:
      model: the network.
      params: its parameters.
      state: its state, such as running statistics; not changed.
      inputs: calibration examples, whatever the network takes, along axis 0.
      paths: of the layers, in the order in which they run.
      spec: the grid; not a ternary one.
      options: of GPTQ; None for the defaults.
      batch: examples in a forward pass.
      report: called after each layer.

    Raises:
      ConfigError: before any work: no layers, a path that is named twice, one that is
        stacked over blocks (see `quantize_blocks`), a kernel that is not finite, a
        ternary grid, groups that do not divide a matrix's inputs; no examples, or a
        batch below 1.
      ValueError: a path that is not a layer of the model.
      numpy.linalg.LinAlgError: see `solve`; the message names the path.

    Examples:
      >>> from hpcjax import models
      >>> model = models.resnet((4, 4, 1), 3, depth=8, width=2)
      >>> params, state = model.init(jax.random.key(0))
      >>> images = jax.random.normal(jax.random.key(1), (8, 4, 4, 1))
      >>> small = quantize_network(
      ...   model, params, state, images, ["conv_in", "head"], GridSpec(bits=4)
      ... )
      >>> small.matrices["conv_in"].shape, small.params["conv_in"]["kernel"].shape
      ((9, 2), (3, 3, 1, 2))
    """
    options = options or GptqOptions()
    _check(model, params, inputs, paths, spec, batch)
    parts = [inputs[start : start + batch] for start in range(0, len(inputs), batch)]
    matrices, reports = {}, []
    for number, path in enumerate(paths):
        kernel = trees.flatten(params)[f"{path}/kernel"]
        matrix = _as_matrix(kernel.astype(jnp.float32))
        hessian = hessian_init(len(matrix))
        for x in parts:
            hessian = _update(params, state, x, hessian, model=model, path=path)
        solved = solve(matrix, hessian.matrix, spec, options, name=path)
        # Only with an order is a group not of neighbouring inputs.
        scattered = options.act_order and not options.static_groups and spec.group_size
        stored = quantized_matrix(
            solved.integers,
            solved.grid.scale,
            solved.grid.zero,
            bits=spec.bits,
            group=solved.group if scattered else None,
        )
        made = report_matrix(matrix, stored, hessian.matrix, solved.damping, spec=spec)
        values = _as_kernel(made.values, kernel.shape).astype(kernel.dtype)
        params = replace_leaves(params, {f"{path}/kernel": values})
        matrices[path] = stored
        losses = float(made.loss), float(made.rounded)
        reports.append(LayerReport(number, path, *losses, made.damping))
        report(reports[-1])
    return QuantizedNetwork(params, matrices, tuple(reports))


def _check(
    model: Model,
    params: Any,
    inputs: jax.Array,
    paths: Sequence[str],
    spec: GridSpec,
    batch: int,
) -> None:
    """Raises what `quantize_network` says."""
    check_taps(model, dict.fromkeys(paths))
    if not paths or len(set(paths)) != len(paths):
        raise ConfigError(f"paths must be layers, each named once: got {list(paths)}")
    if not len(inputs) or batch < 1:
        raise ConfigError(
            "calibration needs examples, and a batch of at least one: got "
            f"{len(inputs)} examples, batch={batch}"
        )
    depths = {layer.path: layer.options.get("depth") for layer in model.layers}
    flat = trees.flatten(params)
    for path in paths:
        if depths[path] is not None:
            raise ConfigError(
                f"{path}: a layer that is stacked over blocks is quantized by "
                f"quantize_blocks: got depth={depths[path]}"
            )
        kernel = flat[f"{path}/kernel"]
        check_grid(spec, kernel.size // kernel.shape[-1], path)
        if not jnp.isfinite(kernel).all():
            raise ConfigError(f"{path}: the kernel is not finite")


@functools.partial(jax.jit, static_argnames=("model", "path"))
def _update(
    params: Any,
    state: Any,
    x: jax.Array,
    hessian: Hessian,
    *,
    model: Model,
    path: str,
) -> Hessian:
    # The network's output is not used: XLA drops all that runs behind the layer.
    _, after = model.apply(
        params, state, x, train=False, taps={path: Tap(forward=_tap_input)}
    )
    rows = after[SEEN][path].astype(jnp.float32)
    (layer,) = (layer for layer in model.layers if layer.path == path)
    if layer.kind == "conv":
        rows = _conv_rows(rows, layer.options)
    return hessian_update(hessian, rows)


def _tap_input(x: jax.Array, y: jax.Array) -> jax.Array:
    del y
    return x


def _conv_rows(
    x: Float[Array, "examples height width inputs"], options: Mapping[str, Any]
) -> Float[Array, "examples rows columns size"]:
    """Returns the patches of a convolution's input, in the order of `_as_matrix`."""
    size, inputs = options["kernel_size"], x.shape[-1]
    geometry = {name: options[name] for name in ("strides", "padding", "dilation")}
    patches = layers.patches(x, size, **geometry)
    by_tap = patches.reshape(*patches.shape[:-1], -1, inputs)
    return by_tap.swapaxes(-1, -2).reshape(patches.shape)


def _as_matrix(kernel: jax.Array) -> Float[Array, "rows outputs"]:
    """Returns a kernel `[..., inputs, outputs]` as `[inputs · taps, outputs]`."""
    return jnp.moveaxis(kernel, -2, 0).reshape(-1, kernel.shape[-1])


def _as_kernel(matrix: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes `_as_matrix` for a kernel of the shape."""
    *taps, inputs, outputs = shape
    return jnp.moveaxis(matrix.reshape(inputs, *taps, outputs), 0, -2)
