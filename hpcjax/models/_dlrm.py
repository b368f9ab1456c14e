"""The deep learning recommendation model, DLRM."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.dlrm_config import DlrmConfig
from hpcjax.models.modules import FLOAT32, Dense, Initializer, param


def _by_table(tables: Sequence[int]) -> Initializer:
    """Draws the n rows of each table from U(−√(1/n), √(1/n))."""
    bounds = np.repeat([1 / math.sqrt(rows) for rows in tables], tables)

    def init(
        key: jax.Array, shape: tuple[int, ...], dtype: Any, start: Any = 0
    ) -> jax.Array:
        drawn = jax.random.uniform(key, shape, dtype, -1, 1)
        own = jnp.asarray(bounds, dtype)
        if shape[0] < len(bounds):
            own = own[start + np.arange(shape[0])]
        return drawn * own[:, None]

    return init


def _dense(inputs: int, outputs: int, policy: Policy) -> Dense:
    """Declares a layer with DLRM's normal kernels and biases."""
    normal = nnx.initializers.normal
    kernel = normal(math.sqrt(2 / (inputs + outputs)))
    layer = Dense(inputs, outputs, policy=policy, initializer=kernel)
    layer.bias = param((outputs,), normal(math.sqrt(1 / outputs)), policy.param)
    return layer


class _Perceptron(nnx.Module):
    """Layers `dense_0`, `dense_1`, …, with a rectifier after each or all but one."""

    def __init__(self, widths: Sequence[int], last: bool, policy: Policy):
        self.count, self.last = len(widths) - 1, last
        for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"dense_{index}", _dense(inputs, outputs, policy))

    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.count):
            x = getattr(self, f"dense_{index}")(x)
            if self.last or index < self.count - 1:
                x = jax.nn.relu(x)
        return x


class _Dlrm(nnx.Module):
    """The network of `dlrm`."""

    def __init__(
        self,
        inputs: Mapping[str, tuple[int, ...]],
        tables: Sequence[int],
        config: DlrmConfig,
        policy: Policy,
    ):
        (numbers,), (categories,) = inputs["dense"], inputs["ids"]
        pairs = categories * (categories + 1) // 2
        self.compute, self.output = policy.compute, policy.output
        shape = (sum(tables), config.width)
        self.table = param(shape, _by_table(tables), policy.param)
        bottom = (numbers, *config.bottom, config.width)
        self.bottom = _Perceptron(bottom, True, policy)
        top = (config.width + pairs, *config.top, 1)
        self.top = _Perceptron(top, False, policy)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> jax.Array:
        del train, key
        dense = self.bottom(x["dense"].astype(self.compute))
        # A number that is no row gives NaN, not another row.
        how = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
        rows = self.table.get_value().at[x["ids"]].get(**how).astype(self.compute)
        vectors = jnp.concatenate([dense[:, None], rows], axis=1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        below = np.tril_indices(vectors.shape[1], -1)
        seen = jnp.concatenate([dense, products[:, *below]], axis=1)
        return self.top(seen)[:, 0].astype(self.output)


def dlrm(
    inputs: Mapping[str, tuple[int, ...]],
    outputs: int,
    *,
    tables: tuple[int, ...],
    policy: Policy = FLOAT32,
    **options: Any,
) -> Model:
    """Returns DLRM: the logit of a click, of numbers and of rows of a table.

    One perceptron makes a vector of the numbers. The scalar products of this vector and
    the rows, each pair once, and the vector itself go through another one.

    All tables are one parameter `table` [rows, width], in which ids are numbers of
    rows. It may as well be a cache, and ids its slots: `train.RowCache`.

    Args:
      inputs: shapes of an example's "dense" and "ids".
      outputs: 1.
      tables: rows of each table, one after the other.
      policy: dtypes.
      **options: the fields of `DlrmConfig`.

    Raises:
      ConfigError: no tables, other inputs, or fields that `DlrmConfig` refuses.

    Examples:
      >>> shapes = {"dense": (3,), "ids": (2,)}
      >>> model = dlrm(shapes, 1, tables=(5, 6), width=4, bottom=(7,), top=(8,))
      >>> params, _ = model.init(jax.random.key(0))
      >>> params["table"].shape, params["top"]["dense_0"]["kernel"].shape
      ((11, 4), (7, 8))

    References:
      Naumov et al., Deep Learning Recommendation Model for Personalization and
      Recommendation Systems, 2019.
    """
    config = DlrmConfig.of(options, dlrm)
    rule = "inputs must be shapes (n,) of 'dense' and 'ids', and outputs 1"
    named = isinstance(inputs, Mapping) and set(inputs) == {"dense", "ids"}
    good = named and all(len(shape) == 1 for shape in inputs.values()) and outputs == 1
    checks.require(good, rule, inputs=inputs, outputs=outputs)
    checks.require_count(1, **{f"tables[{i}]": rows for i, rows in enumerate(tables)})
    checks.require(len(tables) > 0, "there must be a table", tables=tables)
    return from_nnx(lambda: _Dlrm(inputs, tables, config, policy), table=True)
