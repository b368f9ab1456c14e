"""Groups that are learned: layers that come to combine the same templates share.

Train a network with the weights of `plan_candidates` for a tenth of the usual time,
cluster the layers by what they learned, and begin anew with these groups.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcjax.compress.sharing import _stores
from hpcjax.compress.sharing._plan import Plan
from hpcjax.core import checks


def find_features(params: Any, plan: Plan) -> np.ndarray:
    """Returns what each layer has learned, `[layers, features]`.

    These are its coefficients before the softmax, or its embedding.

    Args:
      params: of the model from `share`.
      plan: from `plan_candidates`.
    """
    kept: Mapping[str, Any] = params["shared"][plan.digest]
    chosen = "embeddings" if plan.options.combine == "emb" else "coefficients"
    return np.stack(
        [np.asarray(kept[chosen][_stores.key_of(layer)]) for layer in plan.layers]
    )


def cluster_layers(features: np.ndarray, groups: int, seed: int = 0) -> tuple[int, ...]:
    """Returns the group of each layer, by k-means of their features.

    Args:
      features: from `find_features`.
      groups: k; with no more layers than that each has a group of its own.
      seed: of the first centres, the best of ten draws.

    Raises:
      ConfigError: fewer than one group.
    """
    from sklearn.cluster import KMeans

    checks.require_count(1, groups=groups)
    if len(features) <= groups:
        return tuple(range(len(features)))
    means = KMeans(groups, n_init=10, random_state=seed)
    return tuple(int(label) for label in means.fit(features.tolist()).labels_)
