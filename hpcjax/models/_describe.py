"""A table of a model's parameters, made without allocating them."""

from typing import Any, NamedTuple

import jax

from hpcjax.core import trees
from hpcjax.core.model import Model


class ParameterRow(NamedTuple):
    """One parameter; `layer` is the kind of observable layer it belongs to, or ""."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    layer: str


class Description(NamedTuple):
    """Parameters in order of paths, their number, and shapes of the outputs."""

    parameters: tuple[ParameterRow, ...]
    num_params: int
    outputs: Any

    def __str__(self) -> str:
        """Returns an aligned table: path, shape, count, layer kind; the total last."""
        rows = [
            (row.path, " ".join(map(str, row.shape)), f"{row.count:,}", row.layer)
            for row in self.parameters
        ]
        rows.append(("total", "", f"{self.num_params:,}", ""))
        first, second, third = (max(len(row[i]) for row in rows) for i in range(3))
        lines = [
            f"{path:<{first}}  {shape:<{second}}  {count:>{third}}  {layer}".rstrip()
            for path, shape, count, layer in rows
        ]
        return "\n".join(lines)


def describe(model: Model, inputs: Any) -> Description:
    """Returns a model's parameters by path, shape and count; computes nothing.

    Args:
      model: any model.
      inputs: one batch, or its `jax.ShapeDtypeStruct`.

    Examples:
      >>> from hpcjax import models
      >>> batch = jax.ShapeDtypeStruct((1, 4), "float32")
      >>> print(describe(models.mlp((4,), 2, widths=(3,)), batch))
      dense_0/bias    3     3  dense
      dense_0/kernel  4 3  12  dense
      head/bias       2     2  dense
      head/kernel     3 2   6  dense
      total                23
    """
    params, state = jax.eval_shape(model.init, jax.random.key(0))

    def outputs(params: Any, state: Any, inputs: Any) -> Any:
        return model.apply(params, state, inputs, train=False)[0]

    kinds = {spec.path: spec.kind for spec in model.layers}
    rows = tuple(
        ParameterRow(
            path, leaf.shape, str(leaf.dtype), leaf.size, kinds.get(_parent(path), "")
        )
        for path, leaf in trees.flatten(params).items()
    )
    shapes = jax.eval_shape(outputs, params, state, inputs)
    return Description(rows, trees.num_params(params), shapes)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
