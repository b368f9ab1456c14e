"""How many clusters of heads a layer needs, from the elbow of k-means' error.

References:
  Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, nearest
from hpcjax.core.keys import derive
from hpcjax.inference.head_clusters import between, inertia, settle, spread

# Texts that are clustered at once, for all counts: memory against calls.
_TEXTS = 8
_RULES = ("threshold", "knee")


@dataclasses.dataclass(frozen=True)
class ChaiPlan:
    """The number of clusters of heads of each layer.

    Attributes:
      clusters: k of each layer.
      errors: `[layers, counts]`, that of k = 1, 2, … clusters, where it is known.

    Examples:
      >>> ChaiPlan((4, 2)).check(depth=2, heads=4)
      >>> ChaiPlan((4, 5)).check(depth=2, heads=4)
      Traceback (most recent call last):
        ...
      hpcjax.core.errors.ConfigError: layer 1: clusters must be in [1, 4]: got 5
    """

    clusters: tuple[int, ...]
    errors: Float[np.ndarray, "layers counts"] | None = dataclasses.field(
        default=None, compare=False
    )

    def check(self, depth: int, heads: int) -> None:
        """Raises ConfigError unless the plan is one for such a model.

        Args:
          depth: its layers.
          heads: query heads of a layer.
        """
        if len(self.clusters) != depth:
            raise ConfigError(
                f"a plan must have a number for each of {depth} layers: got "
                f"{len(self.clusters)}"
            )
        for layer, clusters in enumerate(self.clusters):
            if not 1 <= clusters <= heads:
                raise ConfigError(
                    f"layer {layer}: clusters must be in [1, {heads}]: got {clusters}"
                )

    def save(self, path: pathlib.Path) -> None:
        """Writes the plan as JSON, whole or not at all.

        The form is that of the authors, `{"layer_params": [k, ...]}`, with the errors
        beside it.
        """
        content: dict[str, Any] = {"layer_params": list(self.clusters)}
        if self.errors is not None:
            content["errors"] = self.errors.tolist()
        files.write_json(path, content)

    @classmethod
    def load(cls, path: pathlib.Path, depth: int, heads: int) -> "ChaiPlan":
        """Reads a plan in the authors' form and checks it against a model.

        Raises:
          DataFormatError: the file is not one.
          ConfigError: the plan does not fit the model.
        """
        try:
            content = files.read_json(path)
            found = content["layer_params"]
            errors = content.get("errors")
            table = None if errors is None else np.array(errors, np.float64)
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DataFormatError(
                f'{path} must be JSON {{"layer_params": [k, ...]}}: {error!r}'
            ) from error
        # A bool is an int, and 4.0 is not one.
        if not isinstance(found, list) or any(type(each) is not int for each in found):
            raise DataFormatError(
                f"{path}: layer_params must be a list of integers: got {found!r:.60}"
            )
        if table is not None and (table.ndim != 2 or len(table) != len(found)):
            raise DataFormatError(
                f"{path}: errors must have a row for each of {len(found)} layers: got "
                f"{table.shape}"
            )
        plan = cls(tuple(found), table)
        plan.check(depth, heads)
        return plan


def clustering_errors(
    features: Float[Array, "texts layers heads *features"],
    *,
    key: jax.Array,
    groups: int = 1,
) -> Float[Array, "layers counts"]:
    """Returns the error Σ_texts Σ_h ‖x_h − centre‖² of k-means for every k.

    One program for all k. First centres are drawn once for a text and layer; k clusters
    begin from the first k of them, which k-means++ would draw for k. Errors of batches
    of texts may be added.

    Args:
      features: a row for each head, such as its flattened attention map.
      key: of the first centres; give each batch of texts its own.
      groups: heads are clustered within so many groups, as by `cluster_heads`.

    Returns:
      `[layers, heads / groups]`, in column k − 1 that of k clusters in each group. The
      last one is 0.

    Raises:
      ConfigError: groups does not divide heads.

    Examples:
      >>> rows = jnp.array([[[[0.0], [2.0], [9.0]]]])
      >>> clustering_errors(rows, key=jax.random.key(0))[0, 1:].tolist()
      [2.0, 0.0]
    """
    texts, layers, heads = features.shape[:3]
    if groups < 1 or heads % groups:
        raise ConfigError(
            f"groups must divide heads: got groups={groups}, heads={heads}"
        )
    rows = features.reshape(texts, layers * groups, heads // groups, -1)
    found = _errors(rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), key)
    return jnp.sum(found.reshape(layers, groups, -1), axis=1)


@jax.jit
def _errors(
    rows: Float[Array, "texts layers heads features"], key: jax.Array
) -> Float[Array, "layers heads"]:
    heads = rows.shape[2]

    def one(rows: jax.Array, key: jax.Array) -> jax.Array:
        apart = between(rows, rows)
        first = apart[:, spread(apart, key, heads)]

        def error(count: jax.Array) -> jax.Array:
            return inertia(apart, settle(apart, first, count))

        return jax.vmap(error)(jnp.arange(1, heads + 1))

    def text(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, rows = given
        own = derive(key, "text", number)
        return jax.vmap(one, in_axes=(0, None))(rows, own)

    numbers = jnp.arange(len(rows))
    found = jax.lax.map(text, (numbers, rows), batch_size=min(_TEXTS, len(rows)))
    return jnp.sum(found, axis=0)


def choose_clusters(
    errors: Float[Array, "layers counts"] | Float[np.ndarray, "layers counts"],
    *,
    rule: str = "threshold",
    tau: float = 0.05,
    groups: int = 1,
) -> ChaiPlan:
    """Chooses from which k on a layer's error stays flat.

    `"threshold"` takes the smallest k with err(k) ≤ τ err(1). `"knee"` takes the k
    farthest below the chord from err(1) to the last error, the smallest of equals, or
    the last k where none is below it: such heads are all equally far apart. Both take 1
    where heads are equal.

    Args:
      errors: those of `clustering_errors`, for k = 1, 2, ….
      rule: `"threshold"` or `"knee"`.
      tau: τ.
      groups: those that the errors are of; a layer has so many times k clusters.

    Raises:
      ConfigError: an unknown rule; tau out of [0, 1); errors that are not finite and
        >= 0, or of which none falls to τ err(1).

    Examples:
      >>> errors = np.array([[9.0, 4.0, 0.3, 0.0], [9.0, 0.2, 0.1, 0.0]])
      >>> choose_clusters(errors).clusters
      (3, 2)
    """
    if rule not in _RULES:
        raise ConfigError(f"no rule {rule!r}{nearest(rule, _RULES)}")
    if not 0 <= tau < 1 or groups < 1:
        raise ConfigError(
            f"tau must be in [0, 1) and groups at least 1: got tau={tau}, "
            f"groups={groups}"
        )
    table = np.asarray(errors, np.float64)
    if not (np.isfinite(table) & (table >= 0)).all():
        raise ConfigError("errors must be finite and >= 0")
    chosen = [
        _threshold(row, tau, layer) if rule == "threshold" else _knee(row)
        for layer, row in enumerate(table)
    ]
    return ChaiPlan(tuple(groups * each for each in chosen), table)


def _threshold(errors: Sequence[float] | np.ndarray, tau: float, layer: int) -> int:
    flat = np.flatnonzero(np.asarray(errors) <= tau * errors[0])
    if not len(flat):
        raise ConfigError(
            f"layer {layer}: no error falls to {tau} of the first: give those up to "
            "as many clusters as heads"
        )
    return int(flat[0]) + 1


def _knee(errors: np.ndarray) -> int:
    below = np.linspace(errors[0], errors[-1], len(errors)) - errors
    if errors[0] > 0 and below.max() <= 1e-6 * errors[0]:
        return len(errors)
    return int(np.argmax(below)) + 1
