"""The number of head clusters of each layer, from the elbow of the k-means error.

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
from hpcjax.inference.head_clusters import (
    draw_centres,
    inertia,
    run_lloyd,
    squared_distances,
)

# Texts that are clustered at once; more of them need more memory.
_TEXTS = 8
_RULES = ("threshold", "knee")


@dataclasses.dataclass(frozen=True)
class ChaiPlan:
    """The number of head clusters of each layer.

    Attributes:
      clusters: k of each layer.
      errors: k-means error of each layer for k = 1, 2, … clusters, `[layers, counts]`;
        None if unknown.

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
        """Raises ConfigError unless the plan fits a model.

        Args:
          depth: number of layers of the model.
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
        """Writes the plan to a JSON file, atomically.

        The format is that of the authors, `{"layer_params": [k, ...]}`, extended by the
        errors.
        """
        content: dict[str, Any] = {"layer_params": list(self.clusters)}
        if self.errors is not None:
            content["errors"] = self.errors.tolist()
        files.write_json(path, content)

    @classmethod
    def load(cls, path: pathlib.Path, depth: int, heads: int) -> "ChaiPlan":
        """Reads a plan in the authors' format and checks that it fits a model.

        Raises:
          DataFormatError: the file is not in that format.
          ConfigError: the plan does not fit the model.
        """
        try:
            content = files.read_json(path)
            clusters = content["layer_params"]
            errors = content.get("errors")
            table = None if errors is None else np.array(errors, np.float64)
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DataFormatError(
                f'{path} must be JSON {{"layer_params": [k, ...]}}: {error!r}'
            ) from error
        # Not isinstance, which takes True for an int.
        if not isinstance(clusters, list) or any(type(k) is not int for k in clusters):
            raise DataFormatError(
                f"{path}: layer_params must be a list of integers: got {clusters!r:.60}"
            )
        if table is not None and (table.ndim != 2 or len(table) != len(clusters)):
            raise DataFormatError(
                f"{path}: errors must have a row for each of {len(clusters)} layers: "
                f"got {table.shape}"
            )
        plan = cls(tuple(clusters), table)
        plan.check(depth, heads)
        return plan


def clustering_errors(
    features: Float[Array, "texts layers heads *features"],
    *,
    key: jax.Array,
    groups: int = 1,
) -> Float[Array, "layers counts"]:
    """Returns the error Σ_texts Σ_h ‖x_h − centre‖² of k-means for every k.

    The centres of k-means++ are drawn once for each text and layer. The first k of them
    are distributed as those for k clusters, and start the k-means for k. The errors of
    several batches of texts may be added.

    Args:
      features: of each head, such as its flattened attention map.
      key: draws the first centres; use another for each batch of texts.
      groups: number of groups within which heads are clustered, see `cluster_heads`.

    Returns:
      `[layers, heads / groups]`, in column k − 1 the error of k clusters in each group.
      The last column is 0.

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
    errors = _errors(rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), key)
    return jnp.sum(errors.reshape(layers, groups, -1), axis=1)


@jax.jit
def _errors(
    rows: Float[Array, "texts layers heads features"], key: jax.Array
) -> Float[Array, "layers heads"]:
    heads = rows.shape[2]

    def layer_errors(rows: jax.Array, key: jax.Array) -> jax.Array:
        distances = squared_distances(rows, rows)
        first = distances[:, draw_centres(distances, key, heads)]

        def error(count: jax.Array) -> jax.Array:
            return inertia(distances, run_lloyd(distances, first, count))

        # `count` is data, not a shape: one program for all k, with `heads` slots each.
        return jax.vmap(error)(jnp.arange(1, heads + 1))

    def text_errors(numbered: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, rows = numbered
        own = derive(key, "text", number)
        return jax.vmap(layer_errors, in_axes=(0, None))(rows, own)

    numbers = jnp.arange(len(rows))
    batch_size = min(_TEXTS, len(rows))
    errors = jax.lax.map(text_errors, (numbers, rows), batch_size=batch_size)
    return jnp.sum(errors, axis=0)


def choose_clusters(
    errors: Float[Array, "layers counts"] | Float[np.ndarray, "layers counts"],
    *,
    rule: str = "threshold",
    tau: float = 0.05,
    groups: int = 1,
) -> ChaiPlan:
    """Chooses the k of each layer from which on its error stays flat.

    `"threshold"` takes the smallest k with err(k) ≤ τ err(1). `"knee"` takes the
    (smallest) k whose error is farthest below the chord from err(1) to the last error;
    if no error is below the chord, as with heads that are all equally different, it
    takes the last k. If all heads are equal, both take 1.

    Args:
      errors: as from `clustering_errors`, for k = 1, 2, ….
      rule: `"threshold"` or `"knee"`.
      tau: τ.
      groups: number of groups of `clustering_errors`; a layer gets `groups` · k
        clusters.

    Raises:
      ConfigError: an unknown rule; tau outside of [0, 1); errors that are not finite
        and >= 0; or a layer whose error never falls to τ err(1).

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
    return ChaiPlan(tuple(groups * k for k in chosen), table)


def _threshold(errors: Sequence[float] | np.ndarray, tau: float, layer: int) -> int:
    # Errors fall with k up to local minima of k-means: the first k below the bound.
    flat = np.flatnonzero(np.asarray(errors) <= tau * errors[0])
    if not len(flat):
        raise ConfigError(
            f"layer {layer}: no error falls to {tau} of the first: give those up to "
            "as many clusters as heads"
        )
    return int(flat[0]) + 1


def _knee(errors: np.ndarray) -> int:
    # Equal distances between all heads give the chord itself, up to rounding.
    below = np.linspace(errors[0], errors[-1], len(errors)) - errors
    if errors[0] > 0 and below.max() <= 1e-6 * errors[0]:
        return len(errors)
    return int(np.argmax(below)) + 1
