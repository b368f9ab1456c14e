"""Options of shared parameters; importing this module imports no JAX."""

import dataclasses
from typing import Literal

from hpcjax.core.config import Config, Size

# Paths of what is beside the stores: small, and no weights, so not to be decayed.
NO_DECAY = "^shared/[^/]+/(coefficients|embeddings|maps|upsamplers)/"

Combine = Literal["wavg", "emb", "avg"]
Upsample = Literal["inter", "repeat", "mask", "wavg", "none"]
Placement = Literal["aligned", "circular"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharingOptions(Config):
    """How layers get their weights from the store of their group.

    Attributes:
      combine: of a store that holds several times a layer's weights, how these
        templates are combined: by free coefficients ("wavg"), by coefficients that a
        linear map makes of an embedding of the layer ("emb"), by their mean ("avg").
      upsample: of a store that is smaller than the layer: bilinear interpolation
        ("inter"), copies ("repeat"), copies times learned masks ("mask"), learned
        mixtures of its halves ("wavg"), or refusal ("none").
      placement: windows of one size side by side, which layers of one shape share
        ("aligned"), or each where the last one ended ("circular").
      templates: of a layer, at most.
      mask_window: neighbours that share a row of masks in "mask".
      embedding: length of a layer's embedding in "emb".
    """

    combine: Combine = "wavg"
    upsample: Upsample = "inter"
    placement: Placement = "aligned"
    templates: Size = 8
    mask_window: Size = 9
    embedding: Size = 24
